"""The display of a run: a live block on a terminal, plain lines elsewhere, with the same fields.

``StepView``, messages and samples go in (``training.loop.display.Display``), text on one stream comes out. On a
terminal a block of a few lines is redrawn in place, and events and samples scroll above it. A display never raises,
never blocks and starts no thread. If the terminal is closed, the display ends and the run continues. Thread-safe.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vorox.cli.terminal.humanize import count, duration, eta, number, percent, printable, size, small, speed, wrap
from vorox.cli.terminal.standard_streams import raw_stream
from vorox.records.log import Level
from vorox.training.loop.display import Display, NoDisplay, StepView

_SAMPLE_LINES, _SAMPLE_COLUMNS = 3, 76
_MIN_BAR_CELLS, _BAR_CELLS = 4, 40
_LINE_COLUMNS = 119
_INDENT_COLUMNS = len("00:00:00 ")
_MIN_REDRAW_SECONDS = 0.25
_HISTORY = 200
_MEAN_OF = 10
_MIN_HISTORY = 4
_BARS = "".join(map(chr, range(0x2581, 0x2589)))
_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def open_display(stream: TextIO | None = None) -> Display:
    """Return the display for a stream (default: standard output): live on a terminal, lines elsewhere."""
    stream = stream or sys.stdout
    if stream is None:  # a process without standard output, such as pythonw
        return NoDisplay()
    if stream.isatty() and os.environ.get("TERM", "") not in {"dumb", "unknown"}:
        return LiveDisplay(stream)
    return LineDisplay(stream)


def headline(view: StepView) -> str:
    """Return ``Step   770/26,235 ( 2.9%) | Loss: 5.583 | 106,212 tok/s | ETA: 04:23h``."""
    done = 100 * view.step / view.total_steps
    done = done if view.step >= view.total_steps else min(done, 99.9)
    rate = "" if view.tokens_per_second is None else f"{speed(view.tokens_per_second)} | "
    return (
        f"Step {view.step:>5,}/{view.total_steps:,} ({done:4.1f}%) | Loss: {number(view.loss)} | "
        f"{rate}ETA: {eta(view.eta_seconds)}"
    )


def position_fields(view: StepView) -> list[str]:
    """Return tokens, epoch, learning rate and gradient norm."""
    return [
        f"{count(view.num_tokens)} / {count(view.total_tokens)} tokens",
        f"epoch {number(view.epoch, 2)}",
        f"lr {small(view.learning_rate)}",
        f"gnorm {small(view.grad_norm)}",
    ]


def time_fields(view: StepView) -> list[str]:
    """Return the shares of time, MFU and the fraction of the measured matmul peak."""
    return [f"{use} {percent(fraction)}" for use, fraction in view.time_fractions.items()] + _shares_of_peak(view)


def _shares_of_peak(view: StepView) -> list[str]:
    fields: list[str] = []
    if view.mfu_fraction is not None:
        fields.append(f"MFU {percent(view.mfu_fraction, 1)}")
    if view.matmul_peak_fraction is not None:
        fields.append(f"of matmul peak {percent(view.matmul_peak_fraction, 1)}")
    return fields


def resource_fields(view: StepView) -> list[str]:
    """Return memory use and estimate, prefetch queue, and age of the last checkpoint."""
    fields = [f"{where} {size(used)}" for where, used in view.memory_bytes.items()]
    if view.planned_memory_bytes is not None and "device" in view.memory_bytes:  # the estimate has tensors only
        fields.append(f"estimated {size(view.planned_memory_bytes)}")
    if view.queue_depth is not None:
        capacity = "" if view.queue_capacity is None else f"/{view.queue_capacity}"
        fields.append(f"queue {view.queue_depth}{capacity}")
    age = view.seconds_since_save
    fields.append("no checkpoint yet" if age is None else f"saved {duration(age)} ago")
    return fields


class LineDisplay:
    """One line of fewer than 120 columns for each logged step; messages continue, indented, on the next line.

    What does not fit into the line of a step is in ``metrics.jsonl``. What slows the run down, or what it waits for,
    has a line of its own when it changes.

    Args:
        stream: The output.
        clock: Seconds since the epoch, for the timestamps of messages.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        self._stream: TextIO | None = stream
        self._clock = clock
        self._waiting: str | None = None
        self._notes: set[str] = set()

    def step(self, view: StepView) -> None:
        tokens, *position = position_fields(view)
        line = headline(view)
        for field in [*position, tokens, *_shares_of_peak(view), *resource_fields(view)[-1:]]:
            if len(line) + len(field) + 3 <= _LINE_COLUMNS:
                line += f" | {field}"
        self._write(line)
        for note in (view.slow_cause, None if self._waiting is None else printable(self._waiting)):
            if note and note not in self._notes:
                self._write(wrap(f"  {note}", _LINE_COLUMNS, 2))
                self._notes.add(note)

    def message(self, text: str, level: Level = "info") -> None:
        mark = "" if level == "info" else f"{level}: "
        whole = f"{_time_of_day(self._clock())} {mark}{printable(text)}"
        self._write(wrap(whole, _LINE_COLUMNS, _INDENT_COLUMNS))

    def sample(self, prompt: str, completion: str) -> None:
        self._write("\n".join(sample_lines(prompt, completion)))

    def waiting(self, text: str | None) -> None:
        """Show a wait in the lines of steps; the log reports a long wait in lines of its own."""
        self._waiting = text

    def close(self) -> None:
        self._stream = None

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the reader has gone, or the stream is closed
            self._stream = None


