"""vorox claim through the command line: pairs, verdicts and the register, five ways of cheating, what it refuses.

With the numpy engine, whose runs take a fraction of a second; one claim each with PyTorch and JAX.
"""

from __future__ import annotations

import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tiny_runs
import vorox
import vorox.run
from numpy_engine import NumpyEngine
from tiny_claims import (
    CLAIM,
    REGISTER,
    a_run_of,
    claim,
    fast_beats_slow,
    refused,
    rewrite,
    verified,
    write_configurations,
)
from vorox.cli import main
from vorox.core.errors import NumericalError
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.experiments.paired_test import paired_test
from vorox.models.decoder.spec import DecoderSpec
from vorox.records.replay_chain import read_chain
from vorox.records.run_context import recorded_config
from vorox.sweeps.claim_check import _entry_findings, _pair_findings
from vorox.sweeps.claim_register import Register

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def claimed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder in which a claim has a verdict, and a copy of its runs."""
    folder = tmp_path_factory.mktemp("claimed")
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        patch.chdir(folder)
        write_configurations(folder)
        assert main(["claim", CLAIM, "fast.yaml", "slow.yaml", "--pairs", "9"]) == 0
    shutil.copytree(folder / "runs", folder / "kept")
    return folder, folder / "kept"


@pytest.fixture
def verdict_place(claimed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with a verdict, as it was."""
    folder, kept = claimed
    shutil.rmtree(folder / "runs")
    shutil.copytree(kept, folder / "runs")
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two configurations; fast.yaml learns more in its 12 steps than slow.yaml."""
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_configurations(tmp_path)
    return tmp_path


def test_a_claim_that_holds(verdict_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fast_beats_slow(capsys)  # its verdict again
    verdict = found["verdict"]
    assert (verdict["verdict"], found["earlier"]) == ("holds", [])
    assert 5 <= verdict["num_pairs"] == len(found["pairs"]) < 9, "it stops as soon as it is decided"
    gains = []
    for number, pair in enumerate(found["pairs"], start=1):
        assert pair["pair"] == number
        configs = [recorded_config(Path("runs") / run["run"]) for run in pair["runs"]]
        assert [config.run.seed for config in configs] == [pair["seed"]] * 2
        assert [config.optimizer.lr for config in configs] == [0.03, 0.01]
        assert (pair["num_same_rows"], pair["same_start"]) == (12, True)
        chains = [read_chain(Path("runs") / run["run"]) for run in pair["runs"]]
        assert [chain[12].chain for chain in chains] == [run["chain"] for run in pair["runs"]]
        assert [chain[1].loss for chain in chains] == [chains[0][1].loss] * 2
        values = [vorox.open_run(Path("runs") / run["run"]).metrics()[12]["eval/loss"] for run in pair["runs"]]
        assert values == [run["value"] for run in pair["runs"]]
        gains.append(values[1] - values[0])
    assert len({pair["seed"] for pair in found["pairs"]}) == len(gains)
    assert verdict["effect"] == pytest.approx(np.mean(gains))
    assert 0 < verdict["interval"][0] < verdict["effect"] < verdict["interval"][1]
    started = {path: path.stat().st_mtime_ns for path in Path("runs").glob("*/chain.jsonl")}
    assert len(started) == 2 * len(gains)
    assert fast_beats_slow(capsys) == found, "a decided claim is not tried again"
    assert {path: path.stat().st_mtime_ns for path in Path("runs").glob("*/chain.jsonl")} == started
    assert verified(capsys) == verified(capsys, "--replay") == []
    assert main(["claims", "list"]) == 0
    assert "holds" in capsys.readouterr().out
    assert main(["runs", "list"]) == 0
    assert "register" not in capsys.readouterr().out, "the register is no run"


def test_the_other_direction_a_margin_and_names(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = claim(capsys, "slow beats fast on eval loss", "fast.yaml", "slow.yaml", "--pairs", "9")
    assert (first["text"], first["verdict"]["verdict"]) == ("B beats A on eval loss", "refuted")
    percent = -100 * first["verdict"]["effect"] / 5.4
    for factor, verdict, number in ((0.2, "holds", 2), (5.0, "refuted", 3)):
        text = f"A beats B on eval loss by {factor * percent:.3f}%"
        found = claim(capsys, text, "fast.yaml", "slow.yaml", "--pairs", "20")
        assert found["verdict"]["verdict"] == verdict
        assert len(found["earlier"]) == number - 1, "the mirrored claim and other margins ask the same question"
        assert found["level"] == pytest.approx(0.05 / (number * (number + 1)))
    mirrored = claim(capsys, "A beats B on eval loss", "slow.yaml", "fast.yaml", "--pairs", "20")
    assert (mirrored["verdict"]["verdict"], len(mirrored["earlier"])) == ("refuted", 3)
    seeds = {pair["seed"] for one in (first, found, mirrored) for pair in one["pairs"]}
    assert len(seeds) == sum(len(one["pairs"]) for one in (first, found, mirrored)), "every claim has seeds of its own"
    accuracy = claim(capsys, "A beats B on eval accuracy", "fast.yaml", "slow.yaml", "--budget", "0.1s")
    assert accuracy["earlier"] == [], "another metric is another question"
    again = claim(capsys, "A beats B on eval loss", "slow.yaml", "fast.yaml", "--budget", "0.1s", "--again")
    assert [one["verdict"] for one in again["earlier"]] == ["refuted", "holds", "refuted", "refuted"]
    assert again["claim"] != mirrored["claim"]
    words = ["claim", CLAIM, "slow.yaml", "fast.yaml", "--pairs", "20", "--again"]
    assert "The claim is not decided yet" in refused(capsys, *words)


def test_a_killed_claim_continues(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    tiny_runs.before_step(monkeypatch, trained.append)
    with monkeypatch.context() as patch:
        number = [0]

        def die(step: int) -> None:
            number[0] += 1
            if number[0] == 2 * 24 + 12 + 7:  # in step 7 of the second arm of pair 3
                tiny_runs.kill()

        tiny_runs.before_step(patch, die)
        with pytest.raises(tiny_runs.Killed):
            main(["claim", CLAIM, "fast.yaml", "slow.yaml", "--pairs", "9"])
    (registered,) = Register(Path("runs")).claims
    assert [pair.number for pair in registered.pairs] == [1, 2]
    trained.clear()
    found = fast_beats_slow(capsys)
    assert (found["claim"], found["verdict"]["verdict"]) == (registered.id, "holds")
    assert trained[:9] == [*range(5, 13), 1], "the interrupted arm resumes from step 4, and the others are not repeated"
    assert len(list(Path("runs").glob("claim-*"))) == 2 * len(found["pairs"])
    assert verified(capsys) == []


def test_a_claim_without_a_decision_goes_on_with_a_larger_budget(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["A beats B on eval loss by 1.2%", "fast.yaml", "slow.yaml"]
    first = claim(capsys, *words, "--budget", "0.1s")
    assert (first["verdict"]["verdict"], len(first["pairs"])) == ("undecided", 1), "no pair starts that cannot end"
    more = claim(capsys, *words, "--pairs", "5", "--budget", "2h")
    assert more["claim"] == first["claim"]
    assert more["pairs"][0] == first["pairs"][0]
    if more["verdict"]["verdict"] == "undecided":
        assert len(more["pairs"]) == 5
        assert more["verdict"]["smallest_effect"] > 0
    assert main(["claim", *words, "--pairs", "30", "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["claim"], plan["num_earlier"], plan["pairs"]) == (first["claim"], 0, 30)
    assert plan["smallest_effect"] > 0


def test_a_plan_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    assert main(["claim", CLAIM, "fast.yaml", "slow.yaml", "--pairs", "8", "--plan"]) == 0
    assert "1.86 standard deviations" not in capsys.readouterr().out, "the level of a first claim is 0.025"
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("loses", [0, 1])
def test_an_arm_that_diverges_counts_as_a_guess(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, loses: int
) -> None:
    gradients = NumpyEngine._gradients

    def broken(engine: NumpyEngine, *arguments: Any) -> Any:
        loss, found = gradients(engine, *arguments)
        return (np.nan if getattr(engine, "diverges", False) else loss), found

    class Backend(tiny_runs.NumpyBackend):
        def create(self, config: RunConfig, spec: DecoderSpec, dist: DistributedContext) -> NumpyEngine:
            engine = super().create(config, spec, dist)
            engine.diverges = config.optimizer.lr == (0.03, 0.01)[loses]  # type: ignore[attr-defined]
            return engine

    monkeypatch.setattr(NumpyEngine, "_gradients", broken)
    monkeypatch.setattr(vorox.run.backends, "load", lambda name: Backend())
    found = fast_beats_slow(capsys)
    assert found["verdict"]["verdict"] == ("holds" if loses else "refuted")
    assert all(pair["runs"][loses]["value"] is None for pair in found["pairs"])
    assert verified(capsys) == []


def test_a_bit_error_is_no_divergence(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise NumericalError("Silent bit error", where="step 3", hint="replace the device")

    tiny_runs.before_step(monkeypatch, fail)
    words = ["claim", CLAIM, "fast.yaml", "slow.yaml", "--pairs", "9"]
    assert "Silent bit error" in refused(capsys, *words, code=NumericalError.exit_code)
    (registered,) = Register(Path("runs")).claims
    assert registered.pairs == []


# -- Five ways of cheating ---------------------------------------------------------------------------------------------


def test_a_chosen_seed(verdict_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fast_beats_slow(capsys)
    seed = random.randrange(10**6)
    run = a_run_of(found)
    outcome = tiny_runs.run(recorded_config(run).model_copy(update={"run": recorded_config(run).run.model_copy(
        update={"seed": seed, "name": "chosen"})}))  # fmt: skip
    chosen = outcome.run_directory
    shutil.rmtree(run)
    shutil.copytree(chosen, run)
    shutil.rmtree(chosen)
    head, value = read_chain(run)[12].chain, vorox.open_run(run).metrics()[12]["eval/loss"]
    states = [json.loads(line) for line in RunLayout(run).states.read_text().splitlines()][-1]["states"]

    def change(body: dict[str, Any]) -> None:
        if body["pair"] == 1:
            body["runs"][0] |= {"chain": head, "value": value, "states": states}

    rewrite(change)
    wanted = found["pairs"][0]["seed"]
    assert f"{run.name}: the seed {seed} was chosen: the claim gives {wanted}" in verified(capsys)
    rewrite(lambda body: body.update(seed=seed) if body["pair"] == 1 else None)
    assert f"pair 1: the seed {seed} was chosen: the claim gives {wanted}" in verified(capsys)


def test_a_claim_changed_afterwards(verdict_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its id changes with it, and so do its seeds and the claim of its pairs."""
    line = REGISTER.read_bytes()
    REGISTER.write_bytes(line.replace(b'"winner":0', b'"winner":1', 1))
    assert "Line 1 is damaged" in refused(capsys, "claims", "verify", code=4)
    REGISTER.write_bytes(line)
    rewrite(lambda body: body["content"]["claim"].update(winner=1), kind="claim")
    assert "is no entry of a claim" in refused(capsys, "claims", "verify", code=4)
    new = HashChainedLog(REGISTER).read()[0][0]["content"]
    REGISTER.unlink()
    HashChainedLog(REGISTER).append([{"kind": "claim", "content": new}])
    assert any("a claim that the register does not have" in one for one in verified(capsys))


