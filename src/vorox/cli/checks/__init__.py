"""Checks: of this machine and the network between ranks, of recorded steps, and of one engine against the other."""