class LiveDisplay:
    """A block at the bottom of the terminal, with messages and samples above it.

    Args:
        stream: The terminal.
        clock: Seconds since the epoch.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        class Terminal(Console):
            def on_broken_pipe(self) -> None:
                """Raise, where Rich would end the process: a run outlives its terminal."""
                raise OSError("the terminal has gone")

        self._clock = clock
        self._console = Terminal(file=raw_stream(stream), highlight=False, markup=False, emoji=False, soft_wrap=False)
        self._live: Live | None = Live(
            console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop",
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._lock = threading.RLock()
        self._view: StepView | None = None
        self._losses: deque[tuple[int, float]] = deque(maxlen=_HISTORY)
        self._has_bars = (getattr(stream, "encoding", None) or "ascii").lower().startswith("utf")
        self._waiting: str | None = None
        self._started = False
        self._drawn_at = -math.inf

    def step(self, view: StepView) -> None:
        if math.isfinite(view.loss):
            self._losses.append((view.step, view.loss))
        now = self._clock()
        is_recent = 0 <= now - self._drawn_at < _MIN_REDRAW_SECONDS  # negative if the clock was set back
        if is_recent and view.step < view.total_steps:
            return
        self._drawn_at, self._view = now, view
        self._draw(self._show)

    def waiting(self, text: str | None) -> None:
        if text != self._waiting:
            self._waiting = text
            self._draw(self._show)

    def message(self, text: str, level: Level = "info") -> None:
        def print_message() -> None:
            whole = f"{_time_of_day(self._clock())} {printable(text)}"
            shown = Text(wrap(whole, self._console.width, _INDENT_COLUMNS), style=_STYLES[level])
            shown.stylize("dim", 0, len("00:00:00"))
            self._console.print(shown)

        self._draw(print_message)

    def sample(self, prompt: str, completion: str) -> None:
        text = Text("\n".join(sample_lines(prompt, completion)), style="cyan")
        self._draw(lambda: self._console.print(text))

    def close(self) -> None:
        with self._lock:
            live, self._live = self._live, None
            if live is not None and self._started:
                live.transient = self._view is not None and self._view.step < self._view.total_steps  # it is stale
                if self._view is not None and not live.transient:
                    live.update(self._block(None, is_final=True))
                with contextlib.suppress(OSError, ValueError):  # there may be no terminal left to restore
                    live.stop()

    def _show(self) -> None:
        assert self._live is not None
        if self._view is None:
            return
        if not self._started:
            self._live.start()
            self._started = True
        self._live.update(self._block(self._waiting), refresh=True)

    def _block(self, waiting: str | None, *, is_final: bool = False) -> Text:
        assert self._view is not None
        trend = loss_trend(self._losses, self._console.width) if self._has_bars else ""
        return _block(self._view, waiting, self._console.width, trend, is_final=is_final)

    def _draw(self, action: Callable[[], object]) -> None:
        with self._lock:
            if self._live is None:
                return
            try:
                action()
            except (OSError, ValueError):  # the terminal has gone
                self._live = None


def loss_trend(losses: Sequence[tuple[int, float]], width: int) -> str:
    """Return the recent losses as bars, their steps and the newest mean; empty for very few, or in a narrow terminal.

    Args:
        losses: Step and loss of the newest logged steps, ascending.
        width: Columns of the terminal.
    """
    values = [loss for _, loss in losses]
    if len(values) < _MIN_HISTORY:
        return ""
    newest = values[-_MEAN_OF:]
    mean = number(sum(newest) / len(newest))
    text = f"steps {losses[0][0]:,} to {losses[-1][0]:,} | mean of the last {len(newest)} {mean}"
    cells = min(_BAR_CELLS, len(values), width - len(text) - len("  loss   "))
    if cells < _MIN_BAR_CELLS:
        return ""
    edges = [index * len(values) // cells for index in range(cells + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    heights = [round((mean - low) / (high - low or 1) * (len(_BARS) - 1)) for mean in means]
    return f"{''.join(_BARS[height] for height in heights)} {text}"


def _block(view: StepView, waiting: str | None, width: int, trend: str, *, is_final: bool = False) -> Text:
    """Return the lines of the block; the final one omits momentary values."""
    done = min(1.0, view.step / view.total_steps)
    position = " | ".join(position_fields(view))
    cells = max(_MIN_BAR_CELLS, min(_BAR_CELLS, width - len(position) - len("  [] ")))
    filled = int(cells * done)
    bar = f"[{'#' * filled}{'-' * (cells - filled)}]"
    block = Text(no_wrap=True, overflow="ellipsis")
    block.append(headline(view)[:width], style="bold" if math.isfinite(view.loss) else "bold red")
    rows = [f"  {bar} {position}"]
    if view.time_fractions:
        rows.append("  time  " + " | ".join(time_fields(view)))
    if trend:
        rows.append(f"  loss  {trend}")
    if not is_final:
        rows.append("  now   " + " | ".join(resource_fields(view)))
    for row in rows:
        block.append("\n" + row)
    if view.slow_cause and not is_final:
        block.append(f"\n  slow  {view.slow_cause}", style="yellow")
    if waiting:
        block.append(f"\n  {printable(waiting)}", style="yellow")
    return block


def sample_lines(prompt: str, completion: str) -> list[str]:
    """Return the first lines of a sample, with the end of the prompt marked. log.txt has all of it."""
    text = f"{printable(prompt)}\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}{printable(completion).rstrip()}"
    lines = [line for line in text.split("\n") if line.strip()] or [text]
    shown = [line if len(line) <= _SAMPLE_COLUMNS else line[: _SAMPLE_COLUMNS - 1] + "\u2026" for line in lines]
    if len(shown) > _SAMPLE_LINES:
        shown = [*shown[: _SAMPLE_LINES - 1], shown[_SAMPLE_LINES - 1][: _SAMPLE_COLUMNS - 2] + " \u2026"]
    return [f"  \N{BOX DRAWINGS LIGHT VERTICAL} {line}" for line in shown]


def _time_of_day(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
