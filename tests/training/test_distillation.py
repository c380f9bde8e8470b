"""Distillation, against a plain PyTorch loop over logits of both models; kill, resume, replay, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
import vorox
from vorox.cli import main
from vorox.cli.planning.dry_run import RunPreview
from vorox.core.errors import CheckpointError, ConfigError
from vorox.experiments.tracking import read_metrics
from vorox.records.replay_chain import read_chain

pytestmark = pytest.mark.torch
PLAIN = [
    "data.document_mask=false", "schedule.name=constant", "schedule.warmup_steps=0", "optimizer.weight_decay=0",
    "optimizer.clip_norm=null", "train.num_steps=20", "log.every_steps=1", "log.matmul_peak=false",
    "loss.chunk_tokens=7",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def teacher(place: Path) -> Path:
    """A copy of a checkpoint of a larger model."""
    overrides = ["model.num_layers=2", "model.hidden_size=24", "run.name=teacher", "log.matmul_peak=false"]
    run = tiny_runs.run(tiny_runs.configuration(place, overrides)).run_directory
    return Path(shutil.copytree(run / "checkpoints" / "step-00000012", place / "copy"))


def student(place: Path, name: str, teacher: Path, *overrides: str) -> Any:
    settings = [f"train.distillation.teacher={teacher}", f"run.name={name}", *PLAIN, *overrides]
    return tiny_runs.configuration(place, settings)


@pytest.fixture(scope="module")
def whole(place: Path, teacher: Path) -> Any:
    overrides = ["train.distillation.temperature=3", "train.distillation.weight=0.7"]
    return tiny_runs.run(student(place, "whole", teacher, *overrides))


def test_twenty_steps_equal_a_plain_loop(place: Path, teacher: Path, whole: Any) -> None:
    import torch
    from torch.nn import functional as F

    run, temperature, weight = vorox.open_run(whole.run_directory), 3.0, 0.7
    model = vorox.create_model(student(place, "plain", teacher))
    master = vorox.load_model(place / "runs" / _name(place, "teacher"), device="cpu")
    parameters = list(model.module.parameters())
    config = run.config.optimizer
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=betas, eps=config.eps, weight_decay=0.0)
    recorded = read_metrics(whole.run_directory)
    for step, batch in enumerate(run.batches(1, 20), 1):
        optimizer.zero_grad(set_to_none=False)
        totals = [0.0, 0.0]
        for tokens_BT, labels_BT in zip(batch.tokens_ABT, batch.labels_ABT, strict=True):
            logits_MV, labels_M = model.forward(tokens_BT).flatten(0, 1), torch.from_numpy(labels_BT).flatten().long()
            with torch.no_grad():
                wanted_MV = F.softmax(master.forward(tokens_BT).flatten(0, 1) / temperature, 1)
            kept_M = labels_M != -100
            entropy = F.cross_entropy(logits_MV, labels_M, reduction="sum")
            student_MV = F.log_softmax(logits_MV / temperature, 1)
            divergence = F.kl_div(student_MV[kept_M], wanted_MV[kept_M], reduction="sum")
            objective = (1 - weight) * entropy + weight * temperature**2 * divergence
            (objective / batch.num_target_tokens).backward()
            totals[0] += float(entropy.detach()) / batch.num_target_tokens
            totals[1] += float(objective.detach()) / batch.num_target_tokens
        optimizer.step()
        assert recorded[step]["loss"] == pytest.approx(totals[0], abs=1e-5)
        assert recorded[step]["objective"] == pytest.approx(totals[1], abs=1e-5)
        assert abs(totals[0] - totals[1]) > 1e-3, "the comparison would be trivial"


def test_a_killed_run_resumes_and_replays(
    place: Path, teacher: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vorox.backends.torch_engine.engine import TorchEngine

    overrides = ["train.distillation.temperature=3", "train.distillation.weight=0.7"]
    config, original = student(place, "killed", teacher, *overrides), TorchEngine.train_step

    def train_step(self: Any, batch: Any, **kwargs: Any) -> Any:
        if batch.step + 1 == 11:
            tiny_runs.kill()
        return original(self, batch, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(TorchEngine, "train_step", train_step)
        with pytest.raises(tiny_runs.Killed):
            tiny_runs.run(config)
    killed = tiny_runs.run(config)
    assert killed.start_step == 8
    assert killed.fingerprint == whole.fingerprint
    chains = [[entry.chain for entry in read_chain(one.run_directory).values()] for one in (whole, killed)]
    assert chains[0] == chains[1]
    assert len(chains[0]) == 20
    assert main(["replay", str(killed.run_directory), "--from", "12", "--to", "18"]) == 0


def test_another_teacher_is_refused_at_a_resume(place: Path, teacher: Path) -> None:
    moved = Path(shutil.copytree(teacher, place / "moved"))
    config = student(place, "changed", moved, "train.num_steps=4")
    run = tiny_runs.run(config).run_directory
    chain = (run / "chain.jsonl").read_bytes()
    shutil.rmtree(moved)
    shutil.copytree(place / "runs" / _name(place, "teacher") / "checkpoints" / "step-00000008", moved)
    longer = student(place, "changed", moved, "train.num_steps=6")
    with pytest.raises(CheckpointError, match="Teacher has changed"):
        tiny_runs.run(longer, resume_from=run)
    assert (run / "chain.jsonl").read_bytes() == chain
    assert vorox.load_model(run, device="cpu").step == 4, "inference needs no teacher"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.vocab_size=300"], "has a vocabulary of 257"),
        (["data.sequence_length_tokens=32"], "has 16 positions"),
        (["train.distillation.teacher=nowhere"], "Teacher cannot be used: No weights at"),
        (["backend=jax"], "needs backend=torch"),
        (["parallel.kind=deepspeed"], "set .*parallel.kind=native"),
        (["train.distillation.teacher=null", "train.distillation.weight=0.9"], "needs train.distillation.teacher"),
    ],
)
def test_what_cannot_teach_is_refused(overrides: list[str], message: str, place: Path, teacher: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_runs.run(student(place, "refused", teacher, *overrides))
    with pytest.raises(ConfigError, match=message):
        list(RunPreview(student(place, "refused", teacher, *overrides), "auto").lines())


def test_a_missing_teacher_is_refused_before_anything_is_built(place: Path, teacher: Path, tmp_path: Path) -> None:
    empty = f"data.cache.directory={tmp_path}"
    with pytest.raises(ConfigError, match="Teacher cannot be used"):
        tiny_runs.run(student(place, "early", teacher, "train.distillation.teacher=nowhere", empty))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_names_the_teacher(place: Path, teacher: Path) -> None:
    assert f"teacher        {teacher}" in list(RunPreview(student(place, "planned", teacher), "auto").lines())


def _name(place: Path, name: str) -> str:
    return next((place / "runs").glob(f"{name}-*")).name
