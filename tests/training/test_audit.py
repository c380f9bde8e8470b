"""An audit meets forged segments as often as it prints, never accuses an honest run, and needs the files alone."""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import forged_runs
import tiny_runs
import vorox.run
from numpy_engine import NumpyEngine, NumpyResult
from vorox.cli import main
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.files.staged_directory import StagedDirectory, read_manifest
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.records.log import RunLog
from vorox.records.replay_chain import StateChain, read_chain, read_states
from vorox.training.audit import AuditReport, audit, cost_of
from vorox.training.audit_records import open_run
from vorox.training.audit_sample import Heads, Segment, chance_of_meeting, chances, group_into_passes, in_order
from vorox.training.steps.workload import Workload

FORGED = 3
"""Forged segments of 12: at least 20%, one of the printed shares."""


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest run of 12 segments."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_runs.use_numpy_engine(monkeypatch)
        return forged_runs.honest_run(tmp_path_factory.mktemp("trained"), random.randrange(10**6))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change; the caches are those of the original."""
    return Path(shutil.copytree(trained, tmp_path / "copy" / trained.name))


def make_workload(config: RunConfig) -> Workload:
    return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def audited(run: Path, count: int = 99, challenge: str = "7", **arguments: Any) -> AuditReport:
    return audit(open_run(run, **arguments), challenge, count, make_workload)


def told(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 0) -> dict[str, Any]:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert main(words) == code
    return json.loads("{" + capsys.readouterr().out.partition("{")[2])


# -- The sample -------------------------------------------------------------------------------------------------------


def test_the_chance_is_the_share_of_all_samples_that_hold_a_forged_segment() -> None:
    """Oracle: every sample there is."""
    for total in range(1, 9):
        for forged, count in itertools.product(range(total + 1), range(1, total + 1)):
            samples = list(itertools.combinations(range(total), count))
            met = sum(min(sample) < forged for sample in samples)
            assert chance_of_meeting(total, forged, count) == pytest.approx(met / len(samples))


def test_shares_are_rounded_up_to_whole_segments() -> None:
    assert [(one.percent, one.num_forged) for one in chances(34, 12)] == [(1, 1), (5, 2), (20, 7)]
    assert [one.num_forged for one in chances(5, 2)] == [1, 1, 1]
    assert chances(20_000, 300)[1].probability == pytest.approx(1 - 0.95**300, abs=1e-3)


def test_every_segment_is_chosen_as_often_and_a_larger_sample_has_the_smaller_one() -> None:
    heads, segments = Heads(10, "c", "s", "p", 1), [Segment(number, number - 1, number, 0) for number in range(1, 11)]
    orders = [[one.number for one in in_order(segments, heads, str(challenge))] for challenge in range(4000)]
    counts = Counter(number for order in orders for number in order[:3])
    assert max(abs(counts[number] - 1200) for number in range(1, 11)) < 5 * math.sqrt(4000 * 0.3 * 0.7)
    assert len({tuple(order) for order in orders}) > 3900
    for change in (Heads(10, "d", "s", "p", 1), Heads(10, "c", "t", "p", 1), Heads(10, "c", "s", "q", 1)):
        assert [one.number for one in in_order(segments, change, "0")] != orders[0], "every head decides the order"


def test_a_withheld_state_moves_no_other_segment() -> None:
    heads, segments = Heads(10, "c", "s", "p", 1), [Segment(number, number - 1, number, 0) for number in range(1, 11)]
    order = in_order(segments, heads, "x")
    assert in_order([one for one in segments if one != order[2]], heads, "x") == [*order[:2], *order[3:]]


def test_segments_that_share_their_way_are_computed_once() -> None:
    one, two, three, four = (Segment(n, 2 * n, 2 * n + 2, origin) for n, origin in ((1, 0), (3, 0), (4, 8), (7, 14)))
    assert group_into_passes([four, two, one, three]) == [[one, two, three], [four]]


# -- Forged and honest runs -------------------------------------------------------------------------------------------


def interval(probabilities: list[float], confidence: float = 0.999) -> tuple[int, int]:
    """The number of catches that runs with these probabilities have with this confidence (Poisson-binomial)."""
    pmf = [1.0]
    for p in probabilities:
        pmf = [(pmf[n] if n < len(pmf) else 0) * (1 - p) + (pmf[n - 1] * p if n else 0) for n in range(len(pmf) + 1)]
    total = list(itertools.accumulate(pmf))
    tail = (1 - confidence) / 2
    return next(n for n, sum_ in enumerate(total) if sum_ > tail), next(
        n for n, sum_ in enumerate(total) if sum_ >= 1 - tail
    )


def forged_and_audited(directory: Path, seed: int, count: int) -> tuple[AuditReport, set[int]]:
    chooser = random.Random(seed)
    kind, segments = forged_runs.KINDS[seed % 4], set(chooser.sample(range(2, 13), FORGED))
    run = forged_runs.forged_run(directory, seed, kind, segments)
    report = audited(run, count, str(chooser.random()))
    shutil.rmtree(run)
    return report, segments


@pytest.mark.slow
def test_200_forged_runs_are_caught_as_often_as_printed(tmp_path: Path) -> None:
    seeds = random.sample(range(10**6), 50)
    caught, printed = dict.fromkeys(forged_runs.KINDS, 0), list[float]()
    for seed, shift in itertools.product(seeds, range(4)):
        report, segments = forged_and_audited(tmp_path, 4 * seed + shift, 3)
        chance = report.chances[-1]
        assert (chance.percent, chance.num_forged, report.num_sampled) == (20, FORGED, 3)
        printed.append(chance.probability)
        sampled = {one.segment.number for one in report.results if one.is_sampled}
        assert (report.verdict == "differs") == bool(sampled & segments)
        caught[forged_runs.KINDS[shift]] += report.verdict == "differs"
    low, high = interval(printed)
    print(f"caught {caught} of 50 each, {sum(caught.values())} of 200; printed {printed[0]:.3f}: {low} to {high}")
    assert low <= sum(caught.values()) <= high
    for kind, number in caught.items():
        assert interval(printed[:50])[0] <= number <= interval(printed[:50])[1], kind


@pytest.mark.slow
def test_50_honest_runs_are_never_accused(tmp_path: Path) -> None:
    for seed in random.sample(range(10**6), 50):
        run = forged_runs.honest_run(tmp_path, seed)
        assert audited(run, 12, str(seed)).verdict == "passed"
        shutil.rmtree(run)


@pytest.mark.parametrize("kind", forged_runs.KINDS)
def test_each_kind_of_forgery_is_met_where_it_is(tmp_path: Path, kind: forged_runs.Kind) -> None:
    """The records agree with each other, so nothing but a computation finds it."""
    segment = random.randint(2, 11)
    run = forged_runs.forged_run(tmp_path, random.randrange(10**6), kind, {segment})
    opened = open_run(run)
    number_of = {one.number: one for one in opened.segments}
    assert list(number_of) == list(range(1, 13))
    report = audit(opened, "all", 12, make_workload)
    (wrong,) = [one for one in report.results if one.outcome == "differs"]
    assert wrong.segment.number == segment
    assert wrong.difference is not None
    assert wrong.difference.quantity == ("state" if kind == "weights" else "loss")
    others = [audit(opened, str(seed), 1, make_workload) for seed in range(3)]
    for one in others:
        (result,) = one.results
        assert (result.outcome == "differs") == (result.segment.number == segment)


def test_an_honest_run_passes_and_names_its_limits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".pin"}
    assert main(["audit", str(run), "--segments", "3", "--challenge", "dice: 5 2 6"]) == 0
    said = capsys.readouterr().out
    assert "Passed: 3 of 3 sampled segments bit-exact" in said
    assert (
        "If 20% of the 12 auditable segments (3) are forged, 3 samples would have met one with probability 0.62" in said
    )
    assert "not signed" in said
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".pin"}
    assert after.pop(run / "verdicts.jsonl").count(b"\n") == 1
    assert after == before
    assert "Passed" in (run / "verdicts.jsonl").read_text()
    one, again = (told(capsys, ["audit", str(run), "--segments", "3", "--challenge", "x", "--json"]) for _ in range(2))
    assert one == again
    drawn = {told(capsys, ["audit", str(run), "--plan", "--json"])["challenge"] for _ in range(2)}
    assert len(drawn) == 2


def test_starts_that_were_not_kept_are_rebuilt_and_what_is_on_the_way_is_compared(tmp_path: Path) -> None:
    """Weights are swapped in at step 8, whose state was not kept: the segment after it can only be rebuilt over it."""
    settings = ["checkpoint.keep_last=1", "checkpoint.keep_every_steps=6"]
    run = forged_runs.honest_run(tmp_path, 3, settings)
    opened = open_run(run)
    assert [(one.start, one.origin) for one in opened.segments] == [(n, 0 if n < 6 else 6) for n in range(12)]
    last = next(str(n) for n in range(99) if opened.sample(str(n), 1)[0].number == 9)
    report = audit(opened, last, 1, make_workload)
    assert [(one.segment.number, one.is_sampled, one.outcome) for one in report.results] == [
        (7, False, "exact"), (8, False, "exact"), (9, True, "exact")
    ]  # fmt: skip
    assert cost_of(opened, opened.sample(last, 1)).num_steps == 3


def test_supplied_states_shorten_the_way(tmp_path: Path) -> None:
    run = tiny_runs.run(
        tiny_runs.configuration(tmp_path, ["checkpoint.keep_last=1", "checkpoint.keep_best=0", "eval.every_steps=null"])
    ).run_directory
    to = tmp_path / "made"
    assert main(["checkpoints", "materialize", str(run), "--step", "4", "--step", "5", "--to", str(to)]) == 0
    assert [one.origin for one in open_run(run).segments] == [0, 0, 0]
    assert [one.origin for one in open_run(run, states=to).segments] == [0, 4, 4]
    assert audited(run, states=to).verdict == "passed"
    shutil.rmtree(to / "step-00000004")
    with pytest.raises(ConfigError, match="no state that the run recorded"):
        open_run(run, states=to)


# -- Cannot decide ----------------------------------------------------------------------------------------------------


def compute_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine round another way, as another machine does."""
    original = NumpyEngine.train_step

    def train_step(engine: NumpyEngine, batch: Any, **arguments: Any) -> NumpyResult:
        engine.parameters["output"] *= np.float32(1.0000002)
        return original(engine, batch, **arguments)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)


ENVIRONMENTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other version": (lambda notes: notes["environment"].update(numpy="1.0.0"), "numpy was 1.0.0"),
    "no promise": (lambda notes: notes["environment"].update(determinism="data"), "determinism is data"),
    "not recorded": (lambda notes: notes.pop("environment"), "does not say in which environment"),
}


def edit_record(run: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = RunLayout(run).record
    record = json.loads(path.read_text())
    for attempt in record["attempts"]:
        edit(attempt)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_bits_that_need_not_be_equal_accuse_nobody(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """A forger who edits the recorded environment gets no further: the run has not passed."""
    edit, words = ENVIRONMENTS[case]
    for manifest in step_directories(run).values():
        assert "environment" in (manifest / "MANIFEST.json").read_text()
    edit_record(run, lambda attempt: edit(attempt["notes"]))
    assert audited(run, 2).verdict == "passed", "equal bits pass wherever they were computed"
    compute_otherwise(monkeypatch)
    assert main(["audit", str(run), "--segments", "2", "--challenge", "1"]) == 7
    said = " ".join("".join(capsys.readouterr()).split())
    assert words in said
    assert "Cannot decide" in said
    assert "forged" not in said.partition("Cannot decide")[2]


def test_other_code_of_vorox_accuses_nobody(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_record(run, lambda attempt: attempt["environment"].update(vorox="0.1.9"))
    edit_record(run, lambda attempt: attempt.update(code={"commit": "0" * 40, "diff_sha256": ""}))
    compute_otherwise(monkeypatch)
    report = audited(run, 1)
    assert report.verdict == "cannot decide"
    assert report.results[0].environment[0] == f"vorox was 0.1.9, is {vorox.__version__}"


def test_the_same_environment_with_other_bits_differs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute_otherwise(monkeypatch)
    found = told(capsys, ["audit", str(run), "--segments", "1", "--challenge", "1", "--json"], 5)
    assert found["verdict"] == "differs"


def test_other_rows_differ_in_any_environment(run: Path) -> None:
    """Rows are arithmetic on the plan: the records name rows that the plan does not give."""
    forged_runs.rewrite(run, lambda entry: "0" * 64 if entry.step == 5 else entry.batch)
    edit_record(run, lambda attempt: attempt["notes"]["environment"].update(numpy="1.0.0"))
    report = audited(run)
    assert report.verdict == "differs"
    assert [one.difference.quantity for one in report.results if one.difference] == ["batch"]


# -- Records that contradict each other -------------------------------------------------------------------------------


def edit_lines(path: Path, number: int, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[number]
    lines[number] = lines[number].replace(old, new)
    path.write_text("".join(lines))


def test_changed_records_are_refused_before_anything_is_computed(tmp_path: Path, run: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(run, whole)
    layout = RunLayout(run)

    def refused(kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            open_run(run)
        shutil.rmtree(run)
        shutil.copytree(whole, run)

    entry = read_chain(run)[5]
    lines = layout.chain.read_text().splitlines(keepends=True)
    layout.chain.write_text("".join(line for line in lines if entry.chain not in line))
    refused(DataError, "not intact up to step 12")
    forged_runs.rewrite(run, lambda one: one.batch if one.step != 5 else "0" * 64)
    states = (whole / "states.jsonl").read_bytes()
    layout.states.write_bytes(states)
    refused(CheckpointError, "kept state after step 5 is not the recorded one")
    layout.states.unlink()
    rewritten = StateChain(run, 0)
    for step, state in read_states(whole).items():
        progress: Any = SimpleNamespace(step=step, chain="0" * 64 if step == 5 else state.chain)
        rewritten.record(progress, state.fingerprint)
    refused(CheckpointError, "after step 5 does not belong to the steps")
    plan = layout.plan.read_text()
    layout.plan.write_text("".join(plan.splitlines(keepends=True)[:-1]))
    refused(DataError, "plan is another one")
    shutil.rmtree(layout.checkpoint(7))
    shutil.copytree(layout.checkpoint(6), layout.checkpoint(7))
    refused(CheckpointError, "kept state after step 7 is not the recorded one")
    fingerprint = read_states(run)[6].fingerprint
    layout.states.write_text(layout.states.read_text().replace(fingerprint, "0" * 32))
    with pytest.raises(DataError):
        open_run(run)


def test_a_damaged_checkpoint_is_rebuilt(run: Path) -> None:
    (RunLayout(run).checkpoint(7) / "state.bin").write_bytes(b"")
    opened = open_run(run)
    seventh = next(str(n) for n in range(99) if opened.sample(str(n), 1)[0].number == 8)
    report = audit(opened, seventh, 1, make_workload)
    assert [(one.segment.number, one.outcome) for one in report.results] == [(7, "exact"), (8, "exact")]


def test_other_tensors_under_a_true_manifest_are_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hashes of files are right, and the manifest has the recorded fingerprint, but it is not that of the tensors."""
    kept = RunLayout(run).checkpoint(7)
    shutil.move(kept, run.parent / "seven")
    manifest = read_manifest(run.parent / "seven")
    with StagedDirectory(kept) as directory:
        for name in manifest["files"]:
            content = bytearray((run.parent / "seven" / name).read_bytes())
            content[-1] ^= name == "state.bin"
            directory.write(name, content)
        directory.commit(manifest["metadata"])
    opened = open_run(run)
    eighth = next(str(n) for n in range(99) if opened.sample(str(n), 1)[0].number == 8)
    first = next(str(n) for n in range(99) if opened.sample(str(n), 1)[0].number == 1)
    for challenge in (eighth, first):  # it starts the sampled segment, or none
        assert main(["audit", str(run), "--segments", "1", "--challenge", challenge]) == 5
        assert "Loaded state has fingerprint" in capsys.readouterr().err


def rewrite_checkpoint(run: Path, step: int, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit a JSON file of a checkpoint, and give it a manifest that is right for it."""
    kept = RunLayout(run).checkpoint(step)
    honest = Path(shutil.move(kept, run.parent / f"honest-{step}"))
    with StagedDirectory(kept) as directory:
        for file in read_manifest(honest)["files"]:
            content = (honest / file).read_bytes()
            if file == name:
                value = json.loads(content)
                edit(value)
                content = json.dumps(value).encode()
            directory.write(file, content)
        directory.commit(read_manifest(honest)["metadata"])


def swap_ids(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


@pytest.mark.parametrize("is_start", [True, False])
@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("state.json", lambda state: state["progress"]["cursor"].update(position=400), "than the run: position"),
        ("state.json", lambda state: state["progress"]["cursor"].update(seed=5), "than the run: seed"),
        ("state.json", lambda state: state["progress"].update(chain="0" * 64), "than the run: step or chain"),
        ("tokenizer.json", swap_ids, "has another tokenizer"),
    ],
)  # fmt: skip
def test_what_lies_beside_the_tensors_is_checked_under_a_true_manifest(
    run: Path, name: str, edit: Callable[[dict[str, Any]], Any], words: str, is_start: bool
) -> None:
    opened = open_run(run)
    eighth = next(str(n) for n in range(99) if (opened.sample(str(n), 1)[0].number == 8) is is_start)
    rewrite_checkpoint(run, 7, name, edit)
    with pytest.raises(CheckpointError, match=words):
        audited(run, 1, eighth)


@pytest.mark.slow
def test_swapped_weights_are_found_wherever_the_sample_lies(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tensors of another run in a kept state that starts no sampled segment; the last one starts none at all."""
    found = told(capsys, ["audit", str(run), "--segments", "1", "--challenge", "1", "--json"])
    assert (found["num_states_checked"], found["states_not_checked"]) == (12, [])
    other = forged_runs.honest_run(tmp_path, random.randrange(10**6, 2 * 10**6))
    for step in (12, random.randrange(2, 12)):
        kept, honest = RunLayout(run).checkpoint(step), tmp_path / "honest"
        shutil.move(kept, honest)
        with StagedDirectory(kept) as directory:
            for name in read_manifest(honest)["files"]:
                source = RunLayout(other).checkpoint(step) if name == "state.bin" else honest
                directory.write(name, (source / name).read_bytes())
            directory.commit(read_manifest(honest)["metadata"])
        opened = open_run(run)
        first = next(str(n) for n in range(99) if opened.sample(str(n), 1)[0].number == 1)
        capsys.readouterr()
        assert main(["audit", str(run), "--segments", "1", "--challenge", first]) == 5
        said = " ".join(capsys.readouterr().err.split())
        assert "Loaded state has fingerprint" in said
        assert kept.name in said
        shutil.rmtree(kept)
        shutil.move(honest, kept)
    (RunLayout(run).checkpoint(12) / "state.bin").write_bytes(b"")
    assert main(["audit", str(run), "--segments", "1", "--challenge", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Kept states with the recorded tensors: 11 of 12; not checked: 12, its bytes are damaged" in said
    assert "bit-exact, 11 of 12 kept states checked" in said


def test_kept_states_without_a_record_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunLayout(run).states.unlink()
    assert main(["audit", str(run)]) == 4
    assert "keeps 12 states, and states.jsonl records none" in " ".join(capsys.readouterr().err.split())
    shutil.rmtree(RunLayout(run).checkpoints)  # as a run that stopped before its first save
    assert main(["audit", str(run), "--challenge", "1"]) == 0
    assert "1 of 1 sampled segment bit-exact, but no state of the run is recorded" in capsys.readouterr().out


def test_logged_numbers_that_the_chain_does_not_have_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest change of a float, in either number of the newest logged step."""
    path = RunLayout(run).metrics
    lines = path.read_text().splitlines(keepends=True)
    at = max(number for number, line in enumerate(lines) if '"grad_norm"' in line)
    for name in ("loss", "grad_norm"):
        record = json.loads(lines[at])
        record["values"][name] = math.nextafter(record["values"][name], math.inf)
        path.write_text("".join([*lines[:at], json.dumps(record) + "\n", *lines[at + 1 :]]))
        assert main(["audit", str(run)]) == 4
        assert f"The metrics of step 12 have {name}" in " ".join(capsys.readouterr().err.split())


# -- Runs of other kinds ----------------------------------------------------------------------------------------------


def test_void_steps_count_as_they_were_computed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed in step 7 and resumed from step 4 under another rate."""
    config = tiny_runs.configuration(tmp_path, ["checkpoint.keep_last=9", "eval.every_steps=null"])
    with monkeypatch.context() as patch:
        tiny_runs.at_step(patch, 7, tiny_runs.kill)
        with pytest.raises(tiny_runs.Killed):
            tiny_runs.run(config)
    changed = tiny_runs.configuration(
        tmp_path, ["checkpoint.keep_last=9", "eval.every_steps=null", "optimizer.lr=0.02"]
    )
    (run,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    tiny_runs.run(changed, resume_from=run)
    report = audited(run)
    assert (report.verdict, report.num_sampled) == ("passed", 3)


def test_a_live_run_is_audited_up_to_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[AuditReport] = []
    original = NumpyEngine.train_step

    def observed() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(NumpyEngine, "train_step", original)
            (run,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
            found.append(audited(run))

    with monkeypatch.context() as patch:
        tiny_runs.at_step(patch, 11, observed)
        tiny_runs.run(tiny_runs.configuration(tmp_path, ["checkpoint.keep_last=9"]))
    (report,) = found
    assert report.verdict == "passed"
    assert report.run.heads.step in (8, 9, 10)


def test_segments_of_other_process_counts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_runs.configuration(tmp_path, ["checkpoint.keep_last=9"])
    tiny_runs.run(config)
    longer = tiny_runs.configuration(tmp_path, ["checkpoint.keep_last=9", "train.num_steps=20"])
    (run,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    tiny_runs.run(longer, resume_from=run)

    def edit(attempt: dict[str, Any]) -> None:
        if attempt["notes"]["steps"]["start_step"]:
            attempt["notes"]["environment"]["num_processes"] = 4

    edit_record(run, edit)
    opened = open_run(run)
    assert [bool(one.obstacle) for one in opened.segments] == [False, False, False, True, True]
    assert audited(run).verdict == "passed"
    assert main(["audit", str(run), "--challenge", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Cannot be audited here: 2 segments, steps 13 to 20: it ran with 4 processes: add --nproc 4" in said
    assert [bool(one.obstacle) for one in open_run(run, num_processes=4).segments] == [True] * 3 + [False] * 2
    edit_record(run, lambda attempt: attempt["notes"]["environment"].update(num_processes=4))
    assert main(["audit", str(run)]) == 2
    assert "No segment of the run can be audited" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--segments", "0"], 2, "segments"),
        (["--challenge", " "], 2, "The challenge is empty"),
        (["--sign-key", "key.pem"], 2, "none is written"),
        (["--output", "nowhere/statement.json"], 2, "folder of the statement does not exist"),
        (["--output", "run.json"], 2, "already there"),
        (["--states", "nowhere"], 2, "no state that the run recorded"),
        (["--public-key", "nowhere"], 2, "key cannot be read"),
        (["--cache", "nowhere"], 4, "of the run not found"),
    ],
)
def test_what_cannot_be_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], code: int,
    expected: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(run)
    assert main(["audit", str(run), *words]) == code
    said = capsys.readouterr()
    assert expected in " ".join((said.err or said.out).split())


def test_a_run_without_caches_or_steps_is_refused(
    tmp_path: Path, trained: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "nothing-like-it", "--root", str(run.parent)]) == 2
    path = RunLayout(run).config
    path.write_text(path.read_text().replace(str(trained.parents[1] / "cache"), str(tmp_path)))
    edit_record(run, lambda attempt: attempt.update(json.loads(json.dumps(attempt).replace("/cache/", "/gone/"))))
    before = sorted(tmp_path.rglob("*"))
    assert main(["audit", str(run), "--segments", "1"]) == 4
    assert main(["audit", str(run), "--segments", "1", "--cache", str(tmp_path)]) == 4
    assert sorted(tmp_path.rglob("*")) == before, "no cache is restored"
    tiny_runs.forget_steps(run)
    assert main(["audit", str(run)]) == 4
    assert "No step is recorded" in capsys.readouterr().err


# -- By somebody else -------------------------------------------------------------------------------------------------

AUDITOR = """
import os, sys
uid, tests, rehearsed, run, *options = sys.argv[1:]
sys.path.insert(0, tests)
import pytest, tiny_runs
from vorox.cli import main
tiny_runs.use_numpy_engine(pytest.MonkeyPatch())
if int(uid):
    assert main(["audit", rehearsed, *options]) == 0  # imports what another user may be unable to read
    os.setgroups([]), os.setgid(int(uid)), os.setuid(int(uid))
sys.exit(main(["audit", run, *options, "--output", "statement.json"]))
"""


def keys(directory: Path, name: str) -> tuple[Path, Path]:
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@needs_openssl
def test_published_files_are_enough_for_another_user(tmp_path: Path) -> None:
    """A read-only copy of run and caches, elsewhere, with the original gone; as another user where root can."""
    run = forged_runs.honest_run(tmp_path, 21)
    private, public = keys(tmp_path, "owner")
    assert main(["checkpoints", "sign", str(run), "--step", "12", "--key", str(private)]) == 0
    with tempfile.TemporaryDirectory(prefix="vorox-published-") as place:
        published, home = Path(place, "published"), Path(place, "home")
        shutil.copytree(run, published / run.name)
        shutil.copytree(run, Path(place, "rehearsed", run.name))
        shutil.copytree(tmp_path / "cache", published / "cache")
        shutil.copy(public, published)
        (tmp_path / "runs").rename(tmp_path / "gone")
        (tmp_path / "cache").rename(tmp_path / "gone-cache")
        (tmp_path / "text").rename(tmp_path / "gone-text")
        home.mkdir()
        uid = 65534 if os.getuid() == 0 else 0
        Path(place).chmod(0o755)
        for path in [published, *published.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        if uid:
            os.chown(home, uid, uid)
        environment = {
            **os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home), "XDG_CACHE_HOME": str(home),
            "VOROX_CACHE": str(home / "cache"), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        words = [Path(place, "rehearsed", run.name), published / run.name, "--cache", published / "cache"]
        words += ["--segments", "3", "--public-key", published / "owner.pub", "--challenge", "17"]
        tests = Path(__file__).parents[1]
        try:
            done = subprocess.run(
                [sys.executable, "-c", AUDITOR, str(uid), *map(str, (tests, *words))],
                capture_output=True, text=True, cwd=home, env=environment,
            )  # fmt: skip
        finally:
            for path in [published, *published.rglob("*")]:
                path.chmod(0o755)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Passed: 3 of 3" in done.stdout.rpartition("signed by key")[2]
        assert json.loads((home / "statement.json").read_text())["predicate"]["verdict"] == "passed"


@needs_openssl
def test_only_what_is_signed_counts_and_the_statement_is_signed(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = keys(tmp_path, "owner")
    own, own_public = keys(tmp_path, "auditor")
    words = ["audit", str(run), "--public-key", str(public), "--challenge", "1", "--json"]
    assert main(words) == 5
    assert "No checkpoint of the run is signed" in capsys.readouterr().err
    assert main(["checkpoints", "sign", str(run), "--step", "9", "--key", str(private)]) == 0
    output = tmp_path / "audit.json"
    found = told(capsys, [*words, "--output", str(output), "--sign-key", str(own)])
    assert (found["num_segments"], found["heads"]["step"]) == (9, 9)
    assert found["heads"]["chain"] == read_chain(run)[9].chain
    assert found["heads"]["states"] == read_states(run)[9].states
    envelope = json.loads(output.read_text())
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    (tmp_path / "message").write_bytes(f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload)
    (tmp_path / "signature").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    check = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", own_public, "-rawin", "-in", tmp_path / "message"]
    assert subprocess.run([*check, "-sigfile", tmp_path / "signature"]).returncode == 0
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0]["digest"] == {"blake2b-256": read_chain(run)[9].chain}
    assert statement["predicate"]["challenge"] == "1"
    assert main([*words[:3], str(own_public), "--challenge", "1"]) == 5
    assert "not by this key" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["backend=torch"], marks=pytest.mark.torch, id="torch"),
        pytest.param(["backend=jax", "runtime.num_threads=null"], marks=pytest.mark.jax, id="jax"),
        pytest.param(["backend=torch", "adapter.kind=lora"], marks=pytest.mark.torch, id="lora"),
    ],
)
def test_the_engines_compute_their_own_segments_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    monkeypatch.undo()
    tiny_runs.configuration(tmp_path)
    words = ["train", str(tmp_path / "tiny.yaml")]
    if "adapter.kind=lora" in settings:
        pytest.importorskip("peft")
        assert main([*words, "model.family=llama", "run.name=base", "train.num_steps=4"]) == 0
        (base,) = (tmp_path / "runs").glob("base*")
        words += ["--from-weights", str(RunLayout(base).checkpoint(4))]
    assert main([*words, *settings, *forged_runs.EVERY_STATE, "run.name=own"]) == 0
    (run,) = (tmp_path / "runs").glob("own*")
    report = audited(run, 3, "5")
    assert (report.verdict, report.num_sampled) == ("passed", 3)
    forged_runs.rewrite(run, lambda entry: entry.batch if entry.step != 6 else "0" * 64)
    wrong = [one.segment.number for one in audited(run).results if one.outcome == "differs"]
    assert wrong == [6]
