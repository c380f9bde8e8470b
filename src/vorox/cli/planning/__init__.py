"""A run before it starts: ``vorox plan`` and ``vorox train --dry-run``."""
