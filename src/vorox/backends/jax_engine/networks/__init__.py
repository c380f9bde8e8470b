"""What is done with a whole decoder outside of a step: decoding, and checks of functions of the user in it."""
