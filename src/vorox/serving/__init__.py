"""OpenAI's HTTP API for a trained model: the server of vorox serve."""
