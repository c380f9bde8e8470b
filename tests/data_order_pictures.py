"""Draw the pictures of docs/data_order.md from the functions that they explain, and that of docs/re_execution.md.

``python tests/data_order_pictures.py`` writes ``docs/pictures``; ``test_data_order.py`` compares them with the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from html import escape
from pathlib import Path

import numpy as np

from vorox.data.cache.units.packing import pack
from vorox.data.order.plan_events import PlanSource, PlanStart, Segment, UnitRange
from vorox.data.order.plan_state import Addresses, PlanState

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
COLOURS = ("#2f5fd0", "#b4641a", "#1a8f6a", "#b0418f", "#6b56c9", "#8a7a1f", "#2a94ad", "#b5483f")
INK, MUTED, EMPTY = "#1c1d20", "#6a6d75", "#e4e4e1"
CELL = 26
DOCUMENTS = (12, 5, 9, 22, 3, 7, 4, 14, 6, 2)
ROW_TOKENS = 16
SEED, BATCH = 1, 8
WEIGHTS = {"web": 4, "books": 2, "code": 1}
ROWS = {"web": 20, "books": 12, "code": 6}


class Picture:
    """An SVG drawing on a white card, which is readable on a light and on a dark page."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(description)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            '<g font-family="system-ui, -apple-system, Segoe UI, DejaVu Sans, sans-serif" font-size="13">',
        ]

    def box(self, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}" stroke="#ffffff"/>'
        )
        if text:
            ink = MUTED if colour == EMPTY else "#ffffff"
            self.text(x + width / 2, y + height / 2 + 4.5, text, colour=ink, anchor="middle", size=12)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = INK,
        anchor: str = "start",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{MUTED}" stroke-dasharray="4 3"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self._parts, "</g>", "</svg>", ""])


def segment(
    source: str, start_draw: int, num_rows: int, *, epoch: int = 0, num_epochs: int = 9, unit: int = 0
) -> Segment:
    return Segment(source, start_draw, epoch, num_epochs, (UnitRange(unit, unit + 1, num_rows),), "0" * 64)


def plan(weights: dict[str, int], segments: Iterable[Segment], *, shuffle: bool = True) -> PlanState:
    """A plan of some sources, with the segments of their caches."""
    sources = tuple(PlanSource(name, Fraction(weight), "recipe", ROW_TOKENS) for name, weight in weights.items())
    state = PlanState.initial(PlanStart(SEED, shuffle, BATCH, sources))
    return state.apply_all([*segments])


def addresses(state: PlanState, num_positions: int) -> Addresses:
    return state.locate(np.arange(num_positions, dtype=np.int64))


def packing_picture() -> str:
    """Documents of different lengths, and the rows that both methods make of them."""
    unit = 14
    picture = Picture(760, 468, "Ten documents, packed into rows of 16 tokens by best_fit and by concat")

    def fragments(x: float, y: float, method: str, title: str) -> None:
        packed = pack(DOCUMENTS, ROW_TOKENS, "concat" if method == "concat" else "best_fit")
        picture.text(x, y - 12, title, bold=True)
        for row in range(packed.num_rows):
            top, used = y + row * (CELL + 4), 0
            picture.box(x, top, ROW_TOKENS * unit, CELL, EMPTY)
            for index in range(int(packed.row_ptr[row]), int(packed.row_ptr[row + 1])):
                length, document = int(packed.lengths[index]), int(packed.documents[index])
                colour = COLOURS[document % len(COLOURS)]
                picture.box(x + used * unit, top, length * unit, CELL, colour, str(document))
                used += length

    picture.text(24, 32, "documents", bold=True)
    for number, length in enumerate(DOCUMENTS):
        colour = COLOURS[number % len(COLOURS)]
        picture.box(24, 44 + number * (CELL + 4), length * 8, CELL, colour, str(number))
    fragments(252, 44, "best_fit", "best_fit: longest first, into the fullest row with room")
    packed_rows = pack(DOCUMENTS, ROW_TOKENS, "best_fit").num_rows
    fragments(252, 44 + packed_rows * (CELL + 4) + 36, "concat", "concat: one stream, cut at every row")
    picture.text(500, 62, "grey: padding", colour=MUTED)
    return picture.svg()


def permutation_picture() -> str:
    """The rows of one source, in stored order and in the order of two epochs."""
    rows = 24
    state = plan({"web": 1}, [segment("web", 0, rows)])
    picture = Picture(760, 190, "24 stored rows, and the order in which epochs 0 and 1 read them")
    drawn = addresses(state, 2 * rows)
    lines = [("stored", list(range(rows)))]
    lines += [(f"epoch {epoch}", drawn.row[epoch * rows : (epoch + 1) * rows].tolist()) for epoch in (0, 1)]
    for number, (title, order) in enumerate(lines):
        y = 34 + number * 52
        picture.text(24, y + 18, title, bold=True)
        for index, row in enumerate(order):
            share = row / (rows - 1)
            colour = f"rgb({round(47 + 140 * share)}, {round(95 + 30 * share)}, {round(208 - 150 * share)})"
            picture.box(104 + index * CELL, y, CELL, CELL, colour, str(row))
    return picture.svg()


