"""The work of ``vorox train``: which run, its start menu, the run itself, and the summary at its end."""
