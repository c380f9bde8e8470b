"""Runs whose checkpoints go to a store: against real servers on loopback, under faults, and from an empty disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import vorox.run
from eventually import wait_until
from numpy_engine import NumpyEngine
from servers import Fault, FaultProxy, Request
from servers.s3 import SECRET
from servers.shelves import Shelf, shelf
from tiny_runs import at_step, configuration, run, use_numpy_engine, write_text
from vorox.cli import main
from vorox.core.errors import CheckpointError, ConfigError, Preempted
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.run_layout import step_directories
from vorox.core.schema import RunConfig
from vorox.data.storage import (
    RetryPolicy,
    StoredFile,
    StoreUnreachable,
    list_objects,
    open_range,
    put_bytes,
    remove_object,
    retry_budget,
)
from vorox.records.log import Level
from vorox.records.replay_chain import read_chain
from vorox.training.loop.display import NoDisplay
from vorox.training.mirror import list_mirror, ownership

POLICY = RetryPolicy(retries_per_unit=4, first_backoff_seconds=0.01, longest_backoff_seconds=0.05)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(ownership, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(ownership, "_POLL_SECONDS", 0.5)
    with retry_budget(POLICY):
        yield


@pytest.fixture(scope="module", params=["gs", "s3", "az"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with shelf(request.param, tmp_path_factory.mktemp("store")) as opened:
        yield opened


@pytest.fixture
def mirror(store: Shelf, tmp_path: Path) -> str:
    return f"{store.root}/{tmp_path.name}"


def on_machine(directory: Path, mirror: str | None, *overrides: str) -> RunConfig:
    """The same run on a machine whose disk is this directory; the text is the same everywhere, at the same path."""
    text = directory.parent / "text"
    if not text.exists():
        write_text(text)
    directory.mkdir(exist_ok=True)
    mirrored = [] if mirror is None else [f"checkpoint.mirror={mirror}"]
    (directory / "text").mkdir(exist_ok=True)
    return configuration(directory, [f"data.sources.0.paths=[{text}]", *mirrored, *overrides])


def chain_of(directory: Path) -> list[tuple[str, str]]:
    return [(entry.batch, entry.chain) for entry in read_chain(directory).values()]


def only_run(config: RunConfig) -> Path:
    (directory,) = [path for path in Path(config.run.directory).iterdir() if path.is_dir()]
    return directory


def mirrored_steps(mirror: str, config: RunConfig) -> list[int]:
    return [entry.step for entry in list_mirror(f"{mirror}/{only_run(config).name}").lineage()]


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


class Killed(BaseException):
    """Ends a run in its middle, as a kill would, but for what ``finally`` does."""


def dying_with(config: RunConfig, mirror: str, *steps: int) -> Any:
    """Dies as soon as the mirror holds these steps, newest first."""

    def die() -> None:
        wait_until(lambda: mirrored_steps(mirror, config) == [*steps], 60)
        raise Killed

    return die


@pytest.fixture
def straight(tmp_path: Path) -> list[tuple[str, str]]:
    outcome = run(on_machine(tmp_path / "straight", None))
    return chain_of(outcome.run_directory)


def test_a_finished_run_is_in_the_mirror_and_another_machine_goes_on(
    mirror: str, tmp_path: Path, straight: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = on_machine(tmp_path / "first", mirror)
    at_step(monkeypatch, 11, dying_with(first, mirror, 8, 4))
    with pytest.raises(Killed):
        run(first)
    monkeypatch.undo()
    use_numpy_engine(monkeypatch)
    held = list_mirror(f"{mirror}/{only_run(first).name}")
    assert [entry.fencing_token for entry in held.lineage()] == [1, 1]
    shutil.rmtree(tmp_path / "first")

    second = on_machine(tmp_path / "second", mirror)
    outcome = run(second)
    assert chain_of(outcome.run_directory) == straight
    assert mirrored_steps(mirror, second) == [12, 8]
    assert json.loads((outcome.run_directory / "run.json").read_text())["attempts"][0]["attempt"] == 1

    third = on_machine(tmp_path / "third", mirror)
    finished = run(third)
    assert finished.progress == outcome.progress
    assert finished.fingerprint == outcome.fingerprint
    assert chain_of(finished.run_directory) == straight
    assert finished.eval_losses == outcome.eval_losses, "the last record holds the validation after the last save"
    attempts = json.loads((finished.run_directory / "run.json").read_text())["attempts"]
    assert [attempt["outcome"] for attempt in attempts[1:]] == ["finished", "finished"]


def test_a_new_mirrored_run_that_is_refused_leaves_no_directory(mirror: str, tmp_path: Path) -> None:
    shown: list[str] = []

    class Screen(NoDisplay):
        def message(self, text: str, level: Level = "info") -> None:
            shown.append(text)

    config = on_machine(tmp_path / "here", mirror)
    with pytest.raises(ConfigError, match="nowhere"):
        vorox.run.train(on_machine(tmp_path / "here", mirror, "log.metrics=[nowhere:function]"), display=Screen())
    assert list(Path(config.run.directory).iterdir()) == []
    assert not any(config.run.directory in text for text in shown)
    directory = vorox.run.train(config, display=Screen()).run_directory
    first_step = next(number for number, text in enumerate(shown) if text.startswith("Step 1 loss"))
    (named,) = (number for number, text in enumerate(shown) if str(directory) in text and "mirrored to" in text)
    assert named > first_step
    assert mirror in shown[named]


def test_a_store_that_is_away_costs_no_step_and_is_caught_up_with(
    store: Shelf, mirror: str, tmp_path: Path, straight: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write fails until the last step has been done: the order of things shows that no step waited for one."""
    config = on_machine(tmp_path / "first", mirror)
    with store.behind() as (_, proxy):
        away = [False]

        def goes() -> None:
            away[0] = True

        def respond(forward: Any) -> Any:
            def ask(request: Request) -> tuple[int, dict[str, str], bytes, int]:
                if away[0]:
                    return 503, {}, b"", 0
                return forward(request)

            return ask

        proxy._ask = respond(proxy._ask)  # type: ignore[method-assign]
        at_step(monkeypatch, 2, goes)
        done = NumpyEngine.train_step

        def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
            if batch.step + 1 == 12:  # ten steps and two checkpoints with a store that is away
                wait_until(lambda: bool(events(only_run(config), "mirror_away")), 60)
                away[0] = False
            return done(self, batch, **kwargs)

        monkeypatch.setattr(NumpyEngine, "train_step", train_step)
        outcome = run(config)
    assert chain_of(outcome.run_directory) == straight
    assert mirrored_steps(mirror, config) == [12, 8]
    said = events(outcome.run_directory, "mirror_away")
    assert "HTTP 503" in said[0]["message"]
    assert "nothing is mirrored yet" in said[0]["message"]
    # An answer of 503 that arrives after the first good one starts a second outage.
    assert len(events(outcome.run_directory, "mirror_back")) == len(said) <= 2
    assert "holds step 12" in events(outcome.run_directory, "mirror_settled")[0]["message"]


