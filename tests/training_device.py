"""The device that the tests train on: the CPU, or what ``TESTS_DEVICE`` names, for example ``cuda``."""

from __future__ import annotations

import os

DEVICE = os.environ.get("TESTS_DEVICE", "cpu")
