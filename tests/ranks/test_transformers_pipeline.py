"""Models of transformers in the stages of a pipeline: the numbers of one process on every rank, for random packed rows.

Tolerances are those of ``layouts.py``: losses and norms of 20 steps agree within 1e-5 (relative), weights to a
hundredth of the distance that training moves them. A checkpoint is whole: another layout continues with it, element by
element. Embeddings are tied and untied, blocks are recomputed or not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.layouts import check_layouts, save_one_device

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.slow]


@pytest.mark.parametrize(
    ("layouts", "count"),
    [
        (["1,1,1,2:transformers qwen3+transformers llama"], 2),
        (["2,1,1,2:transformers llama", "1,2,1,2:transformers qwen3"], 4),
    ],
    ids=["alone", "with replicas, and with FSDP2"],
)
def test_every_rank_computes_what_one_process_computes(layouts: list[str], count: int, tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(save_one_device(tmp_path, "transformers qwen3"), layouts, count, tmp_path)