def test_a_store_that_never_answers_holds_up_nothing(
    store: Shelf, mirror: str, tmp_path: Path, straight: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are taken and never answered. All twelve steps are done while the first of them still hangs."""
    config = on_machine(tmp_path / "first", mirror, "checkpoint.mirror_wait_seconds=0.2")
    monkeypatch.setattr("vorox.training.mirror.run_mirror.CLOSE_SECONDS", 0.2)
    hanging, release = threading.Event(), threading.Event()
    with retry_budget(RetryPolicy(stall_seconds=600)), store.behind() as (_, proxy):
        forward = proxy._ask

        def ask(request: Request) -> tuple[int, dict[str, str], bytes, int]:
            if "checkpoints" in request.path or "record" in request.path:
                hanging.set()
                release.wait()
            return forward(request)

        proxy._ask = ask  # type: ignore[method-assign]
        at_step(monkeypatch, 6, lambda: None if hanging.wait(60) else pytest.fail("nothing was uploaded"))
        try:
            outcome = run(config)
            assert not release.is_set()
        finally:
            release.set()
    assert chain_of(outcome.run_directory) == straight
    said = events(outcome.run_directory, "mirror_settled")[0]["message"]
    assert "holds no checkpoint; NOT there: step" in said


def flip(uri: str) -> None:
    """Flip one bit of an object in the store."""
    (file,) = [file for file in list_objects(uri.rpartition("/")[0]) if file.uri == uri]
    with open_range(file) as reader:
        data = bytearray(reader.read())
    data[len(data) // 2] ^= 1
    put_bytes(bytes(data), uri)


def test_a_damaged_checkpoint_in_the_store_is_passed_over_loudly(
    mirror: str, tmp_path: Path, straight: list[tuple[str, str]]
) -> None:
    first = on_machine(tmp_path / "first", mirror)
    run(first)
    name = only_run(first).name
    newest, older = list_mirror(f"{mirror}/{name}").lineage()
    arrays = max(newest.files.values(), key=lambda file: (not file.uri.endswith(".json"), file.size_bytes))
    flip(arrays.uri)
    said: list[str] = []

    class Screen:
        def message(self, text: str, level: str = "info") -> None:
            said.append(text)

        def step(self, view: Any) -> None: ...
        def sample(self, prompt: str, completion: str) -> None: ...

    second = on_machine(tmp_path / "second", mirror)
    outcome = run(second, display=Screen())
    assert chain_of(outcome.run_directory) == straight
    assert any("damaged" in text and newest.name in text for text in said)
    assert any(f"Restored step {older.step}" in text for text in said)
    for entry in list_mirror(f"{mirror}/{name}").lineage():  # and a record that is damaged, or gone
        record = entry.snapshot
        assert record is not None
        flip(record["chain.jsonl"].uri) if entry.step == 12 else remove_object(record["plan.jsonl"].uri)
    with pytest.raises(CheckpointError, match="No checkpoint of the mirror is valid"):
        run(on_machine(tmp_path / "third", mirror))


def test_an_upload_that_was_cut_is_no_checkpoint(
    mirror: str, tmp_path: Path, straight: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was put last is missing: the torn one is passed over, and removed once a newer one is whole."""
    first = on_machine(tmp_path / "first", mirror)
    run(first)
    folder = f"{mirror}/{only_run(first).name}"
    newest = list_mirror(folder).lineage()[0]
    remove_object(newest.files[MANIFEST_NAME].uri)
    shutil.rmtree(tmp_path / "first")
    second = on_machine(tmp_path / "second", mirror)
    assert chain_of(run(second).run_directory) == straight
    held = list_mirror(folder)
    assert [(entry.step, entry.fencing_token) for entry in held.checkpoints] == [(8, 1), (12, 2)]


def test_a_listing_outlives_what_its_owner_removes(mirror: str, tmp_path: Path) -> None:
    """The owner removes a checkpoint while another machine reads what it has listed."""
    first = on_machine(tmp_path / "first", mirror)
    run(first)
    held = list_mirror(f"{mirror}/{only_run(first).name}")
    for file in held.lineage()[-1].objects():
        remove_object(file.uri)
    assert [entry.step for entry in held.lineage()] == [12, 8]
    assert [entry.step for entry in list_mirror(held.uri).lineage()] == [12]


def test_a_second_process_is_refused_and_a_silent_one_is_succeeded(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (on_machine(tmp_path / name, mirror) for name in ("first", "second"))
    refused: list[ConfigError] = []

    def start_second() -> None:
        wait_until(lambda: mirrored_steps(mirror, first) == [4], 60)
        monkeypatch.setattr(ownership, "_is_dead", lambda holder: False)  # as if it were another machine
        with pytest.raises(ConfigError, match="in use by process") as caught:
            run(second)
        refused.append(caught.value)

    at_step(monkeypatch, 6, start_second)
    run(first)
    assert refused[0].exit_code == 2
    assert mirrored_steps(mirror, first) == [12, 8], "the first one was not disturbed"
    assert run(second).progress.step == 12, "it has let the mirror go"


def test_an_owner_that_lost_the_mirror_goes_on_and_cannot_touch_it(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes over while the first one is thought dead: it keeps training, and writes nothing more."""
    config = on_machine(tmp_path / "first", mirror)
    monkeypatch.setattr(ownership, "RENEW_SECONDS", 3600.0)  # the first one learns it when it is about to write
    taken: list[Any] = []

    def take_over() -> None:
        wait_until(lambda: mirrored_steps(mirror, config) == [4], 60)
        monkeypatch.setattr(ownership, "_is_dead", lambda holder: True)
        owner, found = ownership.acquire(f"{mirror}/{only_run(config).name}", lambda *_: None)
        taken.append((owner, {entry.name: dict(entry.files) for entry in found.checkpoints}))

    at_step(monkeypatch, 6, take_over)
    outcome = run(config)
    assert outcome.progress.step == 12
    owner, before = taken[0]
    assert before
    owner.release(5)
    assert not owner.lost
    after = list_mirror(f"{mirror}/{only_run(config).name}")
    assert owner.fencing_token == 2
    assert {entry.name: dict(entry.files) for entry in after.checkpoints if entry.name in before} == before
    assert [(entry.step, entry.fencing_token) for entry in after.lineage()] == [(4, 1)], (
        "nothing that it wrote since counts"
    )
    assert len(events(outcome.run_directory, "mirror_lost")) == 1


def test_a_silent_owner_is_succeeded_when_the_lease_is_over(mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "RENEW_SECONDS", 3600.0)
    monkeypatch.setattr(ownership, "LEASE_SECONDS", 3000.0)
    monkeypatch.setattr(ownership, "_POLL_SECONDS", 1000.0)
    monkeypatch.setattr(ownership, "_is_dead", lambda holder: False)
    first, _ = ownership.acquire(f"{mirror}/run", lambda *_: None)
    slept: list[float] = []
    said: list[str] = []
    second, _ = ownership.acquire(f"{mirror}/run", lambda text, level="info": said.append(text), sleep=slept.append)
    assert 2000 < sum(slept) <= 3000
    assert "was in use by process" in said[0]
    assert (first.fencing_token, second.fencing_token) == (1, 2)
    first.confirm()
    second.confirm()
    assert (first.lost, second.lost) == (True, False)
    second.release(5)
    third, _ = ownership.acquire(f"{mirror}/run", lambda *_: None, sleep=slept.append)
    assert third.fencing_token == 3
    assert sum(slept) <= 3000, "an owner that let go is not waited for"
    third.release(5)
    first.release(5)


def test_an_owner_is_named_though_its_record_changes_while_it_is_read(
    mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the mirror between the look at it and the claim, and renews while it is read."""
    monkeypatch.setattr(ownership, "RENEW_SECONDS", 3600.0)
    winner: list[ownership.Ownership] = []
    original, read = ownership.Ownership, ownership.read_object

    def lose(uri: str, number: int, over: StoredFile | None) -> ownership.Ownership:
        winner.append(original(uri, number, over))
        monkeypatch.setattr(ownership, "read_object", replaced_while_read)
        return original(uri, number + 1, over)

    def replaced_while_read(file: StoredFile) -> bytes:
        monkeypatch.setattr(ownership, "read_object", read)
        winner[0].confirm()
        return read(file)

    monkeypatch.setattr(ownership, "Ownership", lose)
    with pytest.raises(ConfigError, match="in use by process"):
        ownership.acquire(f"{mirror}/run", lambda *_: None)
    winner[0].release(5)


def test_a_renewal_whose_answer_never_came_is_its_own(mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store took it and went away; the owner, which knows the version before it, has not lost the mirror."""
    monkeypatch.setattr(ownership, "RENEW_SECONDS", 3600.0)
    owner, _ = ownership.acquire(f"{mirror}/run", lambda *_: None)

    def put_and_lose(data: bytes, uri: str, *, mode: Any) -> StoredFile:
        put_bytes(data, uri, mode=mode)
        raise StoreUnreachable("no answer", where=uri, hint="wait")

    with monkeypatch.context() as patch:
        patch.setattr(ownership, "put_bytes", put_and_lose)
        owner.confirm()
    assert not owner.lost
    owner.confirm()
    owner.confirm()
    assert not owner.lost
    monkeypatch.setattr(ownership, "_is_dead", lambda holder: True)
    successor, _ = ownership.acquire(f"{mirror}/run", lambda *_: None)
    owner.confirm()
    assert owner.lost
    successor.release(5)
    owner.release(5)


def test_two_lines_of_work_are_not_mixed(mirror: str, tmp_path: Path) -> None:
    first = on_machine(tmp_path / "first", mirror)
    run(first)
    other = on_machine(tmp_path / "other", None, "optimizer.lr=0.02")
    run(other)
    directory = only_run(first)
    shutil.rmtree(directory)
    shutil.copytree(only_run(other), directory)
    (directory / "config.yaml").write_text((directory / "config.yaml").read_text())
    with pytest.raises(ConfigError, match="have diverged: they differ at step 12"):
        run(first)


def test_a_machine_that_is_behind_is_brought_forward(mirror: str, tmp_path: Path, straight: list[Any]) -> None:
    first = on_machine(tmp_path / "first", mirror)
    run(first)
    directory = only_run(first)
    shutil.rmtree(directory / "checkpoints" / "step-00000012")
    outcome = run(first)
    assert chain_of(directory) == straight
    assert outcome.progress.step == 12
    assert max(step_directories(directory)) == 12


@pytest.mark.slow
def test_a_rollback_continues_the_mirror_and_another_machine_follows(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = [
        "train.spike_policy=rollback", "train.spike_window_steps=4", "train.spike_rollback_steps=3",
        "checkpoint.every_steps=3",
    ]  # fmt: skip
    gradients, steps, now, killed = NumpyEngine._gradients, NumpyEngine.train_step, [0], list[bool]()

    def train_step(engine: NumpyEngine, batch: Any, **kwargs: Any) -> Any:
        now[0] = batch.step + 1
        if now[0] == 12 and killed == [False]:
            killed[0] = True
            uri = f"{mirror}/{only_run(first).name}"
            wait_until(lambda: [entry.fencing_token for entry in list_mirror(uri).lineage()][:1] == [2], 60)
            raise Killed
        return steps(engine, batch, **kwargs)

    def spiking(engine: NumpyEngine, *arguments: Any) -> Any:
        loss, found = gradients(engine, *arguments)
        return (3 if now[0] == 10 else 1) * loss, found

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    monkeypatch.setattr(NumpyEngine, "_gradients", spiking)
    plain = run(on_machine(tmp_path / "plain", None, *policy))
    killed.append(False)  # after the rollback
    first = on_machine(tmp_path / "first", mirror, *policy)
    with pytest.raises(Killed):
        run(first)
    assert len(events(only_run(first), "loss_spike_rollback")) == 1
    other = run(on_machine(tmp_path / "second", mirror, *policy))
    assert chain_of(other.run_directory) == chain_of(plain.run_directory)
    assert other.fingerprint == plain.fingerprint


def test_never_begins_a_run_of_its_own(mirror: str, tmp_path: Path) -> None:
    first = on_machine(tmp_path / "first", mirror)
    run(first)
    second = on_machine(tmp_path / "second", mirror)
    outcome = run(second, resume_from="never")
    assert outcome.run_directory.name == f"{only_run(first).name}-2"
    assert list_mirror(f"{mirror}/{outcome.run_directory.name}").lineage()
    third = on_machine(tmp_path / "third", mirror)
    assert run(third).run_directory.name == outcome.run_directory.name


def test_preemption_says_what_the_mirror_holds(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_machine(tmp_path / "first", mirror)
    at_step(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted) as caught:
        run(config)
    assert "holds step 6" in caught.value.saved
    assert run(on_machine(tmp_path / "second", mirror)).progress.step == 12


def test_faults_on_the_way_change_nothing(
    store: Shelf, mirror: str, tmp_path: Path, straight: list[tuple[str, str]]
) -> None:
    """Errors and bodies that break off, both while checkpoints go there and while they come back."""
    patient = RetryPolicy(1_000, first_backoff_seconds=0.01, longest_backoff_seconds=0.05, stall_seconds=10)
    with retry_budget(patient):  # both runs share it; outside a test, every file has its own
        with store.behind(error_503_fraction=0.15, truncated_fraction=0.25, seed=3) as (_, proxy):
            first = on_machine(tmp_path / "first", mirror)
            run(first)
            assert mirrored_steps(mirror, first) == [12, 8]
            shutil.rmtree(tmp_path / "first")
            outcome = run(on_machine(tmp_path / "second", mirror))
        assert len(events(outcome.run_directory, "resumed")) == 1, "it came from the store"
        assert chain_of(outcome.run_directory) == straight
        assert proxy.faults["answer"] > 5
        assert proxy.faults["truncate"] > 0


@contextmanager
def refusing(store: Shelf, fault: Fault, only: Any) -> Iterator[FaultProxy]:
    with store.behind() as (_, proxy):
        proxy.only = only
        proxy.script(*[fault] * 50)
        yield proxy


def test_a_mirror_that_cannot_be_is_refused_before_the_first_step(store: Shelf, mirror: str, tmp_path: Path) -> None:
    nowhere = on_machine(tmp_path / "a", mirror.replace("corpora", "nowhere"))
    with pytest.raises(ConfigError, match=r"Bucket 'nowhere\d*' does not exist"):
        run(nowhere)
    assert not list(Path(nowhere.run.directory).glob("*/run.json"))
    config = on_machine(tmp_path / "b", mirror)
    writes = refusing(store, Fault("answer", 403), lambda request: request.method in {"PUT", "POST"})
    with writes, pytest.raises(ConfigError, match="refuses access"):
        run(config)
    with (
        refusing(store, Fault("answer", 503), lambda _: True),
        pytest.raises(CheckpointError, match="cannot be reached"),
    ):
        run(config)
    for place in ("ftp://bucket/x", "/some/folder", "gs://"):
        with pytest.raises(ConfigError, match="is not a folder in an object store"):
            on_machine(tmp_path / "c", place)


def test_the_commands_know_the_mirror(
    mirror: str, tmp_path: Path, straight: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = on_machine(tmp_path / "first", mirror)
    run(first)
    name, root = only_run(first).name, first.run.directory
    assert main(["checkpoints", "list", name, "--root", root]) == 0
    said = capsys.readouterr().out
    assert f"mirror {mirror}/{name}" in said
    assert "step-00000012-c0001  whole" in said
    assert main(["checkpoints", "list", name, "--root", root, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in listed if entry.get("mirror")] == [8, 12]

    there = f"{mirror}/{name}"
    second, third = (tmp_path / other / "runs" for other in ("second", "third"))
    assert main(["train", "--resume", there, f"run.directory={second}"]) == 0
    assert chain_of(second / name) == straight
    step = list_mirror(there).lineage()[-1]
    command = ["train", "--resume", f"{there}/checkpoints/{step.name}", f"run.directory={third}"]
    capsys.readouterr()
    assert main([*command, "--dry-run"]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert f"{third / name} (restore step 8 from the mirror, and resume from it)" in planned
    assert not third.exists()
    assert main([*command, "checkpoint.mirror=null"]) == 0
    assert chain_of(third / name) == straight
    capsys.readouterr()

    assert main(["runs", "remove", name, "--root", root, "--yes"]) == 0
    assert f"mirror {there} was kept" in capsys.readouterr().out
    assert list_mirror(there).lineage()
    assert main(["runs", "remove", name, "--root", str(second), "--yes", "--mirror"]) == 0
    assert list_objects(there) == []
    assert main(["train", "--resume", there, f"run.directory={tmp_path / 'fourth'}"]) == 2


def test_weights_from_a_store(mirror: str, tmp_path: Path) -> None:
    first = on_machine(tmp_path / "first", mirror)
    outcome = run(first)
    place = f"{mirror}/{only_run(first).name}"
    newest = list_mirror(place).lineage()[0]
    for number, uri in enumerate([place, f"{place}/checkpoints/{newest.name}"]):
        directory = tmp_path / f"other{number}"
        config = on_machine(directory, None, f"train.from_weights={uri}", "train.from_optimizer=true")
        started = run(config)
        (note,) = events(started.run_directory, "started_from")
        assert note["fields"]["fingerprint"] == outcome.fingerprint
        assert "(step 12)" in note["fields"]["from_weights"]
        assert not list((directory / "cache").glob(".tmp-*"))
    with pytest.raises(ConfigError, match="There is nothing at this URI"):
        run(on_machine(tmp_path / "nothing", None, f"train.from_weights={mirror}/nothing"))


def test_no_credentials_anywhere(store: Shelf, mirror: str, tmp_path: Path) -> None:
    config = on_machine(tmp_path / "first", mirror)
    run(config)
    for path in only_run(config).rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    for file in list_objects(mirror):
        with open_range(file) as reader:
            assert SECRET.encode() not in reader.read(), file.uri
    with pytest.raises(ConfigError, match="password or token"):
        on_machine(tmp_path / "b", mirror.replace("://", f"://someone:{SECRET}@"))
