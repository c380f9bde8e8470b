"""Pipeline parallelism with PyTorch: the numbers of one process, on every rank, for random rows of a fresh seed.

Tolerances are those of ``test_tensor_parallel.py``. Three layers of five are on one rank and two on the other in the
interleaved schedule. Tied and untied embeddings, documents with masks and positions, activation statistics with
checkpointing, embedding noise and Muon are among the cases.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.divided_decoders import cases_of, config_of, engine_of, train
from ranks.processes import stored_arrays
from ranks.test_sharded_checkpoints import on_ranks, recorded
from ranks.test_tensor_parallel import SEED, alone, check_case
from vorox.core.distributed_context import DistributedContext
from vorox.core.staged_directory import verify_directory

__all__ = ["alone"]  # a fixture

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@cache
def on_one_device(case: str) -> dict[str, Any]:
    return train(engine_of(config_of(case), DistributedContext()), SEED)


@pytest.mark.parametrize(
    ("layouts", "count"), [(["1,1,1,2", "1,2,1"], 2), (["2,1,1,2"], 4)], ids=["alone, then FSDP2", "with replicas"]
)
def test_every_rank_computes_what_one_process_computes(
    alone: Path, layouts: list[str], count: int, tmp_path: Path
) -> None:
    """The state of one process also goes through a pipeline, FSDP2 and back to one process unchanged."""
    on_ranks("ranks.divided_decoders", count, SEED, alone, tmp_path, *layouts)
    for case in cases_of(layouts[0]):
        start = dict(engine_of(config_of(case), DistributedContext()).export_weights())
        ranks = [dict(np.load(tmp_path / f"{layouts[0]}-{case}-{rank}.npz")) for rank in range(count)]
        assert len({str(found["bits"]) for found in ranks}) == 1, "both copies of a tied embedding have the same bits"
        for rank, found in enumerate(ranks):
            check_case(found, on_one_device(case), start, f"seed {SEED}, {layouts[0]}, {case}, rank {rank}")
    expected_state = stored_arrays(alone)
    for saved in (tmp_path / f"saved-{layout}" for layout in layouts):
        verify_directory(saved)
        found_state = stored_arrays(saved)
        assert found_state.keys() == expected_state.keys()
        for key, array in expected_state.items():
            np.testing.assert_array_equal(found_state[key], array, err_msg=f"{saved.name}, {key}")
        engine = engine_of(config_of("gemma3"), DistributedContext())
        engine.load(saved)
        assert engine.fingerprint() == recorded(alone)
