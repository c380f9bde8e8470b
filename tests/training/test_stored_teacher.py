"""Distillation from stored logits, against the teacher in memory and a plain PyTorch loss; what is stale is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
from vorox.api.teacher_logits import write_teacher_logits
from vorox.cli import main
from vorox.core.batch import Batch, DataCursor
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.experiments.tracking import read_metrics
from vorox.records.replay_chain import read_chain
from vorox.training.steps.teacher_logits import LogitsHeader, LogitsReader, LogitsWriter

pytestmark = pytest.mark.torch
TOP_K = 5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def teacher(place: Path) -> Path:
    overrides = ["model.num_layers=2", "model.hidden_size=24", "run.name=teacher", "log.matmul_peak=false"]
    run = tiny_runs.run(tiny_runs.configuration(place, overrides)).run_directory
    return Path(shutil.copytree(run / "checkpoints" / "step-00000012", place / "copy"))


def student(place: Path, name: str, *overrides: str) -> Any:
    settings = [f"run.name={name}", "log.every_steps=1", "log.matmul_peak=false", "loss.chunk_tokens=7", *overrides]
    return tiny_runs.configuration(place, settings)


def online(place: Path, name: str, teacher: Path, *overrides: str) -> Any:
    return student(
        place, name, f"train.distillation.teacher={teacher}", f"train.distillation.top_k={TOP_K}", *overrides
    )


def stored(place: Path, name: str, directory: Path, *overrides: str) -> Any:
    return student(place, name, f"train.distillation.logits={directory}", *overrides)


@pytest.fixture(scope="module")
def logits(place: Path, teacher: Path) -> Path:
    """Logits in fp32 for the rows of 12 steps."""
    done = write_teacher_logits(online(place, "writer", teacher), place / "logits", precision="fp32")
    assert done.num_steps == 12
    assert 0 < done.num_new_rows == done.num_rows
    return done.path


@pytest.fixture(scope="module")
def whole(place: Path, logits: Path) -> Any:
    return tiny_runs.run(stored(place, "whole", logits))


def test_stored_logits_train_as_the_teacher_in_memory_does(place: Path, teacher: Path, whole: Any) -> None:
    expected = tiny_runs.run(online(place, "online", teacher))
    plain = tiny_runs.run(student(place, "plain"))
    losses = [read_metrics(run.run_directory) for run in (whole, expected, plain)]
    for step in range(1, 13):
        for name in ("loss", "objective", "grad_norm"):
            assert losses[0][step][name] == pytest.approx(losses[1][step][name], abs=1e-5)
    assert abs(losses[0][12]["loss"] - losses[2][12]["loss"]) > 1e-3, "the comparison would be trivial"
    first, second, third = (
        [entry.batch for entry in read_chain(run.run_directory).values()] for run in (whole, expected, plain)
    )
    assert second == third, "all train on the same rows"
    assert not set(first) & set(second), "the digest of a row covers its stored logits"


def test_the_loss_equals_plain_pytorch() -> None:
    import torch
    from torch.nn import functional as F

    from vorox.backends.torch_engine.device.matrix_products import Products
    from vorox.backends.torch_engine.losses.loss import FusedLinearLoss, Labels, TeacherOutput, TopLogits
    from vorox.core.schema import DistillationConfig, LossConfig

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    temperature, weight, num_tokens = 1.7, 0.6, 13
    hidden, head = normal(10, 6).requires_grad_(), normal(num_tokens, 6).requires_grad_()
    teacher = TeacherOutput(normal(10, 4), normal(num_tokens, 4))
    labels = torch.randint(num_tokens, (10,), generator=generator)
    kept = torch.arange(10) % 4 != 3
    for top_k in (1, TOP_K, num_tokens):
        settings = DistillationConfig(teacher="t", top_k=top_k, temperature=temperature, weight=weight)
        loss = FusedLinearLoss(
            LossConfig(chunk_tokens=4), num_tokens, torch.device("cpu"), Products(use_onednn=False), torch.float32,
            count_correct=False, distillation=settings,
        )  # fmt: skip
        wanted_logits, ids = (teacher.hidden_ME @ teacher.head_VE.T).sort(dim=1, descending=True)
        wanted, ids = F.softmax(wanted_logits[:, :top_k] / temperature, 1), ids[:, :top_k]
        predicted = F.log_softmax(hidden @ head.T / temperature, 1).gather(1, ids)
        divergence = (wanted * (wanted.log() - predicted)).sum(1)[kept].sum()
        entropy = F.cross_entropy((hidden @ head.T)[kept], labels[kept], reduction="sum")
        expected = (1 - weight) * entropy + weight * temperature**2 * divergence
        gradients = torch.autograd.grad(expected, (hidden, head))
        for source in (teacher, TopLogits(ids, wanted_logits[:, :top_k] - wanted_logits[:, :1])):
            hidden.grad = head.grad = None
            objective, sums = loss.train(hidden, head, Labels(labels, kept, source), 1.0)
            objective.backward()
            assert float(sums.objective) == pytest.approx(float(expected.detach()), rel=1e-5)
            for found, gradient in zip((hidden.grad, head.grad), gradients, strict=True):
                torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-5)


def test_a_killed_run_resumes_and_replays(
    place: Path, logits: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vorox.backends.torch_engine.engine import TorchEngine

    config, original = stored(place, "killed", logits), TorchEngine.train_step

    def train_step(self: Any, batch: Any, **kwargs: Any) -> Any:
        if batch.step + 1 == 7:
            tiny_runs.kill()
        return original(self, batch, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(TorchEngine, "train_step", train_step)
        with pytest.raises(tiny_runs.Killed):
            tiny_runs.run(config)
    killed = tiny_runs.run(config)
    assert killed.start_step == 4
    assert killed.fingerprint == whole.fingerprint
    chains = [[entry.chain for entry in read_chain(one.run_directory).values()] for one in (whole, killed)]
    assert chains[0] == chains[1]
    assert main(["replay", str(killed.run_directory), "--from", "5", "--to", "12"]) == 0


def test_rows_are_found_in_another_order_and_batch(place: Path, logits: Path) -> None:
    """Two epochs over what one epoch has, with another seed and other batches, need no further logits."""
    config = online(place, "epoch", place / "copy", "train.num_steps=null", "train.num_epochs=1")
    done = write_teacher_logits(config, logits, precision="fp32")
    again = write_teacher_logits(config, logits, precision="fp32")
    assert (again.num_new_rows, again.num_rows) == (0, done.num_rows)
    other = stored(
        place, "other", logits, "run.seed=5", "train.global_batch_sequences=6", "train.micro_batch_sequences=3",
        "train.num_steps=null", "train.num_epochs=2",
    )  # fmt: skip
    outcome = tiny_runs.run(other)
    assert outcome.progress.cursor.position >= 2 * done.num_rows - 6


def test_a_missing_row_ends_the_run_and_the_command_adds_it(
    place: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, directory = place / "short.yaml", place / "short"
    config = online(place, "short", teacher, "train.num_steps=5")
    short.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
    assert main(["data", "teacher-logits", str(short), "--to", str(directory), "--precision", "fp16"]) == 0
    assert f"train.distillation.logits={directory}" in capsys.readouterr().out
    longer = stored(place, "longer", directory, "train.num_steps=8")
    with pytest.raises(DataError, match=r"Stored logits lack \d of 4 rows of step 6, the first with digest"):
        tiny_runs.run(longer)
    arguments = ["data", "teacher-logits", str(short), "train.num_steps=8", "--to", str(directory), "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["num_new_rows"] > 0
    resumed = tiny_runs.run(longer)
    assert (resumed.start_step, resumed.progress.step) == (5, 8), "the state was saved at the missing row"
    exact = tiny_runs.run(online(place, "exact", teacher, "train.num_steps=8"))
    losses = [read_metrics(run.run_directory)[8] for run in (resumed, exact)]
    assert losses[0]["objective"] == pytest.approx(losses[1]["objective"], abs=2e-3), "fp16"


def test_logits_of_another_teacher_are_refused_at_a_resume(place: Path, logits: Path) -> None:
    copy = Path(shutil.copytree(logits, place / "moved"))
    run = tiny_runs.run(stored(place, "changed", copy, "train.num_steps=4")).run_directory
    header = json.loads((copy / "teacher.json").read_bytes())
    (copy / "teacher.json").write_text(json.dumps({**header, "teacher": "0" * 32}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="Teacher has changed"):
        tiny_runs.run(stored(place, "changed", copy, "train.num_steps=6"), resume_from=run)
    with pytest.raises(ConfigError, match="holds logits of another computation"):
        write_teacher_logits(online(place, "changed", place / "copy"), copy, precision="fp32")


def test_a_damaged_row_is_named(place: Path, logits: Path) -> None:
    copy = Path(shutil.copytree(logits, place / "damaged"))
    file = next(copy.glob("rows-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # in the logits of the last row
    file.write_bytes(content)
    reader = LogitsReader(copy)
    digests = np.sort(reader._digests)  # pyright: ignore[reportPrivateUsage]

    def batch_of(digest: int) -> Batch:
        zeros = np.zeros((1, 1, 16), np.int32)
        return Batch(0, zeros, zeros, None, None, np.array([[digest]], np.uint64), 0, DataCursor("", 0, 0, 0, 0))

    damaged = []
    for digest in digests.tolist():
        try:
            reader.read(batch_of(digest))
        except DataError as error:
            damaged.append(error)
    assert len(damaged) == 1
    assert "are damaged" in str(damaged[0])
    assert str(file) in damaged[0].where


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.distillation.logits=nowhere"], "No stored logits at nowhere"),
        (["data.document_mask=false"], "data.document_mask=true, the run has data.document_mask=false"),
        (["data.sequence_length_tokens=8", "model.max_positions_tokens=16"], "rows of 16 positions"),
        (["model.vocab_size=300"], "a vocabulary of 257"),
        (["backend=jax"], "needs backend=torch"),
        (["parallel.kind=deepspeed"], "set .*parallel.kind=native"),
        (["train.distillation.top_k=3"], "stored logits have their own"),
        (["train.distillation.teacher=copy"], "exclude each other"),
        (["train.forward_backward=os.path:join"], "is not supported with train.distillation.logits"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], message: str, place: Path, logits: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_runs.run(stored(place, "refused", logits, *overrides))


def test_top_k_needs_a_teacher_with_as_many_tokens(place: Path, teacher: Path) -> None:
    with pytest.raises(ConfigError, match=r"fewer tokens than top_k=300"):
        tiny_runs.run(online(place, "large", teacher, "train.distillation.top_k=300"))
    with pytest.raises(ConfigError, match=r"has no effect; it needs train\.distillation\.teacher"):
        student(place, "none", "train.distillation.top_k=3")
    with pytest.raises(ConfigError, match="need a teacher and a number of logits"):
        write_teacher_logits(student(place, "none"), place / "none")


def test_a_writer_keeps_finished_rows_and_refuses_a_second_writer(tmp_path: Path) -> None:
    header = LogitsHeader("t", 9, "k", 2, 1, "fp16", True, {})
    ids, logits = np.zeros((2, 1), np.int32), np.full((2, 1), -1e30, np.float32)
    with contextlib.suppress(RuntimeError), LogitsWriter(tmp_path / "new", header) as writer:
        assert writer.missing(np.array([7, 0, 7, 8], np.uint64)).tolist() == [0, 3]
        writer.add(7, ids, logits)
        with pytest.raises(ConfigError, match="is in use by"):
            LogitsWriter(tmp_path / "new", header)
        raise RuntimeError
    with LogitsWriter(tmp_path / "new", header) as writer:
        assert writer.missing(np.array([7, 8], np.uint64)).tolist() == [1]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not empty"):
        LogitsWriter(tmp_path, header)
