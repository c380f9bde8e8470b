"""What is kept and what may go: built units by key, pins, replaced caches, the disk budget, garbage."""
