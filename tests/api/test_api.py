"""The public API: cheap to import, with the same numbers as the command line and the files of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
from vorox.core.errors import CheckpointError, ConfigError

STEPS = 12


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a finished run under the numpy engine."""
    tiny_runs.use_numpy_engine(monkeypatch)
    return vorox.train(tiny_runs.configuration(tmp_path)).run_directory


def seconds(program: str) -> float:
    """CPU time of a whole process, best of several."""
    found: list[float] = []
    for _ in range(7):
        before = os.times()
        subprocess.run([sys.executable, "-c", program], check=True)
        after = os.times()
        found.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(found)


def test_importing_costs_less_than_50_ms() -> None:
    """Measured against a Python that imports nothing; in several rounds, because a loaded machine may spoil either."""
    costs: list[float] = []
    for _ in range(5):
        costs.append(seconds("import vorox") - seconds("pass"))
        if costs[-1] < 0.05:
            return
    pytest.fail(f"import vorox costs {min(costs) * 1e3:.0f} ms")


def test_importing_loads_nothing_and_every_name_resolves() -> None:
    program = (
        "import sys, vorox; loaded = [m for m in sys.modules if m.startswith('vorox.')]; assert not loaded, loaded; "
        "assert 'numpy' not in sys.modules; "
        "assert sorted(vorox.__all__) == dir(vorox); [getattr(vorox, name) for name in vorox.__all__]; "
        "import vorox.run, vorox.cli, vorox.data; "
        "assert callable(vorox.train) and callable(vorox.dataset)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="nothing_such"):
        vorox.nothing_such  # noqa: B018


def test_every_public_name_has_a_docstring() -> None:
    for name in set(vorox.__all__) - {"__version__"}:
        value: Any = getattr(vorox, name)
        assert value.__doc__, name
        if isinstance(value, type) and value.__module__.startswith("vorox.api"):
            assert all(getattr(value, member).__doc__ for member in vars(value) if not member.startswith("_")), name


def test_a_mapping_is_loaded_like_the_file_that_says_the_same(tmp_path: Path) -> None:
    values = {
        "preset": "quickstart",
        "model": {"num_layers": 3},
        "data": {"sources": [{"name": "mine", "format": "txt", "paths": (tmp_path / "notes",)}]},
    }
    text = json.dumps(values, default=lambda path: str(path))
    (tmp_path / "same.yaml").write_text(text, encoding="utf-8")
    found = vorox.load_config(values)
    same = vorox.load_config(tmp_path / "same.yaml")
    assert found == same.model_copy(update={"run": found.run})
    assert found.data.sources[0].paths == (str(tmp_path / "notes"),)


def test_overrides_as_texts_and_as_a_mapping() -> None:
    texts = vorox.load_config("quickstart", ["train.num_steps=7", "model.dropout=0.25", "eval.prompts=[a, 'b: c']"])
    values = {"train.num_steps": 7, "model.dropout": 0.25, "eval.prompts": ["a", "b: c"]}
    assert vorox.load_config("quickstart", values) == texts
    assert texts.eval.prompts == ("a", "b: c")


def test_what_is_wrong_with_a_mapping_is_named() -> None:
    with pytest.raises(ConfigError, match="the mapping") as refused:
        vorox.load_config({"preset": "quickstart", "train": {"num_step": 3}})
    assert "did you mean train.num_steps" in str(refused.value)
    with pytest.raises(vorox.VoroxError, match="plain values"):
        vorox.load_config({"preset": "quickstart", "train": {"num_steps": object()}})


def test_metrics_are_those_of_the_file(trained: Path) -> None:
    run = vorox.open_run(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["values"]["loss"] for line in lines if "loss" in line.get("values", {})}
    assert {step: values["loss"] for step, values in run.metrics().items() if "loss" in values} == losses
    assert (run.id, run.config.train.num_steps) == (trained.name, STEPS)
    assert list(run.checkpoints) == [8, 12]
    assert vorox.open_run(root=trained.parent).directory == trained


def chain(directory: Path) -> list[str]:
    """What the run itself recorded of every step's rows."""
    return [json.loads(line)["batch"] for line in (directory / "chain.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("overrides", [[], ["data.growth.mode=strict", "data.shuffle=false"]], ids=["cached", "grown"])
def test_batches_are_those_that_the_run_was_trained_on(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    outcome = vorox.train(tiny_runs.configuration(tmp_path, overrides))
    recorded = chain(outcome.run_directory)
    assert len(recorded) == STEPS
    with vorox.open_run(outcome.run_directory) as run:
        assert [batch.digest() for batch in run.batches(num_steps=STEPS)] == recorded
        assert [batch.digest() for batch in run.batches(5, 3)] == recorded[4:7]
        batch = next(run.batches(5))
        assert (batch.step, batch.tokens_ABT.shape) == (5, (2, 2, 16))
        for outside in ((0, 1), (10**6, 1), (1, 10**6), (3, 0)):
            with pytest.raises(ConfigError):
                run.batches(*outside)


def test_documents_by_step_and_steps_by_document(trained: Path) -> None:
    run = vorox.open_run(trained)
    rows = run.where(5)
    assert len(rows) == 4
    document = rows[1].documents[0]
    steps = {(seen.step, seen.slot) for seen in run.when(document.uri, ordinal=document.ordinal)}
    assert (5, 1) in steps
    assert run.where(5, 1) == rows[1:2]
    run.close()
    assert run.where(5) == rows


def test_the_validation_set_and_a_model_give_the_loss_that_the_run_recorded(trained: Path) -> None:
    run = vorox.open_run(trained)
    model = vorox.load_model(run)
    recorded = [json.loads(line) for line in (trained / "evaluations.jsonl").read_text().splitlines()][-1]
    found = model.evaluate(run.validation_batches())
    assert (model.step, found.loss) == (recorded["step"], recorded["loss"])
    assert vorox.load_model(trained / "checkpoints" / "step-00000008").step == 8
    assert vorox.load_model(trained, step=8).path == run.checkpoints[8]


def test_a_directory_of_transformers_is_not_a_run_and_is_told_apart(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors and no index of shards"):
        vorox.load_model(tmp_path)
    assert vorox.load_model(trained).step == 12


def test_logits_of_one_sequence_and_of_several(trained: Path) -> None:
    model = vorox.load_model(trained)
    ids = [int(token) for token in model.tokenizer.encode_batch(["the step"])[0]]
    several = model.logits([ids, ids[::-1]])
    assert several.shape == (2, len(ids), model.spec.vocab_size)
    assert several.dtype == np.float32
    np.testing.assert_allclose(model.logits(np.array(ids, np.uint16)), several[0], atol=1e-6)  # other matrix shapes
    refused: list[Any] = [[], [0.5], [[[1]]], [model.spec.vocab_size], [-1], [0] * 17]
    for wrong in refused:
        with pytest.raises(ConfigError, match="->"):
            model.logits(wrong)


def test_generating_is_repeatable_and_like_the_command(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vorox.cli import main

    model = vorox.load_model(trained)
    text = model.generate("the ", num_tokens=6, seed=3)
    assert model.generate(["the ", "a "], num_tokens=6, seed=3)[0] == text
    assert model.generate("the ", num_tokens=6, temperature=0) == model.generate("the ", num_tokens=6, top_k=1)
    assert main(["generate", str(trained), "-p", "the ", "--tokens", "6", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completions"][0]["completion"] == text


def test_weights_can_be_replaced(trained: Path) -> None:
    model = vorox.load_model(trained)
    before = model.weights()
    name = next(iter(before))
    model.set_weights({name: before[name] * 2})
    assert (model.weights()[name] == before[name] * 2).all()


def test_an_engine_without_taps_says_so(trained: Path) -> None:
    with pytest.raises(ConfigError, match="does not support taps"):
        vorox.load_model(trained).attach("after_mlp", 0, lambda x: x)


def test_a_corrupt_checkpoint_is_skipped_with_a_warning(trained: Path) -> None:
    (trained / "checkpoints" / "step-00000012" / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="step-00000012"):
        assert vorox.load_model(trained).step == 8


def test_a_run_that_is_not_there(trained: Path) -> None:
    with pytest.raises(ConfigError, match="Run nowhere not found"):
        vorox.open_run("nowhere", root=trained.parent)


@pytest.mark.torch
class TestTaps:
    """Taps of a run: they act in every step, are recorded, and a change is reported."""

    def config(self, directory: Path, *more: str) -> Any:
        return tiny_runs.configuration(directory, ["train.num_steps=4", "checkpoint.every_steps=2", *more])

    def test_a_tap_that_watches_sees_every_pass_and_changes_nothing(self, tmp_path: Path) -> None:
        seen: list[tuple[int, ...]] = []

        def watch(x_BTD: Any) -> None:
            seen.append(tuple(x_BTD.shape))

        watched = vorox.train(self.config(tmp_path / "a"), taps=[vorox.Tap("after_mlp", 0, watch)])
        plain = vorox.train(self.config(tmp_path / "b"))
        assert watched.fingerprint == plain.fingerprint
        assert seen.count((2, 16, 16)) >= 4 * 2

    def test_a_tap_that_replaces_is_recorded_and_its_change_reported(self, tmp_path: Path) -> None:
        def damp(x_BTD: Any) -> Any:
            return 0.5 * x_BTD

        taps = [vorox.Tap("after_attention", 0, damp)]
        changed = vorox.train(self.config(tmp_path), taps=taps)
        plain = vorox.train(self.config(tmp_path), resume_from="never")
        assert changed.fingerprint != plain.fingerprint
        (noted,) = json.loads((changed.run_directory / "run.json").read_text())["attempts"]
        assert "after_attention of layer 0" in noted["notes"]["taps"][0]
        assert "damp" in noted["notes"]["taps"][0]
        config = self.config(tmp_path, "train.num_steps=6")
        vorox.train(config, taps=taps, resume_from=changed.run_directory)
        log = changed.run_directory / "log.txt"
        assert "Taps changed" not in log.read_text()
        vorox.train(config, ["train.num_steps=8"], resume_from=changed.run_directory)
        assert "Taps changed since the previous attempt" in log.read_text()

    def test_a_layer_that_does_not_exist_is_refused_before_a_step(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="layer 9 does not exist"):
            vorox.train(self.config(tmp_path), taps=[vorox.Tap("after_mlp", 9, lambda x: x)])


@pytest.mark.torch
def test_a_data_loader_over_files_resumes_where_it_stopped(tmp_path: Path) -> None:
    import torch

    text = tiny_runs.write_text(tmp_path / "text")

    def rows(state: Any = None) -> Any:
        return vorox.dataset(
            str(text / "text.jsonl"), batch_size=2, state=state, tokenizer="byte", sequence_length_tokens=16, seed=1,
            epochs=1, cache_directory=tmp_path / "cache",
        )  # fmt: skip

    whole = [batch["input_ids"] for batch in torch.utils.data.DataLoader(rows(), batch_size=2)]
    assert whole[0].shape == (2, 16)
    assert whole[0].dtype == torch.int64
    state = rows().state_after(2 * 3)
    rest = [batch["input_ids"] for batch in torch.utils.data.DataLoader(rows(state), batch_size=2)]
    assert len(rest) == len(whole) - 3
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[3:], strict=True))


@pytest.mark.torch
def test_the_rows_of_a_configuration_are_those_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    config = tiny_runs.configuration(tmp_path, ["data.mode=streaming"])
    outcome = vorox.train(config)
    with vorox.open_run(outcome.run_directory) as run:
        trained_on = np.concatenate([batch.tokens_ABT.reshape(-1, 16) for batch in run.batches(1, 3)])
    rows = iter(vorox.dataset(config))
    for expected in trained_on:
        np.testing.assert_array_equal(next(rows)["input_ids"].numpy(), expected)
