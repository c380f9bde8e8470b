"""The passport of a checkpoint: what it is and was trained on, in the standard forms of other programs."""
