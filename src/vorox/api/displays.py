"""What ``vorox.train(display=...)`` accepts, and the progress bar that it shows.

In a notebook a bar appears by default; elsewhere training prints nothing unless ``display=True``. A function receives
every logged step; an object has any of the methods of ``training.loop.display.Display``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

from vorox.core.errors import ConfigError
from vorox.records.log import Level
from vorox.training.loop.display import Display, NoDisplay, StepView

_METHODS: Final = ("step", "message", "sample", "waiting", "close")
_SECONDS_BETWEEN_LINES = 5.0

DisplayChoice = bool | Display | Callable[[StepView], object] | object | None
"""``None``: a bar in a notebook only; true or false; a function; or an object with methods of a display."""


def display_of(choice: DisplayChoice) -> Display:
    """Return the display that an argument means.

    Raises:
        ConfigError: It is none.
    """
    if choice is None:
        return NotebookBar() if in_notebook() else NoDisplay()
    if choice is True:
        return NotebookBar() if in_notebook() else ProgressLines(sys.stdout)
    if choice is False:
        return NoDisplay()
    if isinstance(choice, type):
        raise _refusal(f"the class {choice.__name__}", "give an object of it")
    methods = {name: getattr(choice, name) for name in _METHODS if callable(getattr(choice, name, None))}
    if methods:
        return _Adapter(methods)
    if callable(choice):
        return _Adapter({"step": choice})
    raise _refusal(repr(choice), "")


def _refusal(what: str, more: str) -> ConfigError:
    return ConfigError(
        f"display={what} is no display", where="vorox.train",
        hint=more or "give True, a function f(view), or an object with a method step(view); view.step, view.loss, "
        "view.tokens_per_second and more are the numbers of a logged step",
    )  # fmt: skip


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows rich output."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and getattr(shell, "kernel", None) is not None


class _Adapter(NoDisplay):
    """Calls the methods that a user's object has; an exception in one ends the display, not the run."""

    def __init__(self, methods: dict[str, Callable[..., object]]) -> None:
        self._methods = methods

    def _call(self, name: str, *arguments: object) -> None:
        method = self._methods.get(name)
        if method is None:
            return
        try:
            method(*arguments)
        except Exception as error:  # the user's function may raise anything
            self._methods = {}
            text = f"display.{name} raised {type(error).__name__}: {error}; it is not called again"
            sys.stderr.write(f"warning: {text}\n")

    def step(self, view: StepView) -> None:
        self._call("step", view)

    def message(self, text: str, level: Level = "info") -> None:
        self._call("message", text, level)

    def sample(self, prompt: str, completion: str) -> None:
        self._call("sample", prompt, completion)

    def waiting(self, text: str | None) -> None:
        self._call("waiting", text)

    def close(self) -> None:
        self._call("close")


def summary(view: StepView) -> str:
    """Return the numbers of a step on one line."""
    speed = "" if view.tokens_per_second is None else f" | {view.tokens_per_second:,.0f} tok/s"
    left = "" if view.eta_seconds is None else f" | {_duration(view.eta_seconds)} left"
    return f"Step {view.step:,}/{view.total_steps:,} | loss {view.loss:.4g} | lr {view.learning_rate:.2g}{speed}{left}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressLines(NoDisplay):
    """A line for a step every few seconds, for the first and the last one, and for each warning.

    Args:
        stream: The output.
        clock: Seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._written_at = -float("inf")

    def step(self, view: StepView) -> None:
        now = self._clock()
        if view.step in (1, view.total_steps) or now - self._written_at >= _SECONDS_BETWEEN_LINES:
            self._written_at = now
            self._write(summary(view))

    def message(self, text: str, level: Level = "info") -> None:
        if level != "info":
            self._write(f"{level}: {text}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._stream, flush=True)


class NotebookBar(NoDisplay):
    """A bar below the cell, updated in place, with the newest warnings."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._view: StepView | None = None
        self._warnings: list[str] = []

    def step(self, view: StepView) -> None:
        self._view = view
        self._show()

    def message(self, text: str, level: Level = "info") -> None:
        if level != "info":
            self._warnings = [*self._warnings[-4:], f"{level}: {text}"]
            self._show()

    def _show(self) -> None:
        from html import escape

        lines = [*([] if self._view is None else [summary(self._view)]), *self._warnings]
        value, total = (0, 1) if self._view is None else (self._view.step, self._view.total_steps)
        bar = f'<progress value="{value}" max="{total}" style="width: 24em"></progress>'
        html = "<br>".join([bar, *map(escape, lines)])
        bundle = {"text/plain": "\n".join(lines), "text/html": html}
        output: Any = importlib.import_module("IPython.display")
        if self._handle is None:
            self._handle = output.display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
