"""Harmless messages of libraries are dropped, all others are logged."""

from __future__ import annotations

import logging

import pytest

from vorox.core.platform.library_logs import silence_torchao


def test_only_missing_kernels_of_other_devices_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        silence_torchao()
    logging.getLogger("torchao").warning("Failed to load _C.so")
    assert caplog.messages == []
    logging.getLogger("torchao").warning("weights are not finite")
    assert caplog.messages == ["weights are not finite"]
