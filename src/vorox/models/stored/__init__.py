"""What a checkpoint says of its model, and its training state in the one form that all engines share."""
