"""Several processes with PyTorch are one run: the losses and the state of one process, one chain, one directory.

The oracle is the same command with one process. Sums over ranks are made in another order, so losses agree to 1e-5
(relative), parameters and moments to 2e-5; what is read (the batch digests of the chain) and what a resumed run repeats
are equal bit for bit. The hidden size and three ranks make shards of unequal size.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ranks.processes import (
    PATIENCE_SECONDS,
    Runs,
    entries,
    fingerprint,
    lines,
    losses,
    second_process,
    stored_arrays,
    train_with_kills,
)
from small_configurations import SMOOTH_EPS
from vorox.api.model import load_model

pytestmark = [pytest.mark.torch, pytest.mark.slow]

MODEL = [
    "backend=torch", "model.num_layers=2", "model.num_heads=4", "model.hidden_size=40", "model.vocab_size=265",
    "train.global_batch_sequences=8", "train.micro_batch_sequences=1", "eval.prompts=[the]", "eval.sample_tokens=4",
    "log.matmul_peak=false", "log.accuracy=true", "log.parameter_norms=true", "log.activation_statistics=true",
    f"optimizer.eps={SMOOTH_EPS}",
]  # fmt: skip
PLACEMENTS = {
    "replicas": (2, ["parallel.data_parallel_size=2"]),
    "three replicas of unequal parts": (3, ["parallel.data_parallel_size=3"]),
    "FSDP2": (2, ["parallel.fsdp_size=2"]),
    "FSDP2, three ranks, shards of unequal size": (3, ["parallel.fsdp_size=3"]),
    "FSDP2 without resharding": (2, ["parallel.fsdp_size=2", "parallel.reshard_after_forward=false"]),
    "HSDP": (4, ["parallel.data_parallel_size=2", "parallel.fsdp_size=2"]),
    "FSDP2 and activation checkpointing": (2, ["parallel.fsdp_size=2", "train.activation_checkpointing=block"]),
    "FSDP2 and kept products": (2, ["parallel.fsdp_size=2", "train.activation_checkpointing=dots"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"), MODEL)


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Path:
    return runs.train("alone", [])[0]


@pytest.fixture(scope="module")
def pair(runs: Runs, alone: Path) -> Path:
    """Two sharded ranks, never interrupted."""
    return runs.train("pair", ["parallel.fsdp_size=2", "--nproc", "2"])[0]


def assert_same_run(run: Path, oracle: Path, *, activations_rel: float = 1e-4) -> None:
    """The same rows, and the same numbers up to the order of sums.

    Activation statistics count padding. In micro-batches whose rows hold one document each, padding attends to it, and
    nowhere else: runs with micro-batches of other sizes agree up to that.
    """
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(oracle)]
    assert losses(run) == pytest.approx(losses(oracle), rel=1e-5)
    for here, there in zip(lines(run, "evaluations"), lines(oracle, "evaluations"), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
    for here, there in zip(metrics(run), metrics(oracle), strict=True):
        assert here.keys() == there.keys()
        for key, value in there.items():
            rel = activations_rel if key.startswith("activation/") else 1e-4
            assert here[key] == pytest.approx(value, rel=rel, abs=1e-6), key
    mine, theirs = (stored_arrays(path / "checkpoints" / "step-00000012") for path in (run, oracle))
    assert mine.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=2e-5, err_msg=key)


def metrics(run: Path) -> list[dict[str, float]]:
    prefixes = ("train/", "activation/", "loss", "grad_norm", "accuracy", "parameter_norm")
    return [
        {key: value for key, value in record["values"].items() if key.startswith(prefixes)}
        for record in lines(run, "metrics")
        if "loss" in record.get("values", {})
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_trains_as_one_process(runs: Runs, alone: Path, placement: str) -> None:
    count, overrides = PLACEMENTS[placement]
    run, _ = runs.train(placement.replace(" ", "-").replace(",", ""), [*overrides, "--nproc", str(count)])
    assert len(entries(run)) == 12
    assert_same_run(run, alone)
    row_1T = np.arange(16, dtype=np.int32)[None]
    trained, expected = (load_model(one, device="cpu").logits(row_1T) for one in (run, alone))
    np.testing.assert_allclose(trained, expected, atol=1e-3)  # in this process, whatever the placement was


def test_a_shard_of_the_state_is_held(alone: Path, pair: Path) -> None:
    """Parameters, gradients and moments of the fuller of two ranks are about half of those of one process."""
    for part in ("parameter", "gradient", "optimizer"):
        whole, half = (
            max(record["values"].get(f"memory/{part}_bytes", 0.0) for record in lines(run, "metrics"))
            for run in (alone, pair)
        )
        assert 0.5 * whole <= half + 64 * 40 <= 0.65 * whole, part


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.name=muon"],
        ["train.batch_stages=[{start_step: 5, global_batch_sequences: 12}]"],
        ["data.document_mask=true"],
        ["loss.z_loss_weight=0.01", "model.tie_embeddings=true"],
        [
            "optimizer.layer_lr_decay=0.5",
            "train.ema_decay=0.9",
            "eval.weights=ema",
            "optimizer.groups=[{match: blocks.0.*, frozen: true}]",
        ],
        ["model.family=gemma3_text", "model.sliding_window_tokens=16", "data.document_mask=true"],
        ["model.mamba_head_dim=16", "model.layer_pattern=M*-", "model.num_layers=3", "data.document_mask=true"],
    ],
    ids=lambda settings: settings[0],
)
def test_sharded_settings_train_as_in_one_process(runs: Runs, settings: list[str]) -> None:
    name = re.sub(r"\W+", "-", settings[0]).strip("-").replace("_", "-")
    alone, _ = runs.train(f"{name}-alone", settings)
    run, _ = runs.train(f"{name}-pair", [*settings, "parallel.fsdp_size=2", "--nproc", "2"])
    assert_same_run(run, alone)


OWN_PARTS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, spec, layer):
        super().__init__()
        width = spec.hidden_size
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("share", torch.full((1,), 0.5), persistent=False)

    def forward(self, x, positions, attn_mask):
        before = x.cumsum(1) / (1 + positions[..., None])
        return x + self.share * self.outer(torch.relu(self.inner(before)))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, torch.arange(x.shape[1])[None], None)
        return self.head(x)
"""


