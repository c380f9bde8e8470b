"""Loss masks: which tokens of a row are trained on, as ranges and as text with marks.

A mask of the tokens of a row goes in; ranges and text come out. The first token of a segment is never a target, because
nothing precedes it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vorox.data.documents import Ranges

OPEN, CLOSE = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"


def target_ranges(mask_T: npt.NDArray[np.bool_]) -> Ranges:
    """Return the ranges of the targets among the tokens of a segment."""
    mask = mask_T.copy()
    mask[:1] = False
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def marked_text(
    tokens_T: npt.NDArray[np.integer], targets: Ranges, decode: Callable[[npt.NDArray[np.integer]], str]
) -> str:
    """Return the text of some tokens, with its targets between ``OPEN`` and ``CLOSE``."""
    parts: list[str] = []
    end = 0
    for start, stop in targets:
        parts += [decode(tokens_T[end:start]), OPEN, decode(tokens_T[start:stop]), CLOSE]
        end = stop
    return "".join([*parts, decode(tokens_T[end:])])
