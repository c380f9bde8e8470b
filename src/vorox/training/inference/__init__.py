"""A trained model in one process: found, loaded, continued as text, talked to."""
