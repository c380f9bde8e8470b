"""Fixtures for hundreds of small builds, which check system calls and their order, not disk speed."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``os.fsync`` a no-op; the states after a power cut are enumerated instead."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
