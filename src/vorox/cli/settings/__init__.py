"""Settings: parsed from a command line, loaded, explained (``vorox config``), and summarised in one line."""
