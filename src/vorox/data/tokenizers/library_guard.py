"""Call the ``tokenizers`` library so that a regular expression of others cannot end or hang this process.

The library panics where a match backtracks too often; a panic is no ``Exception``. An expression may also take
minutes for a text. Both become a ``DataError``, which the caller gives the place of the text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from vorox.core.errors import DataError

SECONDS, CHARACTERS_PER_SECOND = 30.0, 20_000
"""Time that a text may take: the first, and by its length. The library encodes millions of characters in a second."""

T = TypeVar("T")


def has_regex(value: dict[str, Any]) -> bool:
    """Whether a tokenizer.json applies regular expressions to texts."""
    return any(_has_key(value.get(name), "Regex") for name in ("normalizer", "pre_tokenizer"))


def call_library(function: Callable[[], T], num_characters: int, *, is_bounded: bool) -> T:
    """Return the result of a function of the library.

    Args:
        function: The call.
        num_characters: Length of its texts.
        is_bounded: Whether to bound its time: the call then runs in a thread, which a timeout leaves behind.

    Raises:
        DataError: The library panics, or the call takes too long.
    """
    if not is_bounded:
        return _without_panic(function)
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(_without_panic(function))
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="tokenizer")
    thread.start()
    seconds = SECONDS + num_characters / CHARACTERS_PER_SECOND
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        raise DataError(
            f"The tokenizer needs more than {seconds:.0f} s for {num_characters:,} characters", hint=_HINT,
        )  # fmt: skip
    return found[0]


def _without_panic(function: Callable[[], T]) -> T:
    try:
        return function()
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the type is not importable
            raise
        reason = (str(error).strip().splitlines() or ["panic"])[0]
        raise DataError(f"The tokenizer cannot encode this text: {reason[:200]}", hint=_HINT) from error


_HINT = "correct the regular expression in its tokenizer.json (pre_tokenizer, normalizer), or use another tokenizer"


def _has_key(value: Any, name: str) -> bool:
    if isinstance(value, dict):
        whole = cast("dict[str, Any]", value)
        return name in whole or any(_has_key(item, name) for item in whole.values())
    return isinstance(value, list) and any(_has_key(item, name) for item in cast("list[Any]", value))
