"""Checks of a configuration: types and bounds, rules across settings, and which features work together."""
