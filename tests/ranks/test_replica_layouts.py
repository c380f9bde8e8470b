"""Replicas, FSDP2 and both, also with tensor parallelism, with PyTorch: on every rank the numbers of one process.

Tolerances are those of ``layouts.py``, rows those of a fresh seed. Three kinds together need eight ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.layouts import check_layouts

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize(
    "layouts",
    [["2", "1,2"], ["4", "1,4", "2,2"], ["2,2,2"]],
    ids=["two", "four", "replicas, FSDP2 and tensor parallelism"],
)
def test_every_rank_computes_what_one_process_computes(layouts: list[str], tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(layouts, tmp_path)
