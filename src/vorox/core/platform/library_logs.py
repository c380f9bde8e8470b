"""Filters for harmless messages that libraries log when they are imported."""

from __future__ import annotations

import logging
from functools import partial

_HARMLESS = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum ",
    "torchao.kernel.intmm": "Warning: Detected no triton",
}
"""Loggers and starts of the messages by which importing torchao reports kernels for other devices."""


def _is_wanted(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)


_FILTERS = {name: partial(_is_wanted, start) for name, start in _HARMLESS.items()}


def silence_torchao() -> None:
    """Silence what torchao logs when it is first imported, which transformers does for it; all else is logged."""
    for name, is_wanted in _FILTERS.items():
        logging.getLogger(name).addFilter(is_wanted)  # once, however often this is called