def test_edited_evaluation_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_runs.write_text(place / "exam", documents=20, seed=3)
    held_out = {"sources": [{"name": "exam", "format": "jsonl", "paths": [str(place / "exam")]}]}
    write_configurations(place, validation=held_out)
    words = [CLAIM, "fast.yaml", "slow.yaml", "--budget", "0.1s"]
    claim(capsys, *words)
    tiny_runs.write_text(place / "exam", documents=20, seed=4)
    text = refused(capsys, "claim", CLAIM, "fast.yaml", "slow.yaml", "--pairs", "9", code=4)
    assert "The evaluation text of A has changed since the claim was registered" in text
    (registered,) = Register(Path("runs")).claims
    run = Path("runs") / registered.pairs[0].runs[0].run
    config = recorded_config(run)
    shutil.rmtree(run)
    assert tiny_runs.run(config).run_directory.name == run.name
    value = vorox.open_run(run).metrics()[12]["eval/loss"]
    rewrite(lambda body: body["runs"][0].update(value=value))
    assert f"{run.name}: the evaluation text is not the registered one" in verified(capsys)


def test_edited_metrics(verdict_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fast_beats_slow(capsys)
    run, value = a_run_of(found, 2, 1), found["pairs"][1]["runs"][1]["value"]
    metrics = RunLayout(run).metrics
    kept = metrics.read_text(encoding="utf-8")
    better = value + 0.25
    assert repr(value) in kept
    metrics.write_text(kept.replace(repr(value), repr(better)), encoding="utf-8")
    assert verified(capsys) == [
        f"{run.name}: metrics.jsonl says loss {better} at step 12, the register {value}",
    ]
    evaluations = RunLayout(run).evaluations
    evaluations.write_text(evaluations.read_text().replace(repr(value), repr(better)), encoding="utf-8")
    rewrite(lambda body: body["runs"][1].update(value=better) if body["pair"] == 2 else None)
    assert f"{run.name}: computed again, loss is {value}; the register has {better}" in verified(capsys)


def test_extra_retries(
    verdict_place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fast_beats_slow(capsys)
    run = a_run_of(found, 1, 0)
    again = tiny_runs.run(recorded_config(run), resume_from="never").run_directory
    assert again.name == f"{run.name}-2"
    assert verified(capsys) == [], "the same run twice counts once: it has the same bits"
    shutil.rmtree(again)
    tiny_runs.scale_steps(monkeypatch, {3: 0.5})  # another machine, say, or patched code
    again = tiny_runs.run(recorded_config(run), resume_from="never").run_directory
    assert verified(capsys) == [f"{again.name}: arm A of pair 1 ran again, with other bits than the registered run"]
    shutil.rmtree(again)
    bodies, _ = HashChainedLog(REGISTER).read()
    HashChainedLog(REGISTER).append([next(body for body in bodies if body["kind"] == "pair" and body["pair"] == 3)])
    assert any("pair 3 was registered 2 times" in one for one in verified(capsys))


def test_a_dropped_pair_and_a_dropped_claim(verdict_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast_beats_slow(capsys)
    bodies, _ = HashChainedLog(REGISTER).read()
    REGISTER.unlink()
    HashChainedLog(REGISTER).append([body for body in bodies if body.get("pair") != 2])
    assert any("its pairs are 1, 3, 4, 5" in one for one in verified(capsys))
    REGISTER.unlink()
    content = {**bodies[0]["content"], "registered_at": "later"}
    HashChainedLog(REGISTER).append([{"kind": "claim", "content": content}])
    assert sum("a run of a claim that the register does not have" in one for one in verified(capsys)) >= 10


def test_other_data(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_runs.write_text(place / "exam", documents=20, seed=3)
    held_out = {"sources": [{"name": "exam", "format": "jsonl", "paths": [str(place / "exam")]}]}
    write_configurations(place, validation=held_out)
    claim(capsys, CLAIM, "fast.yaml", "slow.yaml", "--budget", "0.1s")
    tiny_runs.write_text(place / "text", seed=9)
    text = refused(capsys, "claim", CLAIM, "fast.yaml", "slow.yaml", "--pairs", "9", code=4)
    assert "The training text of A has changed since the claim was registered" in text
    (registered,) = Register(Path("runs")).claims
    assert len(registered.pairs) == 1
    run = Path("runs") / registered.pairs[0].runs[1].run
    config = recorded_config(run)
    shutil.rmtree(run)
    tiny_runs.run(config)
    found = verified(capsys)
    assert f"{run.name}: the training text is not the registered one" in found
    assert any(one.startswith(f"{run.name}: the replay chain does not end") for one in found)


def test_forged_entries(verdict_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the claim, before it is registered; then of its verdict and its pairs."""
    (claim, *others), _ = HashChainedLog(REGISTER).read()
    kept = REGISTER.read_bytes()
    content = claim["content"]
    for forged, what in (
        ({"question": "0" * 64}, "its question is not that of its settings, so earlier claims were not counted"),
        ({"claim": {**content["claim"], "winner": 1}}, "its sentence is 'A beats B on eval loss'; what is tested is"),
        ({"level": 0.05}, "it is claim 1 on its question, with a level of 0.025; it is registered as claim 1, with"),
        ({"after": "1" * 64}, "entries before it were changed or left out since it was registered"),
    ):
        REGISTER.unlink()
        HashChainedLog(REGISTER).append([{"kind": "claim", "content": {**content, **forged}}])
        assert any(what in one for one in verified(capsys)), what
    for kind, forged, what in (
        ("verdict", {"effect": 2.0}, "the verdict has effect 2.0; its pairs give"),
        ("verdict", {"interval": [1.0, 2.0]}, "the verdict has interval [1.0, 2.0]; its pairs give"),
        ("verdict", {"verdict": "refuted"}, "pairs say holds"),
        ("pair", {"num_same_rows": 11, "same_start": False}, "its runs have 12 steps on the same rows and the same"),
    ):
        REGISTER.write_bytes(kept)
        rewrite(lambda body, forged=forged: body.update(forged), kind=kind)
        register = Register(Path("runs").absolute())
        found = [*_entry_findings(register, register.claims[0])]
        found += _pair_findings(register.claims[0], register.claims[0].pairs[0], Path("runs").absolute())
        assert [what in one.what for one in found] == [True], found
    last = others[-2]["pair"]
    extra = {**others[-2], "pair": last + 1}
    REGISTER.unlink()
    HashChainedLog(REGISTER).append([claim, *others[:-1], extra])
    register = Register(Path("runs").absolute())
    assert [one.what for one in _entry_findings(register, register.claims[0])] == [
        f"it was decided after {last} pairs, and {last + 1} are registered"
    ]


def test_an_entry_left_out_before_a_claim(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the only trace of a claim on another question; and the older of two undecided claims goes on."""
    short = ["--budget", "0.1s", "train.num_steps=2", "eval.every_steps=null"]
    first = claim(capsys, "A beats B on eval accuracy", "fast.yaml", "slow.yaml", *short)
    second = claim(capsys, "A beats B on eval loss by 1%", "fast.yaml", "slow.yaml", *short)
    third = claim(capsys, "A beats B on eval loss by 2%", "fast.yaml", "slow.yaml", *short)
    assert [len(one["earlier"]) for one in (first, second, third)] == [0, 0, 1]
    again = claim(capsys, "A beats B on eval loss by 1%", "fast.yaml", "slow.yaml", "--pairs", "5", *short[2:])
    assert (again["claim"], again["pairs"][0]) == (second["claim"], second["pairs"][0])
    assert verified(capsys, second["claim"]) == []
    bodies, _ = HashChainedLog(REGISTER).read()
    REGISTER.unlink()
    HashChainedLog(REGISTER).append([body for body in bodies if body.get("claim") != first["claim"]])
    what = "entries before it were changed or left out since it was registered"
    assert any(what in one for one in verified(capsys, second["claim"]))


def test_a_signed_verdict(verdict_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for name in ("own", "other"):
        key = Ed25519PrivateKey.generate()
        Path(f"{name}.pem").write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ))  # fmt: skip
        Path(f"{name}.pub").write_bytes(key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ))  # fmt: skip
    found = fast_beats_slow(capsys, "--key", "own.pem")
    assert Path(found["signature"]).is_file()
    assert verified(capsys, "--public-key", "own.pub") == []
    assert "not by this key" in refused(capsys, "claims", "verify", "--public-key", "other.pub", code=5)
    rewrite(lambda body: body.update(seconds=1.0) if body["pair"] == 1 else None)
    assert "other pairs or another verdict than were signed" in refused(
        capsys, "claims", "verify", "--public-key", "own.pub", code=5
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["A is better than B"], "is no claim"),
        (["A beats A on eval loss"], "compares a configuration with itself"),
        (["A beats C on eval loss"], "names C, which is neither configuration"),
        (["A beats B on loss"], "'loss' is no metric of a claim"),
        (["A beats B on eval loss by 100%"], "A margin of 100% is no margin"),
        ([CLAIM, "--pairs", "3"], "3 pairs can decide nothing"),
        ([CLAIM, "--level", "1.5"], "A level of 1.5 is no probability"),
        ([CLAIM, "eval.at_end=false"], "is not validated at its end"),
        ([CLAIM, "optimizer.lr=0.1"], "A and B are the same configuration"),
        ([CLAIM, "data.mode=streaming", "data.growth.mode=strict"], "may read text that is not there yet"),
        ([CLAIM, "data.validation.held_out_fraction=0"], "No text is held out"),
        ([CLAIM, "--budget", "soon"], "--budget soon is not a duration"),
        ([CLAIM, "--key", "missing.pem"], "The key cannot be read"),
        ([CLAIM, "--pear", "3"], "Unknown option --pear"),
    ],
)
def test_what_is_no_claim(place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    pairs = [] if "--pairs" in words else ["--pairs", "8"]
    text = refused(capsys, "claim", words[0], "fast.yaml", "slow.yaml", *pairs, *words[1:])
    assert message in text
    assert not REGISTER.exists()
    assert not list(Path("runs").glob("claim-*"))


def test_arms_that_cannot_be_compared(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.loads(Path("slow.yaml").read_text(encoding="utf-8"))
    Path("exam.yaml").write_text(json.dumps({**settings, "eval": {**settings["eval"], "num_sequences": 3}}))
    Path("word.yaml").write_text(json.dumps({**settings, "tokenizer": {"kind": "bpe", "vocab_size": 270}}))
    for other, what in (("exam.yaml", "validation rows"), ("word.yaml", "tokenizers")):
        text = refused(capsys, "claim", CLAIM, "fast.yaml", other, "--pairs", "8")
        assert f"A and B have other {what}" in text
    assert not REGISTER.exists()
    assert "The claim has no budget" in refused(capsys, "claim", CLAIM, "fast.yaml", "slow.yaml")
    assert "A claim is about two configurations" in refused(capsys, "claim", CLAIM, "fast.yaml", "--pairs", "8")
    assert "There is no claim" in refused(capsys, "claims", "verify")
    assert not Path("runs").exists(), "nothing is written before the claim"
    REGISTER.parent.mkdir(parents=True)
    REGISTER.write_text('{"body":{},"prev":"","xxh3":"0"}\n{}\n', encoding="utf-8")
    for words in (["claims", "list"], ["claim", CLAIM, "fast.yaml", "slow.yaml", "--pairs", "8"]):
        assert "is damaged or out of sequence" in refused(capsys, *words, code=4)


# -- Equal arms, and both frameworks -----------------------------------------------------------------------------------


class EqualArms(tiny_runs.NumpyBackend):
    """Both arms are one configuration to the numpy engine, with initial weights of their own in every run."""

    def create(self, config: RunConfig, spec: DecoderSpec, dist: DistributedContext) -> NumpyEngine:
        seed = zlib.crc32(f"{config.run.name} {config.run.seed}".encode())
        return NumpyEngine(spec.vocab_size, seed=seed, width=4)


def test_twenty_claims_of_equal_arms(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole claims, then 200 of differences drawn from theirs: at most the level and its interval are decided."""
    monkeypatch.setattr(vorox.run.backends, "load", lambda name: EqualArms())
    differences: list[float] = []
    decided = 0
    short = ["train.num_steps=2", "schedule.warmup_steps=1", "eval.every_steps=null", "checkpoint.every_steps=null"]
    for number in range(20):
        other = json.loads(Path("slow.yaml").read_text(encoding="utf-8"))
        other["optimizer"]["beta1"] = 0.5 + number / 100  # which the numpy engine does not use
        Path("other.yaml").write_text(json.dumps(other), encoding="utf-8")
        found = claim(capsys, CLAIM, "slow.yaml", "other.yaml", "--pairs", "5", *short)
        assert (found["earlier"], len(found["pairs"])) == ([], 5)
        decided += found["verdict"]["verdict"] != "undecided"
        differences += [pair["runs"][1]["value"] - pair["runs"][0]["value"] for pair in found["pairs"]]
    assert decided <= 4, "of 20 claims of level 0.025, 5 are decided with a probability of 0.0001"
    deviation = float(np.std(differences))
    assert deviation > 0.001
    assert abs(np.mean(differences)) < 4 * deviation / 10, "the arms are equal"
    centred = np.array(differences) - np.mean(differences)
    assert num_decided(centred) <= 20, "5% of 200, and 3.2 standard errors"
    assert num_decided(centred + 2 * deviation) > 180, "the same claims see an effect"


def num_decided(differences: npt.NDArray[np.floating[Any]]) -> int:
    """How many of 200 claims of 20 pairs drawn from these differences are decided, each stopped at once when it is."""
    drawn = np.random.default_rng().choice(differences, (200, 20)).tolist()
    return sum(any(paired_test(claim[:n], 0.05).sign for n in range(5, 21)) for claim in drawn)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(["backend=torch"], marks=pytest.mark.torch),
        pytest.param(["backend=jax", "runtime.num_threads=null"], marks=pytest.mark.jax),
    ],
    ids=["torch", "jax"],
)
def test_whole_claims_of_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_configurations(tmp_path)
    found = fast_beats_slow(capsys, "log.matmul_peak=false", *engine)
    assert found["verdict"]["verdict"] == "holds"
    assert all(pair["same_start"] and pair["num_same_rows"] == 12 for pair in found["pairs"])
    assert verified(capsys) == []
