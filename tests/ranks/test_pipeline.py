"""Pipeline parallelism with PyTorch: the numbers of one process, on every rank, for random rows of a fresh seed.

Tolerances are those of ``layouts.py``. Three layers of five are on one rank and two on the other in the interleaved and
the zero-bubble schedule. Tied and untied embeddings, documents with masks and positions, activation statistics with
checkpointing, embedding noise and Muon are among the cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.layouts import check_layouts, save_one_device

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize(
    ("layouts", "count"),
    [(["1,1,1,2", "1,2,1"], 2), (["2,1,1,2", "1,2,1,2"], 4)],
    ids=["alone, then FSDP2", "with replicas, and with FSDP2"],
)
def test_every_rank_computes_what_one_process_computes(layouts: list[str], count: int, tmp_path: Path) -> None:
    """The state of one process also goes through a pipeline, FSDP2 and back to one process unchanged."""
    check_layouts(save_one_device(tmp_path), layouts, count, tmp_path)
