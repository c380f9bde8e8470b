"""Inputs that a claim fixes besides its settings, and divergences: a changed byte, another start, a forged failure.

The oracle of a forgery is a run that really had the other input, put in the place of the registered one.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
from tiny_claims import CLAIM, a_run_of, claim, refused, rewrite, verified, write_configurations
from vorox.core.config import load_config
from vorox.core.errors import NumericalError
from vorox.core.files.json_lines import StepHistory
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.records.replay_chain import ChainEntry, bits, examine_chain, link, read_chain
from vorox.records.run_context import recorded_config
from vorox.sweeps.claim_inputs import arm_inputs, input_difference
from vorox.training.weights.init_from import files_digest

pytestmark = pytest.mark.slow
ONE_PAIR = ("fast.yaml", "slow.yaml", "--budget", "0.1s")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_configurations(tmp_path)
    return tmp_path


def put_in_place(run: Path, other: Path, *, side: int = 0) -> None:
    """Put another run in the place of a registered one, and its numbers into the register."""
    shutil.rmtree(run)
    other.rename(run)
    chain = read_chain(run)
    last = max(chain)
    states = [json.loads(line) for line in RunLayout(run).states.read_text().splitlines()][-1]["states"]
    value = vorox.open_run(run).metrics()[last]["eval/loss"]
    rewrite(lambda body: body["runs"][side].update(step=last, chain=chain[last].chain, value=value, states=states))


def trained(run: Path, **sections: Mapping[str, Any]) -> Path:
    """Train the configuration of a run again, with changed settings, under another name."""
    config = recorded_config(run)
    changed = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in sections.items()}
    changed["run"] = config.run.model_copy(update={"name": "forged"})
    return tiny_runs.run(config.model_copy(update=changed)).run_directory


# -- Divergence --------------------------------------------------------------------------------------------------------


def diverge(monkeypatch: pytest.MonkeyPatch, first_step: int, lr: float) -> None:
    """Let the configuration with this learning rate have no finite loss from a step on."""
    tiny_runs.scale_steps(monkeypatch, {step: float("nan") for step in range(first_step, 13)})
    scaled = tiny_runs.NumpyEngine._gradients

    class Backend(tiny_runs.NumpyBackend):
        def create(self, config: RunConfig, *rest: Any) -> Any:
            engine = super().create(config, *rest)
            engine.diverges = config.optimizer.lr == lr  # type: ignore[attr-defined]
            return engine

    def only_one(engine: Any, *arguments: Any) -> Any:
        return scaled(engine, *arguments) if engine.diverges else gradients(engine, *arguments)

    monkeypatch.setattr(tiny_runs.NumpyEngine, "_gradients", only_one)
    monkeypatch.setattr(vorox.run.backends, "load", lambda name: Backend())


gradients = tiny_runs.NumpyEngine._gradients


def test_a_divergence_is_computed_again(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = random.randrange(1, 9)
    with monkeypatch.context() as patch:
        diverge(patch, first, 0.01)
        found = claim(capsys, CLAIM, *ONE_PAIR)
        loser = a_run_of(found, side=1)
        assert found["pairs"][0]["runs"][1] | {"chain": ""} == {
            "run": loser.name, "step": first + 3, "chain": "", "states": "", "value": None,
        }  # fmt: skip
        assert examine_chain(loser).last_step == first + 3, "four steps in a row end the run, and are on record"
        assert verified(capsys) == verified(capsys, "--replay") == []
    (finding,) = verified(capsys)  # where the engine computes finite numbers, nothing proves the divergence
    assert f"{loser.name}: its divergence at step {first + 3} is not proven: computed again, step {first}" in finding


@pytest.mark.parametrize("has_forged_steps", [False, True])
def test_a_forged_divergence(place: Path, capsys: pytest.CaptureFixture[str], has_forged_steps: bool) -> None:
    """The chain is shortened; and, if its author takes the pains, it ends in steps without a finite loss."""
    found = claim(capsys, CLAIM, *ONE_PAIR)
    run = a_run_of(found)
    layout, entries = RunLayout(run), dict(read_chain(run))
    last = random.randrange(5, 12)
    first_forged = last - 3 if has_forged_steps else last + 1
    head = ""
    kept: list[ChainEntry] = []
    for step in range(1, last + 1):
        honest, nan = entries[step], bits(float("nan"))
        entry = honest
        if step >= first_forged:
            entry = ChainEntry(step, honest.batch, nan, nan, link(head, step, honest.batch, nan, nan))
        head = entry.chain
        kept.append(entry)
    layout.chain.unlink()
    history = StepHistory(layout.chain, 0)
    for entry in kept:
        history.append({name: getattr(entry, name) for name in ChainEntry.__slots__})
    history.flush()
    for step, path in step_directories(run).items():
        if step >= first_forged or step > last:
            shutil.rmtree(path)
    failure = {"error": "NumericalError", "what": "Loss was not finite", "where": f"step {last}"}
    layout.failure.write_text(json.dumps(failure), encoding="utf-8")
    record = {"step": last, "batch_digest": entries[last].batch, "loss": "NaN", "grad_norm": "NaN"}
    layout.nonfinite_record(last).parent.mkdir()
    layout.nonfinite_record(last).write_text(json.dumps(record), encoding="utf-8")
    rewrite(lambda body: body["runs"][0].update(step=last, chain=head, value=None, states=""))
    wanted = (
        f"at step {last} is not proven: computed again, step {first_forged}: loss was nan"
        if has_forged_steps
        else f"is not proven: loss and gradient norm of its last recorded step, {last}, are finite"
    )
    assert [wanted in one for one in verified(capsys) if "divergence" in one] == [True]


def test_a_bit_error_after_a_skipped_step_is_no_divergence(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.scale_steps(monkeypatch, {2: float("nan")})

    def fail(step: int) -> None:
        if step == 5:
            raise NumericalError("Silent bit error", where="step 5", hint="replace the device")

    tiny_runs.before_step(monkeypatch, fail)
    assert "Silent bit error" in refused(capsys, "claim", CLAIM, *ONE_PAIR, code=NumericalError.exit_code)


# -- Weights -----------------------------------------------------------------------------------------------------------


def base(place: Path, name: str) -> Path:
    """Train a base; return its last checkpoint."""
    seed = random.randrange(10**6)
    config = tiny_runs.configuration(place, [f"run.name={name}", f"run.seed={seed}", f"run.directory={place}/bases"])
    run = tiny_runs.run(config).run_directory
    return step_directories(run)[12]


def test_other_initial_weights(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, other = base(place, "base"), base(place, "other")
    words = [CLAIM, *ONE_PAIR, f"train.from_weights={start}", "train.from_optimizer=true"]
    found = claim(capsys, *words)
    assert verified(capsys) == verified(capsys, "--replay") == []
    kept = start.with_name("kept")
    start.rename(kept)
    shutil.copytree(other, start)
    more = [*words[:3], "--pairs", "9", *words[5:]]
    text = refused(capsys, "claim", *more, code=4)
    assert "The file of initial weights of A has changed since the claim was registered" in text
    run = a_run_of(found)
    forged = trained(run)  # from the other weights
    shutil.rmtree(start)
    kept.rename(start)
    put_in_place(run, forged)
    assert any(f"{run.name}: Initial weights have changed" in one for one in verified(capsys))
    record = json.loads(RunLayout(run).record.read_text())
    good = json.loads(RunLayout(a_run_of(found, side=1)).record.read_text())
    record["attempts"][0]["notes"]["fingerprint"] = good["attempts"][0]["notes"]["fingerprint"]
    RunLayout(run).record.write_text(json.dumps(record), encoding="utf-8")
    what = f"{run.name}: it did not start from the registered weights: computed again, "
    assert any(what in one for one in verified(capsys))
    record["attempts"][0]["notes"]["environment"]["determinism"] = "none"  # as if its bits need not repeat
    RunLayout(run).record.write_text(json.dumps(record), encoding="utf-8")
    assert any(what in one for one in verified(capsys))


# -- Other inputs ------------------------------------------------------------------------------------------------------


def test_code_of_a_user_function(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a module that its file imports, too, and under a version that stays the same."""
    monkeypatch.syspath_prepend(place)
    (place / "halved.py").write_text("def factor():\n    return 0.5\n", encoding="utf-8")
    (place / "rates.py").write_text(
        "from halved import factor\nfrom vorox.core.user_code.extensions import version\n\n\n"
        "@version(1)\ndef rate(*arguments):\n    return factor()\n",
        encoding="utf-8",
    )
    words = [CLAIM, "fast.yaml", "slow.yaml", "schedule.name=rates.py:rate"]
    claim(capsys, *words, "--budget", "0.1s")
    assert verified(capsys) == []
    (place / "halved.py").write_text("def factor():\n    return 0.6\n", encoding="utf-8")
    text = refused(capsys, "claim", *words, "--pairs", "9", code=4)
    assert "The code of a user function (rates.py:rate) of A has changed" in text
    assert any(
        "the code of a user function (rates.py:rate) is not the registered one" in one for one in verified(capsys)
    )


