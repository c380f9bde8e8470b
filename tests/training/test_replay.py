"""Replay: bit-exact where nothing changed, and the negative controls: whatever is changed is refused or named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import vorox.run
from numpy_engine import NumpyEngine, NumpyResult
from tiny_runs import configuration, run, use_numpy_engine, write_text
from vorox.core.errors import CheckpointError, ConfigError, DataError, VoroxError
from vorox.core.files.atomic import MANIFEST_NAME, canonical_json, pretty_json
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.files.file_holder import FileLock
from vorox.core.files.staged_directory import read_manifest
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.format import encode_chunk
from vorox.data.cache.files.manifest import LOG_NAME, Manifest, chunk_path
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.upkeep.retention import USED_NAME
from vorox.data.order.plan import DataPlan
from vorox.records.log import RunLog
from vorox.records.replay_chain import bits, link
from vorox.records.run_context import recorded_config
from vorox.records.step_environments import StepEnvironments
from vorox.training.replay import ReplayDifference, ReplayReport, difference_error, replay
from vorox.training.resume import resume_settings
from vorox.training.steps.workload import Workload

STEPS = 12
CHANGED = {"engine": "numpy", "numpy": "9.9", "blas": "new", "determinism": "bitwise"}


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A finished run over so little text that it reads every row; checkpoints at steps 8 and 12."""
    write_text(tmp_path / "text", documents=8)
    config = configuration(tmp_path, ["data.validation.held_out_fraction=0.3", "data.cache.unit_bytes=100000"])
    directory = run(config).run_directory
    assert list(step_directories(directory)) == [8, 12]
    return directory


def make_workload(config: RunConfig) -> Workload:
    return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def again(directory: Path, first_step: int = 0, last_step: int | None = None) -> ReplayReport:
    return replay(directory, make_workload, first_step=first_step, last_step=last_step)


def files(directory: Path) -> dict[str, str]:
    """Files and their hashes; without the memory of what local files hold and the time when a cache was last used."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.parent.name != "versions" and path.name != USED_NAME
    }


def train_cache(tmp_path: Path) -> Path:
    return next((tmp_path / "cache").glob("text-train-*"))


def commit_anew(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a manifest that agrees with the files as they are, after changing its metadata."""
    body = read_manifest(checkpoint)
    body.pop("sha256", None)
    for name in body["files"]:
        data = (checkpoint / name).read_bytes()
        body["files"][name] = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    change(body["metadata"])
    body["sha256"] = hashlib.sha256(canonical_json(body)).hexdigest()
    (checkpoint / MANIFEST_NAME).write_bytes(pretty_json(body))


# Nothing changed


@pytest.mark.parametrize(
    ("first", "last", "start", "steps", "states"),
    [(0, None, 0, 12, 3), (0, 1, 0, 1, 0), (0, 8, 0, 8, 2), (7, 9, 0, 9, 2), (8, 12, 8, 4, 1), (11, 12, 8, 4, 1)],
)
def test_bit_exact(directory: Path, first: int, last: int | None, start: int, steps: int, states: int) -> None:
    report = again(directory, first, last)
    assert report.is_exact
    assert str(report) == f"bit-exact, {pluralize(steps, 'step')}"
    assert (report.start_step, report.num_steps, report.num_states) == (start, steps, states)
    assert report.environment == ()


def test_changes_nothing_and_needs_no_lock(directory: Path, tmp_path: Path) -> None:
    with FileLock(directory / "LOCK"):
        before = files(tmp_path)
        done: list[tuple[int, int]] = []
        assert replay(directory, make_workload, first_step=8, on_step=lambda *step: done.append(step)).is_exact
        assert files(tmp_path) == before
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_every_checkpoint_gone_but_the_first_weights_are_known(directory: Path) -> None:
    for path in step_directories(directory).values():
        path.rename(path.with_name("away-" + path.name))
    assert str(again(directory)) == "bit-exact, 12 steps"


