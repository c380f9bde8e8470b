"""The JAX engine over Google Cloud Storage alone: its data, its checkpoints, and a second machine that goes on."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vorox.run
from servers import GcsServer, gcs_server
from servers.four_stores import texts_of
from tiny_runs import run
from vorox.core.config import load_config
from vorox.core.errors import Preempted
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.provenance.queries import RunDataIndex, where
from vorox.data.text.shard_format import write_shard
from vorox.records.log import RunLog
from vorox.records.replay_chain import read_chain
from vorox.training.mirror import list_mirror
from vorox.training.replay import replay
from vorox.training.steps.pending_steps import InFlightStep, PendingSteps, SettledStep
from vorox.training.steps.workload import Workload

pytestmark = pytest.mark.jax
END = 256


@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[GcsServer]:
    with gcs_server() as server:
        server.bucket("corpora")
        server.bucket("runs")
        for number in range(2):
            texts = texts_of(f"bin {number}", 60)
            ids = [id for text in texts for id in [*text.encode(), END]]
            write_shard(tmp_path / "shard.bin", np.array(ids, np.uint16))
            server.put("corpora", f"shards/{number:02}.bin", (tmp_path / "shard.bin").read_bytes())
            sink = io.BytesIO()
            pq.write_table(pa.table({"text": texts_of(f"parquet {number}", 60)}), sink)
            server.put("corpora", f"books/{number:02}.parquet", sink.getvalue())
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts_of(f"jsonl {number}", 60))
            server.put("corpora", f"crawl/{number:02}.jsonl", lines.encode())
        yield server


def on_machine(directory: Path, arrays: str, *, mirrored: bool = True) -> RunConfig:
    directory.mkdir()
    settings: dict[str, Any] = {
        "backend": "jax",
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        "data": {
            "sources": [
                {"name": "shards", "format": "bin", "paths": ["gs://corpora/shards"], "tokenizer": "byte"},
                {"name": "books", "format": "parquet", "paths": ["gs://corpora/books"]},
                {"name": "crawl", "format": "jsonl", "paths": ["gs://corpora/crawl/*.jsonl"]},
            ],
            "sequence_length_tokens": 32,
            "cache": {"directory": str(directory / "cache")},
            "validation": {"held_out_fraction": 0.1},
        },
        "tokenizer": {"kind": "byte"},
        "train": {"num_steps": 8, "global_batch_sequences": 4, "micro_batch_sequences": 2},
        "checkpoint": {"every_steps": 2, "format": arrays, **({"mirror": "gs://runs/mirror"} if mirrored else {})},
        "eval": {"every_steps": 4, "num_sequences": 4},
        "log": {"matmul_peak": False},
        "run": {"directory": str(directory / "runs"), "name": "tiny"},
    }  # fmt: skip
    file = directory / "run.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return load_config(file)


@pytest.mark.parametrize("arrays", ["safetensors", "orbax"])
def test_trains_resumes_and_mirrors(
    gcs: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrays: str
) -> None:
    straight = run(on_machine(tmp_path / "straight", arrays, mirrored=False))
    expected = read_chain(straight.run_directory)
    run_data = RunDataIndex.open(straight.run_directory)
    rows = [row.source for step in range(1, 9) for slot in range(4) for row in where(run_data, step, slot)]
    assert set(rows) == {"shards", "books", "crawl"}

    first = on_machine(tmp_path / "first", arrays)
    stop_after(monkeypatch, 5)
    with pytest.raises(Preempted) as caught:
        run(first)
    monkeypatch.undo()
    assert "holds step 5" in caught.value.saved
    (directory,) = Path(first.run.directory).iterdir()
    shutil.rmtree(tmp_path / "first")

    outcome = run(on_machine(tmp_path / "second", arrays))
    assert outcome.run_directory.name == directory.name
    assert read_chain(outcome.run_directory) == expected
    assert outcome.fingerprint == straight.fingerprint
    assert outcome.eval_losses == straight.eval_losses
    line = list_mirror(f"gs://runs/mirror/{directory.name}").lineage()
    assert [entry.step for entry in line] == [8, 6]
    kept = RunLayout(outcome.run_directory).tokenizer  # with the views that the run has recorded, as vorox replay
    assert replay(outcome.run_directory, partial(make_workload, kept)).is_exact


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ask the run to stop once a step was started."""
    original = PendingSteps.submit

    def submit(self: PendingSteps, started: InFlightStep) -> SettledStep | None:
        if started.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, started)

    monkeypatch.setattr(PendingSteps, "submit", submit)


def make_workload(tokenizer: Path, config: RunConfig) -> Workload:
    return vorox.run.make_workload(
        config, DistributedContext(), RunLog(None), None, build=False, tokenizer_directory=tokenizer
    )
