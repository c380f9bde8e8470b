"""Processes that train together: their groups, collectives, and how they divide a parameter."""
