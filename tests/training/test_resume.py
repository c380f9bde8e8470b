"""Comparing and remembering configurations: what refuses, what is listed, and what was in force when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_runs import configuration
from vorox.core.config import config_digest, dump_yaml
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.atomic import write_file
from vorox.core.schema import RunConfig
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.resume.resume import environment_differences
from vorox.training.resume.resume_settings import check_config, config_in_force, is_made_with, record_config_change


@pytest.mark.parametrize(
    "change",
    [
        "model.num_layers=3", "model.dropout_fraction=0.1", "data.shuffle=false", "data.sequence_length_tokens=8",
        "data.document_mask=false", "data.validation.held_out_fraction=0.2", "data.sources.0.text_field=body",
        "tokenizer.end_of_text='<end>'", "run.seed=5", "train.global_batch_sequences=8", "optimizer.name=muon",
    ],
)  # fmt: skip
def test_what_makes_another_run_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be resumed") as refused:
        check_config(configuration(tmp_path), configuration(tmp_path, [change]), tmp_path)
    assert f"  {change.partition('=')[0]}: " in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        "data.loader.num_threads=3", "data.cache.directory=/elsewhere", "train.num_steps=99", "optimizer.lr=0.5",
        "train.micro_batch_sequences=4", "eval.every_steps=1", "checkpoint.keep_last=9", "log.every_steps=7",
        "runtime.num_threads=2", "schedule.name=wsd", "data.sources.0.weight=2", "data.sources.0.max_epochs=3",
    ],
)  # fmt: skip
def test_what_may_differ_is_listed(tmp_path: Path, change: str) -> None:
    found = check_config(configuration(tmp_path), configuration(tmp_path, [change]), tmp_path)
    assert change.partition("=")[0] in [entry.key for entry in found]


def test_all_differences_at_once(tmp_path: Path) -> None:
    other = configuration(tmp_path, ["model.num_layers=3", "run.seed=5", "optimizer.lr=0.5"])
    with pytest.raises(ConfigError, match="2 differences") as refused:
        check_config(configuration(tmp_path), other, tmp_path)
    assert "model.num_layers: 1 -> 3" in str(refused.value)
    assert "run.seed: 1234 -> 5" in str(refused.value)
    assert "optimizer.lr" not in str(refused.value), "that one would be fine"


def test_the_environment_in_words() -> None:
    before = {"torch": "2.13", "num_threads": 2, "device": "cpu"}
    assert environment_differences(before, dict(before)) == []
    assert environment_differences(before, {"torch": "2.14", "device": "cpu", "blas": "x"}) == [
        "blas was absent, is x", "num_threads was 2, is absent", "torch was 2.13, is 2.14",
    ]  # fmt: skip


class History:
    """Attempts of a run, each with a learning rate, begun at a step."""

    def __init__(self, tmp_path: Path) -> None:
        self.scratch, self.directory = tmp_path, tmp_path / "run"
        self.directory.mkdir()
        self.recorded = self.config(0.01)
        self.write(self.recorded)

    def config(self, lr: float) -> RunConfig:
        return configuration(self.scratch, [f"optimizer.lr={lr}"])

    def write(self, config: RunConfig) -> None:
        write_file(self.directory / "config.yaml", dump_yaml(config).encode())

    def resume(self, lr: float, step: int) -> None:
        current = self.config(lr)
        record_config_change(self.directory, self.recorded, current, step)
        self.recorded = current
        self.write(current)

    def rates(self, *steps: int) -> list[tuple[float, int | None]]:
        found = [config_in_force(self.directory, step) for step in steps]
        return [(config.optimizer.lr, until) for config, until in found]


def test_what_was_in_force_when(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert history.rates(0, 50) == [(0.01, None)] * 2
    history.resume(0.01, 10)
    assert not (history.directory / "configs").exists(), "nothing changed, nothing to keep"
    history.resume(0.02, 20)
    assert history.rates(0, 19, 20, 99) == [(0.01, 20), (0.01, 20), (0.02, None), (0.02, None)]
    history.resume(0.02, 25)
    history.resume(0.03, 30)
    assert history.rates(19, 20, 30) == [(0.01, 20), (0.02, 30), (0.03, None)]


def test_lost_and_abandoned_work_leaves_no_trace(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.resume(0.02, 20)
    history.resume(0.03, 20)  # killed before the next checkpoint
    assert history.rates(19, 20) == [(0.01, 20), (0.03, None)]
    history.resume(0.03, 20)
    assert history.rates(19, 20) == [(0.01, 20), (0.03, None)]
    history.resume(0.01, 10)  # back to an older checkpoint, with the first configuration
    assert history.rates(0, 10, 20, 30) == [(0.01, None)] * 4
    history.resume(0.04, 0)
    assert history.rates(0, 30) == [(0.04, None)] * 2


def test_keys_that_decide_no_bit_are_not_kept(tmp_path: Path) -> None:
    history = History(tmp_path)
    quiet = configuration(tmp_path, ["log.every_steps=1", "checkpoint.every_steps=7"])
    assert config_digest(quiet) == config_digest(history.recorded)
    record_config_change(history.directory, history.recorded, quiet, 20)
    assert not (history.directory / "configs").exists()


def test_sources_are_compared_by_name(tmp_path: Path) -> None:
    """Taking out, putting in and reordering is a change of the mixture; other text under a name is another run."""
    one, two, three = ({"name": name, "format": "txt", "paths": [f"/{name}"]} for name in ("one", "two", "three"))
    before = configuration(tmp_path, [f"data.sources={json.dumps([one, two])}"])
    for sources in ([two, one], [two], [three, two, one], [{**one, "weight": "1/3", "max_epochs": 2}, two]):
        after = configuration(tmp_path, [f"data.sources={json.dumps(sources)}"])
        assert any(entry.key.startswith("data.sources") for entry in check_config(before, after, tmp_path))
    changed = [f"data.sources={json.dumps([two, {**one, 'paths': ['/x']}])}"]
    with pytest.raises(ConfigError, match=r"data\.sources\.1\.paths"):
        check_config(before, configuration(tmp_path, changed), tmp_path)


def test_a_checkpoint_without_its_settings_is_refused_with_what_to_type(tmp_path: Path) -> None:
    for metadata in ({"config_digest": "0" * 64}, {"settings": {"model": {"num_layers": "many"}}}):
        with pytest.raises(CheckpointError, match="no settings that this version reads") as refusal:
            is_made_with(Checkpoint(tmp_path / "step 1", metadata), configuration(tmp_path))
        assert f"--resume never --from-weights '{tmp_path}/step 1'" in refusal.value.hint
