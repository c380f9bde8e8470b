"""The pages on the data order and on re-execution: pictures are what the code draws, claims about the order hold."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from data_order_pictures import BATCH, PICTURES, ROWS, WEIGHTS, addresses, pictures, plan, segment

PAGE = PICTURES.parent / "data_order.md"


@pytest.mark.parametrize("name", sorted(pictures()))
def test_a_picture_is_what_the_code_computes(name: str) -> None:
    drawn = pictures()[name]
    ElementTree.fromstring(drawn)
    assert (PICTURES / name).read_text(encoding="utf-8") == drawn, "run tests/data_order_pictures.py"
    page = PAGE.with_name("re_execution.md") if name == "re_execution.svg" else PAGE
    assert f"](pictures/{name})" in page.read_text(encoding="utf-8")


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGE.parent.glob("**/*.md"))
    assert [path.name for path in PICTURES.iterdir() if f"pictures/{path.name})" not in pages] == []


def test_shares_are_exact_after_every_step_and_an_epoch_reads_every_row_once() -> None:
    state = plan(WEIGHTS, [segment(name, 0, rows) for name, rows in ROWS.items()])
    found = addresses(state, 14 * BATCH)
    for step in range(1, 15):
        counts = np.bincount(found.source_index[: step * BATCH], minlength=len(WEIGHTS))
        exact = np.array(list(WEIGHTS.values())) * step * BATCH / sum(WEIGHTS.values())
        assert np.abs(counts - exact).max() < 2, "the page says: less than two draws"
    for number, rows in enumerate(ROWS.values()):
        first = found.row[(found.source_index == number) & (found.epoch == 0)]
        assert sorted(first.tolist()) == list(range(rows))


def test_an_event_changes_no_earlier_row() -> None:
    early = plan({"web": 1}, [segment("web", 0, 16, num_epochs=1)])
    late = early.apply(segment("web", 16, 24, num_epochs=1, unit=1))
    before, after = addresses(early, 16), addresses(late, 40)
    assert before.row.tolist() == after.row[:16].tolist()
    assert (before.unit_start == after.unit_start[:16]).all()
