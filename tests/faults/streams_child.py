"""A command of Vorox under the numpy engine, in a process of its own: for faults of its standard streams."""

import sys

import tiny_runs
import vorox.run
from vorox.cli import main

vorox.run.backends.load = lambda name: tiny_runs.NumpyBackend()
sys.exit(main(sys.argv[1:]))