def mixture_picture() -> str:
    """Eight steps of eight slots of a mixture of three sources, with the row that each slot reads."""
    steps = 7
    state = plan(WEIGHTS, [segment(name, 0, rows) for name, rows in ROWS.items()])
    found = addresses(state, steps * BATCH)
    picture = Picture(760, 300, "Seven steps of eight slots: each reads the row of one of three sources")
    names = list(WEIGHTS)
    for slot in range(BATCH):
        picture.text(24, 66 + slot * (CELL + 4), f"slot {slot}", colour=MUTED)
    for step in range(steps):
        x = 84 + step * 62
        picture.text(x + 27, 34, f"step {step + 1}", anchor="middle", bold=True)
        for slot in range(BATCH):
            at = step * BATCH + slot
            source, row, epoch = (int(values[at]) for values in (found.source_index, found.row, found.epoch))
            picture.box(
                x, 48 + slot * (CELL + 4), 54, CELL, COLOURS[source], f"{row}" + (f" (e{epoch})" if epoch else "")
            )
    total = sum(WEIGHTS.values())
    picture.text(540, 34, "after 7 steps", bold=True)
    for number, name in enumerate(names):
        count, exact = int((found.source_index == number).sum()), steps * BATCH * WEIGHTS[name] / total
        y = 48 + number * 56
        picture.box(540, y, 20, 20, COLOURS[number])
        picture.text(568, y + 15, f"{name}: weight {WEIGHTS[name]}, {ROWS[name]} rows")
        picture.text(568, y + 33, f"{count} draws ({exact:g} by weight)", colour=MUTED)
    picture.text(540, 240, "number: the row of the source", colour=MUTED)
    picture.text(540, 258, "e1: second pass over the source", colour=MUTED)
    return picture.svg()


def growth_picture() -> str:
    """A cache that grows: a segment joins the plan before the step that first reads it."""
    first, second = 16, 24
    early = plan({"web": 1}, [segment("web", 0, first, num_epochs=1)])
    state = early.apply(segment("web", first, second, num_epochs=1, unit=1))
    picture = Picture(760, 300, "Two segments of a growing cache, and the steps that read them")
    found, steps = addresses(state, first + second), (first + second) // BATCH
    for step in range(steps):
        x = 130 + step * 62
        picture.text(x + 27, 46, f"step {step + 1}", anchor="middle", bold=True)
        for slot in range(BATCH):
            at = step * BATCH + slot
            part = int(found.unit_start[at])
            picture.box(x, 58 + slot * (CELL - 2), 54, CELL - 4, COLOURS[part], str(int(found.row[at]) + part * first))
    x = 130 + 62 * (first // BATCH) - 4
    picture.line(x, 24, x, 262)
    picture.text(x + 6, 22, "plan event: unit 1 (24 rows) joins at draw 16", colour=MUTED)
    picture.text(24, 76, "unit 0", colour=COLOURS[0], bold=True)
    picture.text(24, 94, "rows 0 to 15", colour=MUTED)
    picture.text(24, 124, "unit 1", colour=COLOURS[1], bold=True)
    picture.text(24, 142, "rows 16 to 39", colour=MUTED)
    picture.text(
        24, 284, "Steps 1 and 2 are the same with and without the event: what is planned never changes.", colour=MUTED
    )
    return picture.svg()


def re_execution_picture() -> str:
    """A run with a kill, a state of it that nobody saved, and a fork."""
    saved, killed, wanted, forked, read = (4, 8, 12), 6, 7, 6, 9
    picture = Picture(760, 280, "Steps of a run that was killed, of a state computed again, and of a fork")

    def line(y: float, title: str, steps: Iterable[int], colours: dict[int, str], note: str) -> None:
        picture.text(24, y + 18, title, bold=True)
        for step in steps:
            picture.box(130 + (step - 1) * 42, y, 42, CELL, colours.get(step, COLOURS[0]), str(step))
        picture.text(130, y + CELL + 16, note, colour=MUTED, size=12)

    every = range(1, 13)
    lost = dict.fromkeys(range(saved[0] + 1, killed + 1), EMPTY)
    line(24, "the run, killed", range(1, killed + 1), lost, "killed in step 6: steps 5 and 6 are lost")
    line(84, "and resumed", every, dict.fromkeys(range(1, saved[0] + 1), EMPTY), "again from the state after step 4")
    for step in saved:
        x = 130 + step * 42
        picture.line(x, 18, x, 118)
    picture.text(142 + 12 * 42, 60, "saved after", colour=MUTED, size=12)
    picture.text(142 + 12 * 42, 76, "4, 8, 12", colour=MUTED, size=12)
    again = dict.fromkeys(range(saved[0] + 1, wanted + 1), COLOURS[2]) | {wanted + 1: COLOURS[1]}
    line(
        154, f"state {wanted}", range(saved[0] + 1, wanted + 2), again,
        "from the state after 4, each step compared with the record; step 8 proves the state after 7",
    )  # fmt: skip
    fork = dict.fromkeys(range(1, forked + 1), EMPTY) | dict.fromkeys(range(read, 13), COLOURS[3])
    line(
        222, "fork at 6", every, fork,
        "without a document that step 9 reads: the same bits up to step 8, then the effect of the change",
    )  # fmt: skip
    return picture.svg()


def pictures() -> dict[str, str]:
    """Return the pictures by the names of their files."""
    return {
        "packing.svg": packing_picture(),
        "permutation.svg": permutation_picture(),
        "mixture.svg": mixture_picture(),
        "growth.svg": growth_picture(),
        "re_execution.svg": re_execution_picture(),
    }


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (PICTURES / name).write_text(text, encoding="utf-8")
