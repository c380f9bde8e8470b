"""The steps of a run: how many, their rates, their rows, and what settles after each."""
