"""The start menu of vorox train; see start_menu.py."""