@pytest.mark.parametrize("part", ["model.block={file}:Block", "model.kind={file}:Model"])
def test_modules_of_the_user_train_as_in_one_process(runs: Runs, part: str, tmp_path: Path) -> None:
    """One of two ranks holds the rows of an uneven shard: the width is 40 and the vocabulary 265."""
    (tmp_path / "own.py").write_text(OWN_PARTS, encoding="utf-8")
    name = part.partition("=")[0].replace(".", "-")
    settings = [part.format(file=tmp_path / "own.py"), "log.activation_statistics=false", "data.document_mask=false"]
    alone, _ = runs.train(f"{name}-alone", settings)
    pair, _ = runs.train(f"{name}-pair", [*settings, "parallel.fsdp_size=2", "--nproc", "2"])
    assert_same_run(pair, alone)


def test_dropout_is_that_of_one_process(runs: Runs) -> None:
    """Dropout is a function of the micro-batch's index in the global batch, not of the rank."""
    alone, _ = runs.train("dropout-alone", ["model.dropout_fraction=0.2"])
    run, _ = runs.train("dropout-pair", ["model.dropout_fraction=0.2", "parallel.data_parallel_size=2", "--nproc", "2"])
    assert_same_run(run, alone)


def test_bf16_is_near(runs: Runs, alone: Path) -> None:
    run, _ = runs.train("bf16", ["precision.dtype=bf16", "parallel.fsdp_size=2", "--nproc", "2"])
    assert losses(run) == pytest.approx(losses(alone), rel=0.02)


def test_the_world_may_change_at_a_resume(runs: Runs, alone: Path) -> None:
    """Four ranks, then three, one and two: the rows of an uninterrupted run, and its losses up to the order of sums."""
    run, _ = runs.train("elastic", ["parallel.fsdp_size=4", "train.num_steps=3", "--nproc", "4"])
    for count, data, fsdp, steps in [(3, 3, 1, 6), (1, 1, 1, 9), (2, 1, 2, 12)]:
        sizes = [f"parallel.data_parallel_size={data}", f"parallel.fsdp_size={fsdp}"]
        runs.vorox(["train", "--resume", str(run), *sizes, f"train.num_steps={steps}", "--nproc", str(count)])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]


def test_the_state_in_host_memory_changes_no_bit_on_a_cpu(runs: Runs, pair: Path) -> None:
    run, _ = runs.train("offload", ["parallel.fsdp_size=2", "parallel.fsdp_offload=true", "--nproc", "2"])
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)


def test_replicas_of_shards_in_host_memory_change_no_bit_on_a_cpu(runs: Runs) -> None:
    """With bf16, accumulation, recomputed blocks and a moving average."""
    settings = [
        "parallel.data_parallel_size=2", "parallel.fsdp_size=2", "--nproc", "4", "precision.dtype=bf16",
        "train.activation_checkpointing=block", "train.ema_decay=0.9", "train.micro_batch_sequences=1",
    ]  # fmt: skip
    run, offloaded = (
        runs.train(name, [*settings, *more])[0]
        for name, more in (("shards", []), ("shards-offload", ["parallel.fsdp_offload=true"]))
    )
    assert entries(offloaded) == entries(run)
    assert fingerprint(offloaded) == fingerprint(run)


