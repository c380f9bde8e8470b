"""Resume: the checkpoint, the settings that may change, and the restored state."""