def test_another_environment(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = claim(capsys, CLAIM, *ONE_PAIR)
    run, flag = a_run_of(found), f"--xla_cpu_{random.randrange(10**6)}"
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", flag)
        text = refused(capsys, "claim", CLAIM, *ONE_PAIR[:2], "--pairs", "9")
        assert f"The environment has changed since the claim was registered: XLA_FLAGS was absent, is {flag}" in text
        forged = trained(run)
        again = claim(capsys, CLAIM, *ONE_PAIR, "--again")
        assert len(again["earlier"]) == 1
        assert again["level"] < found["level"]
        assert verified(capsys, again["claim"]) == []
    put_in_place(run, forged)
    what = f"it ran in another environment than the claim was registered in: XLA_FLAGS was absent, is {flag}"
    assert any(what in one for one in verified(capsys, found["claim"]))


def test_other_settings_before_a_resume(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml has what the claim says; the first steps had another learning rate."""
    run = a_run_of(claim(capsys, CLAIM, *ONE_PAIR))
    config = recorded_config(run)
    faster = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 0.05})})
    faster = faster.model_copy(update={"run": config.run.model_copy(update={"name": "forged"})})
    with monkeypatch.context() as patch:
        tiny_runs.before_step(patch, lambda step: tiny_runs.kill() if step == 6 else None)
        with pytest.raises(tiny_runs.Killed):
            tiny_runs.run(faster)
    (forged,) = Path("runs").glob("forged*")
    tiny_runs.run(config.model_copy(update={"run": faster.run}), resume_from=forged)
    put_in_place(run, forged)
    assert recorded_config(run).optimizer.lr == 0.03
    assert f"{run.name}: optimizer.lr is 0.05, the claim has 0.03" in verified(capsys)


def test_a_tap_on_record(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run_of(claim(capsys, CLAIM, *ONE_PAIR))
    record = json.loads(RunLayout(run).record.read_text())
    record["attempts"][0]["notes"]["taps"] = ["output of layer 0: own.scale"]
    RunLayout(run).record.write_text(json.dumps(record), encoding="utf-8")
    assert f"{run.name}: a tap was attached to it, which the claim does not say" in verified(capsys)


def test_every_byte_of_weights_and_stored_logits(tmp_path: Path) -> None:
    """Names, order and bytes count; other files do not."""
    generator = np.random.default_rng()
    for name in ("rows-000000.safetensors", "rows-000001.safetensors", "teacher.json"):
        (tmp_path / name).write_bytes(generator.bytes(50))
    patterns = ("teacher.json", "rows-*.safetensors")
    before = files_digest(tmp_path, patterns)
    (tmp_path / "README.md").write_text("text")
    assert files_digest(tmp_path, patterns) == before
    for path in [*sorted(tmp_path.glob("*[0-9].safetensors")), tmp_path / "teacher.json"]:
        kept, place = path.read_bytes(), int(generator.integers(50))
        path.write_bytes(kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :])
        assert files_digest(tmp_path, patterns) != before
        path.write_bytes(kept)
    assert files_digest(tmp_path, patterns) == before


def test_document_boundaries_of_the_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the same tokens whose documents are divided otherwise have another loss; arms may differ in it."""
    found: list[dict[str, Any]] = []
    tiny_runs.configuration(tmp_path)
    for mask in ("true", "false"):
        config = load_config(tmp_path / "tiny.yaml", [f"data.document_mask={mask}"])
        corpus = vorox.run.prepare(config)
        found.append(arm_inputs(config, corpus))
        corpus.close()
    assert found[0]["evaluation_rows"] != found[1]["evaluation_rows"]
    assert input_difference(found[0], found[0]) == ""
    assert input_difference(found[0], {**found[0], "evaluation_rows": "0"}).startswith("The division of the evaluation")
    assert input_difference(found[0], {**found[0], "teacher": "0"}) == "The file of the teacher"
