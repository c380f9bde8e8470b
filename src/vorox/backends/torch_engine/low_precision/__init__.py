"""Products and weights in fewer bits: FP8, INT4, and training that is aware of them."""