def test_auto_uses_all_ranks(runs: Runs, alone: Path) -> None:
    """As many replicas as ranks, with micro-batches that divide a rank's rows; the same run as of one process."""
    run, _ = runs.train("auto", ["train.micro_batch_sequences=8", "--nproc", "3"])
    assert_same_run(run, alone, activations_rel=0.01)


EXACT = [
    "runtime.determinism=bitwise-any-world", "train.micro_batch_sequences=2", "model.dropout_fraction=0.1",
    "data.document_mask=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def exact(runs: Runs) -> Path:
    """One process with four micro-batches per step, in the order that no number of ranks changes."""
    return runs.train("exact", EXACT)[0]


def assert_identical(run: Path, oracle: Path) -> None:
    """Every recorded number and every array has the same bits."""
    assert entries(run) == entries(oracle)
    assert fingerprint(run) == fingerprint(oracle)
    assert metrics(run) == metrics(oracle)
    evaluations = [[record.get("loss") for record in lines(path, "evaluations")] for path in (run, oracle)]
    assert evaluations[0] == evaluations[1]


SPIKES = [
    "train.spike_policy=skip", "train.spike_window_steps=4", "train.spike_deviations=0.01", "optimizer.lr=0.5",
    "optimizer.eps=1e-8",
]  # fmt: skip
ROLLBACKS = [
    *SPIKES, "train.spike_policy=rollback", "train.spike_rollback_steps=1", "train.max_spike_rollbacks=12",
    "runtime.recompute_every_steps=5", "checkpoint.every_steps=2", "checkpoint.keep_last=9",
]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [[], ["optimizer.name=muon", "precision.dtype=bf16"], SPIKES, ROLLBACKS],
    ids=["adamw", "muon", "spikes", "rollbacks"],
)
def test_no_bit_depends_on_the_number_of_ranks(runs: Runs, settings: list[str]) -> None:
    name = "exact" + "".join(setting.rpartition("=")[2] for setting in settings[:1])
    name, kind = (name, "skip") if settings != ROLLBACKS else ("rollbacks", "rollback")
    oracle, _ = runs.train(name, [*EXACT, *settings])
    for count in (2, 4) if not settings else (2,):
        rehearsal = ["runtime.rehearsal=true"] if settings == ROLLBACKS else []
        run, _ = runs.train(f"{name}-{count}", [*EXACT, *settings, *rehearsal, "--nproc", str(count)])
        assert_identical(run, oracle)
        skipped = [[line for line in lines(path, "plan") if line["body"]["kind"] == kind] for path in (run, oracle)]
        assert skipped[0] == skipped[1]
        assert bool(skipped[0]) == (settings in (SPIKES, ROLLBACKS))


def test_ranks_change_at_resumes_and_a_replay_on_one_is_bit_exact(runs: Runs, exact: Path) -> None:
    run, _ = runs.train("exact-elastic", [*EXACT, "train.num_steps=4", "--nproc", "4"])
    for count, steps in [(1, 8), (2, 12)]:
        command = ["train", "--resume", str(run), f"train.num_steps={steps}", "--nproc", str(count)]
        assert "Not bit-exact" not in runs.vorox(command)
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(exact)]
    assert "bit-exact, 12 steps" in runs.vorox(["replay", str(run)])


def test_killed_is_resumed_bit_for_bit(runs: Runs, pair: Path, tmp_path: Path) -> None:
    overrides = ["parallel.fsdp_size=2", "--nproc", "2"]
    process = runs.start("killed", overrides, tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run, _ = runs.train("killed", overrides)
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)


def test_kills_at_every_phase_are_restarted_and_nothing_is_lost(runs: Runs, pair: Path, tmp_path: Path) -> None:
    run = train_with_kills(runs, "torch", ["parallel.fsdp_size=2"], tmp_path)
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)


def test_torchrun_starts_the_ranks(runs: Runs, pair: Path) -> None:
    words = runs.command("torchrun", ["parallel.fsdp_size=2"])[1:]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    done = subprocess.run(command, cwd=runs.directory, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert fingerprint(runs.find("torchrun")) == fingerprint(pair)


def test_a_world_that_does_not_fit_is_refused(runs: Runs, alone: Path) -> None:
    errors = runs.run_fresh(runs.command("misfit", ["parallel.fsdp_size=3", "--nproc", "2"])[3:], code=2)
    assert "parallel" in errors
    assert "--nproc 3" in errors
    _, errors = runs.train("tensor", ["parallel.tensor_parallel_size=3", "--nproc", "3"], code=2)
    assert "model.num_heads = 4 is not divisible by tensor_parallel_size = 3" in errors
