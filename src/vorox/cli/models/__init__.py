"""The work of commands on a trained model: generate, chat, serve, eval, export and compress."""
