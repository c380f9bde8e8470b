"""Hundreds of small builds: the tests look at which calls are made and in what order, not at how fast the disk is."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """``os.fsync`` returns at once; what a power cut would take is enumerated, not waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