def test_a_corrupt_checkpoint_is_passed_over(directory: Path) -> None:
    (RunLayout(directory).checkpoint(8) / "state.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="No checkpoint up to step 9 is valid") as refused:
        again(directory, 9)
    assert f"vorox replay {directory} --from 0 --to 12" in refused.value.hint
    assert str(again(directory, 0)) == "bit-exact, 12 steps"
    (RunLayout(directory).checkpoint(8) / MANIFEST_NAME).unlink()
    assert again(directory, 0).num_states == 3, "states.jsonl has those without a checkpoint"


def rewrite_states(directory: Path, step: int, state: str, *, relink: bool) -> None:
    """Change the state of a step, and its links as the format says if ``relink``."""
    path, head, lines = RunLayout(directory).states, "", list[bytes]()
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        entry["state"] = state if entry["step"] == step else entry["state"]
        text = json.dumps([head, entry["step"], entry["chain"], entry["state"]], separators=(",", ":"))
        head = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
        assert relink or step or entry["states"] == head
        entry["states"] = head if relink else entry["states"]
        lines.append(canonical_json(entry) + b"\n")
    path.write_bytes(b"".join(lines))


def test_states_are_chained_and_outlive_their_checkpoints(directory: Path) -> None:
    states = RunLayout(directory).states
    recorded = states.read_bytes()
    rewrite_states(directory, 0, "", relink=False)
    assert states.read_bytes() == recorded, "the links are those of the format"
    assert [json.loads(line)["step"] for line in recorded.splitlines()] == [4, 8, 12]
    fingerprints = [read_manifest(path)["metadata"]["fingerprint"] for path in step_directories(directory).values()]
    assert [json.loads(line)["state"] for line in recorded.splitlines()][1:] == fingerprints
    rewrite_states(directory, 4, "0" * 32, relink=False)
    with pytest.raises(DataError, match="State of step 4 does not follow"):
        again(directory)
    states.write_bytes(recorded)
    rewrite_states(directory, 4, "0" * 32, relink=True)
    difference = again(directory).difference
    assert difference is not None
    assert (difference.step, difference.quantity, difference.recorded) == (4, "state", "0" * 32)
    states.unlink()
    assert again(directory).num_states == 2


def test_a_resume_voids_the_states_after_it(directory: Path) -> None:
    run(
        recorded_config(directory, ["train.num_steps=20", "optimizer.lr=0.5"]),
        resume_from=RunLayout(directory).checkpoint(8),
    )
    report = again(directory)
    assert (report.is_exact, report.num_states) == (True, 5)
    lines = [json.loads(line) for line in RunLayout(directory).states.read_text().splitlines()]
    assert [line.get("resume_step", line.get("step")) for line in lines] == [4, 8, 12, 8, 12, 16, 20]
    assert lines[3] == {"resume_step": 8}


@pytest.mark.parametrize(("first", "last"), [(0, 13), (12, 12), (5, 4), (-1, 3)])
def test_a_range_that_was_not_recorded(directory: Path, first: int, last: int) -> None:
    with pytest.raises(ConfigError, match="not a range of this run"):
        again(directory, first, last)


@pytest.mark.parametrize(("first", "steps"), [(8, 8), (0, 16), (12, 4), (13, 4)])
def test_across_a_resume_with_another_configuration(directory: Path, first: int, steps: int) -> None:
    changed = recorded_config(directory, ["train.num_steps=16", "optimizer.lr=0.5", "checkpoint.keep_last=9"])
    run(changed, resume_from=directory)
    assert str(again(directory, first)) == f"bit-exact, {steps} steps"


def test_every_step_can_be_replayed_though_no_checkpoint_is_left_where_settings_changed(directory: Path) -> None:
    """Twice, under the default retention: only the last two checkpoints are kept, far behind both changes."""
    for length, change in ((16, "optimizer.lr=0.5"), (28, "optimizer.weight_decay=0.3")):
        run(recorded_config(directory, [f"train.num_steps={length}", change]), resume_from=directory)
    assert list(step_directories(directory)) == [24, 28]
    assert list(RunLayout(directory).configs_by_step()) == [0, 12, 16]
    done: list[tuple[int, int]] = []
    report = replay(directory, make_workload, on_step=lambda *step: done.append(step))
    assert (str(report), report.num_states) == ("bit-exact, 28 steps", 7)
    assert done == [(step, 28) for step in range(1, 29)]
    assert str(again(directory, 13, 17)) == "bit-exact, 17 steps"


def test_a_difference_behind_a_change_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part is replayed under the settings of the first: the loss after its first update differs."""
    run(recorded_config(directory, ["train.num_steps=16", "optimizer.lr=0.5"]), resume_from=directory)
    before = resume_settings.config_in_force(directory, 0)[0]
    real = resume_settings.config_in_force
    monkeypatch.setattr(resume_settings, "config_in_force", lambda at, step: (before, real(at, step)[1]))
    report = again(directory, 0)
    assert report.difference is not None
    assert (report.num_steps, report.difference.step) == (13, 14)


def test_across_a_resume_to_more_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan records the length, which decides the learning rate; no other setting has changed."""
    run(recorded_config(directory, ["train.num_steps=16", "schedule.warmup_steps=14"]), resume_from=directory)
    assert str(again(directory)) == "bit-exact, 16 steps"
    assert str(again(directory, 14)) == "bit-exact, 4 steps"
    with monkeypatch.context() as patch:
        patch.setattr(DataPlan, "horizon_at", lambda plan, position: plan.state.horizons[0])
        difference = again(directory).difference
    assert difference is not None
    assert difference.step == 14, "the loss after the first step at another rate"
    bodies = [body for body in HashChainedLog(directory / "plan.jsonl").read()[0] if body["kind"] != "horizon"]
    (directory / "plan.jsonl").unlink()
    HashChainedLog(directory / "plan.jsonl").append(bodies)
    with pytest.raises(DataError, match="Length of the run is not recorded for step 1"):
        again(directory)


# The caches changed


def test_any_byte_of_a_cache_chunk(directory: Path, tmp_path: Path) -> None:
    """Every row was read, so each byte of rows and segments is: in no case is the answer wrong or silent."""
    chunks = sorted(train_cache(tmp_path).rglob("*.psc"))
    outcomes = []
    for path in chunks:
        whole = path.read_bytes()
        for index in range(0, len(whole), max(1, len(whole) // 12)):
            path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
            try:
                outcomes.append(str(again(directory).is_exact))
            except DataError as error:
                outcomes.append("refused" if path.name in str(error) else f"no place is named: {error}")
        path.write_bytes(whole)
    assert set(outcomes) == {"True", "refused"}, "a difference that no check of the cache had caught"
    assert outcomes.count("refused") > len(outcomes) / 2


def change_token(cache: Path, row: int, position: int) -> None:
    """Change one token id and every hash over it in the cache, as somebody would who knows the format."""
    reader = CacheReader.open(cache)
    (chunk_index,), (row_in_chunk,) = reader.addresses(np.array([row]))
    record = Manifest.open(cache).chunk(int(chunk_index))
    path = chunk_path(cache, record.unit, record.part)
    chunk = Chunk.open(path)
    content = chunk.content()
    tokens = content.tokens_RC.copy()
    tokens[row_in_chunk, position] ^= 1
    body, changed = encode_chunk(dataclasses.replace(content, tokens_RC=tokens), chunk.origin)
    path.write_bytes(body)
    log = HashChainedLog(cache / LOG_NAME)
    entries = log.read()[0]
    for entry in entries:
        entry["add"] = [
            dataclasses.asdict(changed) if (add["unit"], add["part"]) == (record.unit, record.part) else add
            for add in entry.get("add", [])
        ]
    (cache / LOG_NAME).unlink()
    log.append(entries)
    CacheReader.open(cache).verify()


def test_one_token_id_with_all_hashes_recomputed_is_refused(directory: Path, tmp_path: Path) -> None:
    change_token(train_cache(tmp_path), 3, 5)
    for first in (0, 9):
        with pytest.raises(DataError, match=r"The cache of source 'text' changed: units 0 to 1"):
            again(directory, first)


def test_one_token_id_is_named_by_the_chain_alone(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = train_cache(tmp_path)
    reader = CacheReader.open(cache)
    for row in (0, reader.num_rows - 1):
        position = int(DataPlan.open(directory / "plan.jsonl").positions_of(0, row, reader)[0])
        change_token(cache, row, 2)
        with monkeypatch.context() as patch:
            patch.setattr(DataPlan, "check", lambda self, readers: None)  # the first line of defence is down
            report = again(directory)
        change_token(cache, row, 2)
        assert report.difference is not None
        assert (report.difference.step, report.difference.quantity) == (position // 4 + 1, "batch")
        assert report.num_steps == position // 4
    assert again(directory).is_exact


def test_a_cache_that_is_gone_or_of_other_text(directory: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "text", documents=8, seed=1)
    with pytest.raises(DataError):
        again(directory)
    write_text(tmp_path / "text", documents=8)
    assert again(directory).is_exact
    train_cache(tmp_path).rename(tmp_path / "away")
    with pytest.raises(DataError):
        again(directory)


# The run changed


def test_another_seed_is_refused(directory: Path) -> None:
    path = directory / "config.yaml"
    path.write_text(path.read_text().replace("seed: 1234", "seed: 1235"))
    assert recorded_config(directory).run.seed == 1235
    with pytest.raises(ConfigError, match="seed = 1234, the configuration 1235"):
        again(directory)
    with pytest.raises(ConfigError, match="was written under another configuration"):
        again(directory, 8)


def test_another_seed_of_the_weights_alone_is_named(directory: Path) -> None:
    def other_weights(config: RunConfig) -> Workload:
        setting = make_workload(config)
        return dataclasses.replace(setting, engine=NumpyEngine(setting.spec.vocab_size, seed=99, width=4))

    report = replay(directory, other_weights)
    assert report.difference is not None
    assert (report.difference.step, report.difference.quantity) == (1, "loss")
    assert replay(directory, other_weights, first_step=8).is_exact, "a checkpoint brings its own weights"


def test_another_learning_rate_is_named(directory: Path) -> None:
    path = directory / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.01", "lr: 0.02"))
    report = again(directory, 0, 5)
    assert report.difference is not None
    assert (report.difference.step, report.difference.quantity) == (2, "loss"), "step 1 computes its loss before it"


@pytest.mark.parametrize("tamper", ["missing", "cut", "body"])
def test_another_plan_is_refused(directory: Path, tamper: str) -> None:
    path = directory / "plan.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if tamper == "missing":
        path.unlink()
    else:
        path.write_bytes(lines[0] if tamper == "cut" else lines[0].replace(b"1234", b"1235") + lines[1])
    for first in (0, 8):
        with pytest.raises(VoroxError) as refused:
            again(directory, first)
        assert refused.value.exit_code in {4, 5}


# The checkpoint changed


def flip_bit(checkpoint: Path, index: int, bit: int) -> None:
    """Flip a mantissa bit (0 to 22) of one of the floats of the state."""
    state = np.frombuffer((checkpoint / "state.bin").read_bytes(), np.uint32).copy()
    state[index] ^= 1 << bit
    (checkpoint / "state.bin").write_bytes(state.tobytes())


def test_one_mantissa_bit_of_the_checkpoint(directory: Path) -> None:
    checkpoint = RunLayout(directory).checkpoint(8)
    flip_bit(checkpoint, 0, 0)
    with pytest.raises(CheckpointError, match="does not match the hash in the manifest"):
        again(directory, 8)
    commit_anew(checkpoint, lambda metadata: None)
    with pytest.raises(CheckpointError, match="Loaded state has fingerprint"):
        again(directory, 8)


def test_one_mantissa_bit_with_every_hash_recomputed_is_named(directory: Path) -> None:
    checkpoint = RunLayout(directory).checkpoint(8)
    values = np.frombuffer((checkpoint / "state.bin").read_bytes(), np.float32)
    in_use = np.flatnonzero(np.abs(values) > 1e-6)  # parameters and moments that a gradient has reached
    named = []
    for index in in_use[:: len(in_use) // 30].tolist():
        flip_bit(checkpoint, index, 12)
        engine = make_workload(recorded_config(directory)).engine
        engine.load(checkpoint)
        commit_anew(checkpoint, lambda metadata, engine=engine: metadata.update(fingerprint=engine.fingerprint()))
        difference = again(directory, 8).difference
        named.append(None if difference is None else (difference.step, difference.quantity))
        flip_bit(checkpoint, index, 12)
    assert None not in named, "the state at step 12 tells what no loss tells"
    assert {quantity for _, quantity in named} <= {"loss", "grad_norm", "state"}
    assert (9, "loss") in named
    assert all(9 <= step <= 12 for step, _ in named)


# The chain changed


def rewrite_chain(directory: Path, step: int, **change: str) -> None:
    """Change a recorded number and every head after it, consistently."""
    path = RunLayout(directory).chain
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    entries[step - 1] |= change
    head = ""
    for entry in entries:
        head = link(head, entry["step"], entry["batch"], entry["loss"], entry["grad_norm"])
        entry["chain"] = head
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.mark.parametrize("quantity", ["batch", "loss", "grad_norm"])
def test_a_rewritten_chain_is_named(directory: Path, quantity: str) -> None:
    rewrite_chain(directory, 5, **{quantity: "00" * 32 if quantity == "batch" else bits(1.25)})
    report = again(directory)
    assert report.difference is not None
    assert (report.difference.step, report.difference.quantity) == (5, quantity)
    assert report.num_steps == 4
    with pytest.raises(DataError, match="one of the two was changed"):
        again(directory, 8)


def test_a_careless_change_of_the_chain_is_refused(directory: Path) -> None:
    path = RunLayout(directory).chain
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4].replace('"loss":"4', '"loss":"3'), *lines[5:]]) + "\n")
    with pytest.raises(DataError, match="Step 5 cannot be compared: it does not follow"):
        again(directory)


# The arithmetic changed


@pytest.mark.parametrize("quantity", ["loss", "grad_norm"])
def test_one_unit_in_the_last_place_is_named(directory: Path, quantity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> NumpyResult:
        values = original(self, batch, **kwargs).values
        if batch.step + 1 == 7:
            values = dataclasses.replace(values, **{quantity: math.nextafter(getattr(values, quantity), math.inf)})
        return NumpyResult(values)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    report = again(directory)
    assert report.difference is not None
    assert (report.difference.step, report.difference.quantity, report.num_steps) == (7, quantity, 6)
    assert str(report).startswith(f"differs after 6 bit-exact steps; step 7: {quantity} was ")
    assert again(directory, 8).is_exact


def test_a_difference_that_no_loss_shows_is_found_in_the_state(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> NumpyResult:
        result = original(self, batch, **kwargs)
        if batch.step + 1 == 12:
            self.moments["v"]["output"].view(np.uint32)[0, 0] ^= 1
        return result

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    report = again(directory, 8)
    assert report.difference is not None
    assert (report.difference.step, report.difference.quantity) == (12, "state")


def test_another_environment_is_told_beside_the_difference(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyEngine, "environment", lambda self: CHANGED)
    report = again(directory)
    assert report.is_exact
    assert any(text.startswith("numpy was ") for text in report.environment)


def test_a_run_of_several_processes_is_replayed_by_as_many(directory: Path, tmp_path: Path) -> None:
    """What a refusal or a difference tells one to type has the option."""
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    record = json.loads((copy / "run.json").read_text())
    record["attempts"][-1]["notes"]["environment"]["num_processes"] = 2
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError) as refused:
        again(copy, last_step=99)
    assert "--nproc 2`" in refused.value.hint
    difference = ReplayDifference(3, "loss", "1", "2")
    for before, now, wanted in (
        (copy, "num_processes was 2, is 1", "2"),
        (directory, "num_processes was 1, is 2", "1"),
    ):
        report = ReplayReport(0, 5, 2, 0, difference, ("num_devices was 2, is 1", now))
        hint = str(vars(difference_error(report, before))["hint"])
        assert f"vorox replay {before} --from 0 --to 5 --nproc {wanted} (" in hint
    assert "--nproc" not in str(difference_error(ReplayReport(0, 5, 2, 0, difference, ()), copy))


def processes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As the torch engine tells it: one process alone does not count itself."""
    facts = {"engine": "numpy", "numpy": np.__version__, "determinism": "bitwise"}
    facts |= {"num_processes": count} if count > 1 else {}
    monkeypatch.setattr(NumpyEngine, "environment", lambda self: facts)


def test_the_checkpoint_where_the_number_of_processes_changed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step stays replayable, under the default retention; one replay over both sides is refused by name."""
    write_text(tmp_path / "text", documents=8)
    config = configuration(tmp_path, ["data.validation.held_out_fraction=0.3", "data.cache.unit_bytes=100000"])
    processes(monkeypatch, 1)
    directory = run(config).run_directory
    processes(monkeypatch, 2)
    run(recorded_config(directory, ["train.num_steps=28"]), resume_from=directory)
    assert list(step_directories(directory)) == [12, 24, 28], "the two newest, and the one at the change"
    with pytest.raises(ConfigError) as refused:
        again(directory, 10, 20)
    assert "steps 1 to 12 ran with 1 process, steps 13 to 20 ran with 2 processes" in refused.value.what
    command = f"vorox replay {directory}"
    assert refused.value.hint == f"run {command} --from 10 --to 12, then {command} --from 12 --to 20 --nproc 2"
    report = again(directory, 13, 17)
    assert (report.start_step, str(report), report.environment) == (12, "bit-exact, 5 steps", ())
    processes(monkeypatch, 1)
    assert again(directory, 0, 12).environment == ()

    real = NumpyEngine.train_step
    monkeypatch.setattr(NumpyEngine, "train_step", lambda self, batch, **rest: real(self, batch, **rest | {"lr": 0.5}))
    report = again(directory, 13, 17)
    assert "num_processes was 2, is absent" in report.environment
    assert "--from 12 --to 17 --nproc 2" in str(vars(difference_error(report, directory))["hint"])

    shutil.rmtree(RunLayout(directory).checkpoint(12))
    with pytest.raises(ConfigError, match="steps 13 to 27 ran with 2") as refused:
        again(directory, 14, 27)
    assert refused.value.hint == f"run {command} --from 24 --to 27 --nproc 2"


def test_environments_of_steps_follow_the_attempts_that_kept_them(tmp_path: Path) -> None:
    """A later attempt replaces the steps that it executed again; one that executed none counts for nothing."""

    def environments(*attempts: tuple[int | None, int]) -> StepEnvironments:
        record = {
            "config_digest": "",
            "attempts": [
                {"attempt": number, "notes": {"environment": {"num_processes": count}}
                 | ({} if start is None else {"steps": {"start_step": start}})}
                for number, (start, count) in enumerate(attempts, 1)
            ],
        }  # fmt: skip
        (tmp_path / "run.json").write_text(json.dumps(record))
        return StepEnvironments.of_run(tmp_path)

    assert environments((0, 1), (24, 2), (24, 1)).changes == frozenset(), "the first environment computes again"
    found = environments((0, 1), (20, 2), (None, 7), (30, 2), (20, 4), (16, 1), (24, 2))
    assert [found.num_processes(step) for step in (1, 16, 17, 24, 25, 99)] == [1, 1, 1, 1, 2, 2]
    assert found.changes == {24}
    assert found.spans(10, 30) == [(10, 24, 1), (24, 30, 2)]
    assert StepEnvironments.of_run(tmp_path / "none").changes == frozenset()
