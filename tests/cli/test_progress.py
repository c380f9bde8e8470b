"""Both displays show the same fields, survive anything, and cost little."""

from __future__ import annotations

import io
import math
import re
import threading
import time
from dataclasses import replace

import pytest

from processor_cost import cost
from vorox.cli.terminal.progress import LineDisplay, LiveDisplay, headline, loss_trend, open_display, sample_lines
from vorox.training.loop.display import Display, StepView

VIEW = StepView(
    step=770,
    total_steps=26_235,
    loss=5.5834,
    num_tokens=12_615_680,
    total_tokens=429_834_240,
    learning_rate=5.3e-4,
    grad_norm=0.42,
    epoch=0.41,
    tokens_per_second=106_212.3,
    mfu_fraction=0.412,
    eta_seconds=4 * 3600 + 23 * 60,
    time_fractions={"compute": 0.83, "data": 0.02, "save": 0.06, "eval": 0.09},
    memory_bytes={"host": 3 * 2**30, "device": 58.9 * 2**30},
    planned_memory_bytes=61.2 * 2**30,
    queue_depth=3,
    queue_capacity=4,
    seconds_since_save=94,
)
FIELDS = [
    "Step   770/26,235 ( 2.9%) | Loss: 5.583 | 106,212 tok/s | ETA: 04:23h",
    "12.6M / 429.8M tokens", "epoch 0.41", "lr 5.3e-04", "gnorm 0.42",
    "compute 83%", "data 2%", "save 6%", "eval 9%", "MFU 41.2%",
    "host 3.0 GiB", "device 58.9 GiB", "estimated 61.2 GiB", "queue 3/4", "saved 1m 34s ago",
]  # fmt: skip


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def screen(text: str) -> list[str]:
    """What a terminal shows after all this was written to it: the few escapes that a live display needs."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
            column = 0
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b"):
            number = int(part[2:-1]) if part[2:-1].isdigit() else 1
            if part.endswith("A"):
                row = max(0, row - number)
            elif part.endswith("K"):
                rows[row] = ""
        else:
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
            column += len(part)
    while rows and not rows[-1].strip():
        rows.pop()
    return rows


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def at_noon() -> float:
    return time.mktime((2026, 1, 2, 12, 41, 7, 0, 0, -1))


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")


def test_the_headline_is_exactly_the_promised_one() -> None:
    assert headline(VIEW) == FIELDS[0]


@pytest.mark.parametrize(
    ("step", "total", "percent"),
    [(0, 10, "( 0.0%)"), (26_234, 26_235, "(99.9%)"), (10, 10, "(100.0%)"), (12, 10, "(120.0%)")],
)
def test_only_a_finished_run_is_at_100_percent(step: int, total: int, percent: str) -> None:
    assert percent in headline(replace(VIEW, step=step, total_steps=total))


def test_unknown_numbers_are_left_out_or_dashes_not_zeros() -> None:
    view = StepView(1, 300, math.nan, 4096, 1_228_800, 1e-4, 3.5)
    assert headline(view) == "Step     1/300 ( 0.3%) | Loss: nan | ETA: --:--"


def test_a_logged_step_is_one_plain_line_of_fewer_than_120_columns() -> None:
    stream = io.StringIO()
    display = LineDisplay(stream)
    for step in (770, 780, 790):
        display.step(replace(VIEW, step=step, slow_cause="waiting for data 40% of the time: raise data.loader.threads"))
    lines = stream.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["Step   770", "  waiting ", "Step   780", "Step   790"], "a note once"
    assert lines[0].startswith(FIELDS[0])
    assert all(field in lines[0] for field in ("epoch 0.41", "lr 5.3e-04", "gnorm 0.42"))
    assert all(len(line) < 120 for line in lines)
    display.step(replace(VIEW, slow_cause="writing checkpoints 30% of the time: raise checkpoint.every_steps"))
    assert stream.getvalue().count("\n  writing") == 1
    assert "\x1b" not in stream.getvalue()
    display.message("a word " * 60 + "/a/path/" + "long" * 40)
    lines = stream.getvalue().splitlines()
    assert all(len(line) < 120 for line in lines[:-1])
    assert lines[-1].strip() == "/a/path/" + "long" * 40, "a path stays whole"


def test_the_live_block_has_the_same_fields() -> None:
    stream = Terminal()
    display = LiveDisplay(stream)
    display.step(VIEW)
    lines = screen(stream.getvalue())
    display.close()
    assert len(lines) == 4
    for field in FIELDS:
        assert field in "\n".join(lines)
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l"), "the cursor is back"


def test_the_trend_of_the_loss_fits_and_shows_a_spike() -> None:
    losses = [(10 * step, 8.0 - step / 10) for step in range(1, 61)]
    bars, text = loss_trend(losses, 120).split(" ", 1)
    assert (len(bars), bars[0], bars[-1]) == (40, "\u2588", "\u2581")
    assert list(bars) == sorted(bars, reverse=True)
    assert text == "steps 10 to 600 | mean of the last 10 2.450"
    losses[30] = (310, 30.0)
    bars = loss_trend(losses, 120).split(" ")[0]
    assert (bars.index("\u2588"), bars.count("\u2588")) == (20, 1)
    assert loss_trend([(1, 5.0)] * 4, 120).startswith("\u2581" * 4 + " "), "an even loss"
    assert loss_trend(losses[:3], 120) == ""
    assert loss_trend(losses, 50) == ""
    for width in range(52, 120):
        assert len("  loss  " + loss_trend(losses, width)) <= width


def test_the_live_block_has_the_trend_only_where_the_terminal_can_draw_it() -> None:
    for encoding, is_shown in (("utf-8", True), ("cp1252", False)):
        stream = Terminal()
        stream.encoding = encoding  # type: ignore[misc]
        display = LiveDisplay(stream)
        for step in range(1, 9):
            display.step(replace(VIEW, step=step, loss=math.nan if step == 3 else 9.0 - step))
        display.message("drawn again")
        display.waiting("for data")
        text = without_escapes(stream.getvalue())
        display.close()
        assert ("loss  \u2588" in text) == is_shown
        assert ("mean of the last 7" in text) == is_shown, "a loss that is not finite is left out"


def test_a_plan_of_tensors_is_not_shown_beside_the_memory_of_a_process() -> None:
    stream = Terminal()
    display = LiveDisplay(stream)
    display.step(replace(VIEW, memory_bytes={"host": 2.0**30}))
    display.close()
    assert "host 1.0 GiB" in stream.getvalue()
    assert "planned" not in stream.getvalue()


def test_messages_scroll_above_the_block() -> None:
    stream = Terminal()
    seconds = iter(range(100))
    display = LiveDisplay(stream, clock=lambda: at_noon() + next(seconds) / 10)
    display.step(VIEW)
    display.message("saved step 750", "info")
    display.message("the disk is nearly full", "warning")
    display.step(replace(VIEW, step=780))
    lines = screen(stream.getvalue())
    display.close()
    assert [line.strip() for line in lines[:2]] == ["12:41:07 saved step 750", "12:41:07 the disk is nearly full"]
    assert lines[2].startswith("Step   780/26,235")
    assert len(lines) == 6, "the block is there once, below"


WAIT = "waiting for data since 06:12:44 UTC because HTTP 503 after 3 failed tries [s3://bucket/crawl/07.jsonl.zst]"


def test_the_block_says_what_data_is_waited_for_as_long_as_it_is() -> None:
    """From another thread, while no step is shown: the one that would show it waits itself."""
    stream = Terminal()
    display = LiveDisplay(stream)
    display.waiting("before the first step there is no block")
    display.waiting(None)
    display.step(VIEW)
    for text, num_rows in ((WAIT, 5), (None, 4), (WAIT + "\x1b[2J", 5)):
        thread = threading.Thread(target=display.waiting, args=(text,))
        thread.start()
        thread.join()
        shown = screen(stream.getvalue())
        assert len(shown) == num_rows
        assert (f"  {WAIT}" in "\n".join(shown)) == (text is not None)
    assert "\x1b[2J" not in stream.getvalue()
    display.close()
    display.waiting(None)
    assert screen(stream.getvalue()) == [], "the run did not end, so nothing of the block is true any more"


def test_plain_lines_say_what_data_is_waited_for() -> None:
    stream = io.StringIO()
    display = LineDisplay(stream)
    display.waiting(WAIT)
    display.step(VIEW)
    display.waiting(None)
    display.step(VIEW)
    text = " ".join(stream.getvalue().split())
    assert text.count(" ".join(WAIT.split())) == 1
    assert text.index(" ".join(WAIT.split())) < text.rindex("Step 770"), "with the first of the two steps"


def test_a_narrow_terminal_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    display = LiveDisplay(stream)
    display.step(VIEW)
    lines = screen(stream.getvalue())
    display.close()
    assert len(lines) == 4
    assert all(len(line) <= 40 for line in lines)


@pytest.mark.parametrize("kind", [LineDisplay, LiveDisplay])
def test_a_sample_cannot_touch_the_terminal(kind: type[LineDisplay] | type[LiveDisplay]) -> None:
    stream = Terminal()
    kind(stream).sample("def ", "f():\n    return '\x1b[2J'")
    shown = stream.getvalue()
    assert "\x1b[2J" not in shown
    assert "│ def »f():" in shown
    assert "│     return '\ufffd[2J'" in shown


@pytest.mark.parametrize("kind", [LineDisplay, LiveDisplay])
def test_a_terminal_that_goes_away_ends_the_display_only(kind: type[LineDisplay] | type[LiveDisplay]) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    display: Display = kind(Gone())
    for _ in range(3):
        display.step(VIEW)
        display.message("x")
        display.sample("a", "b")
        display.waiting("c")
    display.close()
    display.close()


def test_a_stream_that_cannot_write_unicode() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    LineDisplay(stream).sample("größe", "\N{SNOWMAN}")
    assert b"gr??e" in raw.getvalue()


def test_a_long_sample_is_shown_in_three_lines() -> None:
    shown = sample_lines("def ", "f():\n" + "\n".join(f"    line {n} " + "x" * 100 for n in range(40)))
    assert len(shown) == 3
    assert all(len(line) <= 80 for line in shown)
    assert shown[-1].endswith("\u2026")
    assert sample_lines("a", "b") == ["  │ a»b"]


def test_the_display_suits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_display(io.StringIO()), LineDisplay)
    assert isinstance(open_display(Terminal()), LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(Terminal()), LineDisplay)


def test_redraws_are_limited_but_the_last_step_is_always_shown() -> None:
    stream = Terminal()
    display = LiveDisplay(stream, clock=lambda: 100.0)
    for step in range(1, 100):
        display.step(replace(VIEW, step=step, total_steps=100))
    display.step(replace(VIEW, step=100, total_steps=100))
    shown = without_escapes(stream.getvalue())
    assert "Step     2/100" not in shown
    assert "100/100 (100.0%)" in screen(stream.getvalue())[0]


def test_a_logged_step_costs_little() -> None:
    now = iter(range(10**9))
    display = LiveDisplay(Terminal(), clock=lambda: float(next(now)))
    display.step(VIEW)
    assert cost(lambda: [display.step(VIEW) for _ in range(50)]) / 50 < 4


def test_a_run_that_was_stopped_leaves_no_stale_block() -> None:
    stream = Terminal()
    display = LiveDisplay(stream)
    display.step(VIEW)
    display.message("Saved step-00000771")
    display.close()
    (line,) = screen(stream.getvalue())
    assert line.endswith("Saved step-00000771")


@pytest.mark.parametrize("width", [80, 120, 200])
def test_nothing_on_a_terminal_is_wider_or_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    display = LiveDisplay(stream)
    display.message("24,704 parameters on Intel(R) Xeon(R) Processor, 3,000 steps; determinism bitwise: the same bits")
    display.step(replace(VIEW, memory_bytes={"host": 3 * 2**30}))
    lines = screen(stream.getvalue())
    display.close()
    assert all(len(line) <= width for line in lines)
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    assert all(line.startswith(" " * 9) for line in lines[1:-4]), "what goes on below is indented"
    assert "gnorm 0.42" in lines[-3]


def test_a_finished_run_leaves_nothing_that_was_true_of_a_moment() -> None:
    stream = Terminal()
    display = LiveDisplay(stream)
    display.step(replace(VIEW, step=VIEW.total_steps, seconds_since_save=None))
    display.message("Saved step-00026235")
    display.close()
    text = "\n".join(screen(stream.getvalue()))
    assert "100.0%" in text
    assert "no checkpoint yet" not in text
    assert "queue" not in text


def test_a_cause_of_slowness_is_one_line_of_both_displays() -> None:
    cause = "data 31% of the time: raise data.loader.num_threads 2 -> 4"
    lines, live = io.StringIO(), Terminal()
    LineDisplay(lines).step(replace(VIEW, slow_cause=cause))
    assert cause in lines.getvalue()
    display = LiveDisplay(live)
    display.step(replace(VIEW, slow_cause=cause))
    assert f"  slow  {cause}" in screen(live.getvalue())
    display.close()


def test_a_block_is_redrawn_at_most_four_times_a_second() -> None:
    stream, now = Terminal(), 0.0
    display = LiveDisplay(stream, clock=lambda: now)
    drawn = 0
    for number in range(100):  # 100 steps in two seconds
        now, before = number * 0.02, len(stream.getvalue())
        display.step(replace(VIEW, step=number + 1))
        drawn += len(stream.getvalue()) > before
    display.close()
    assert 7 <= drawn <= 8
