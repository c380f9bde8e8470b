"""Every resume compares the run with its mirror: what only the mirror has is restored or abandoned, never removed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventually import wait_until
from servers.s3 import S3Server, s3_server
from tiny_runs import Killed, at_step, configuration, events, run, use_numpy_engine, write_text
from vorox.cli import main
from vorox.core.errors import ConfigError
from vorox.core.run_layout import step_directories
from vorox.data.storage import RetryPolicy, retry_budget
from vorox.records.attempts import read_attempts
from vorox.records.replay_chain import read_chain
from vorox.training.mirror import list_mirror, ownership


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as opened:
        opened.bucket("runs")
        yield opened


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(ownership, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(ownership, "_POLL_SECONDS", 0.5)
    with retry_budget(RetryPolicy(4, first_backoff_seconds=0.01, longest_backoff_seconds=0.05)):
        yield


class Machines:
    """A run that machine 1 has finished, and machine 2 has a copy of from step 4; the mirror has steps 8 and 12."""

    def __init__(self, server: S3Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.folder, self.monkeypatch = server, folder, monkeypatch
        self.first, self.second = folder / "first" / "runs", folder / "second" / "runs"
        (folder / "first").mkdir()
        write_text(folder / "first" / "text")
        config = configuration(folder / "first", [f"checkpoint.mirror=s3://runs/{folder.name}"])
        self.die(6, 4)
        with pytest.raises(Killed):
            run(config)
        (directory,) = self.first.iterdir()
        self.name, self.uri = directory.name, f"s3://runs/{folder.name}/{directory.name}"
        shutil.copytree(self.first, self.second)
        self.revive()
        run(config)
        assert self.steps() == [12, 8]

    def die(self, step: int, *mirrored: int) -> None:
        """Die at a step, as soon as the mirror holds these steps."""

        def die() -> None:
            (directory,) = self.first.iterdir()
            uri = f"s3://runs/{self.folder.name}/{directory.name}"
            wait_until(lambda: [entry.step for entry in list_mirror(uri).lineage()] == [*mirrored], 60)
            raise Killed

        at_step(self.monkeypatch, step, die)

    def revive(self) -> None:
        self.monkeypatch.undo()
        use_numpy_engine(self.monkeypatch)

    def steps(self) -> list[int]:
        return [entry.step for entry in list_mirror(self.uri).lineage()]

    def bucket(self, kind: str = "checkpoints") -> dict[str, str]:
        """The objects of the mirror and their ETags, by a client of another library."""
        found: dict[str, str] = {}
        prefix = f"{self.folder.name}/{self.name}/{kind}/"
        for page in self.server.client.get_paginator("list_objects_v2").paginate(Bucket="runs", Prefix=prefix):
            found |= {entry["Key"].removeprefix(prefix): entry["ETag"] for entry in page.get("Contents", ())}
        return found

    def diverge(self) -> None:
        """Let machine 2 train on without the mirror, at another learning rate."""
        assert self.train(self.name, "checkpoint.mirror=null", "optimizer.lr=0.02") == 0
        config = self.second / self.name / "config.yaml"
        assert "mirror: null" in config.read_text()
        assert chain_of(self.second / self.name) != chain_of(self.first / self.name)

    def train(self, resume: str, *overrides: str) -> int:
        return main(["train", "--resume", resume, f"run.directory={self.second}", *overrides])


@pytest.fixture
def machines(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(server, tmp_path, monkeypatch)


def chain_of(directory: Path) -> list[tuple[str, str]]:
    return [(entry.batch, entry.chain) for entry in read_chain(directory).values()]


def commands(text: str) -> list[str]:
    """The commands in a message, as a shell gets them."""
    return re.findall(r"`(.*?)`", " ".join(text.split()))


@pytest.mark.parametrize("how", ["name", "latest", "directory", "python"])
def test_a_run_that_is_behind_is_restored_however_it_is_named(
    machines: Machines, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, directory = machines.bucket(), machines.second / machines.name
    capsys.readouterr()
    if how == "python":
        config = configuration(
            machines.folder / "first",
            [f"checkpoint.mirror=s3://runs/{machines.folder.name}", f"run.directory={machines.second}"],
        )
        run(config, resume_from=directory)
    else:
        assert machines.train({"name": machines.name, "latest": "latest"}.get(how, str(directory))) == 0
        assert capsys.readouterr().out.count("Restored step 12 from the mirror") == 1
    assert chain_of(directory) == chain_of(machines.first / machines.name)
    assert max(step_directories(directory)) == 12
    assert machines.bucket() == before


@pytest.mark.slow
def test_a_restored_run_keeps_the_settings_of_the_mirror(machines: Machines) -> None:
    """Machine 1 has made the run longer; machine 2 trains to that length, and not to its own."""
    assert main(["train", "--resume", str(machines.first / machines.name), "train.num_steps=20"]) == 0
    before = machines.bucket()
    assert machines.train(machines.name) == 0
    assert chain_of(machines.second / machines.name) == chain_of(machines.first / machines.name)
    assert len(chain_of(machines.second / machines.name)) == 20
    assert machines.bucket() == before


@pytest.mark.slow
def test_diverged_histories_are_refused_and_each_choice_is_a_command(
    machines: Machines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.diverge()
    before, directory = machines.bucket(), machines.second / machines.name
    mine, theirs = chain_of(directory), chain_of(machines.first / machines.name)
    monkeypatch.chdir(machines.second.parent)
    for name in (machines.name, "latest", str(directory)):
        capsys.readouterr()
        mirror = f"checkpoint.mirror=s3://runs/{machines.folder.name}"
        assert machines.train(name, mirror) == 2
        said = capsys.readouterr().err
        flat = " ".join(said.split())
        assert "have diverged: they differ at step 12" in flat
        assert f"runs/{machines.name} is at step 12, {machines.uri} is at step 12" in flat
        assert machines.bucket() == before
        assert chain_of(directory) == mine
    local, mirrored = commands(said)
    assert machines.train(machines.name, mirror, "train.num_steps=20") == 2
    local, _ = commands(capsys.readouterr().err)
    assert "train.num_steps=20" in local, "what was typed is repeated"
    assert main(shlex.split(local)[1:]) == 0
    after = machines.bucket()
    assert before.items() <= after.items(), "no object of the other history is gone"
    assert {name.partition("/")[2] for name in after.keys() - before.keys() if "-c0002" in name} == {"REASON.txt"}
    assert chain_of(directory)[:12] == mine
    assert machines.steps() == [20, 16]

    abandoned = re.findall(r"step-00000012-c0002", capsys.readouterr().out)
    assert abandoned, "the warning names what is abandoned"
    other = machines.folder / "other"
    assert main(["train", "--resume", f"{machines.uri}/checkpoints/{abandoned[0]}", f"run.directory={other}"]) == 0
    assert chain_of(other / machines.name) == theirs

    moved, train = mirrored.split(" && ")
    _, source, target = shlex.split(moved)
    Path(source).rename(target)
    assert main(shlex.split(train)[1:]) == 0
    assert chain_of(directory) == theirs, "the mirror's run, which the last command made the current one again"
    assert after.items() <= machines.bucket().items()
    assert machines.steps() == [12]


@pytest.mark.slow
def test_a_named_checkpoint_abandons_the_later_steps_of_the_mirror(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the resumed run dies before it has saved anything: the mirror then agrees with the machine."""
    before, directory = machines.bucket(), machines.second / machines.name
    checkpoint = directory / "checkpoints" / "step-00000004"
    machines.die(6)
    capsys.readouterr()
    with pytest.raises(Killed):
        machines.train(str(checkpoint))
    machines.revive()
    said = " ".join(capsys.readouterr().out.split())
    assert f"The mirror {machines.uri} is ahead (step 12). Resuming from step 4 abandons" in said
    assert before.items() <= machines.bucket().items()
    assert machines.train(machines.name) == 0
    assert before.items() <= machines.bucket().items()
    assert machines.steps() == [12, 8]
    assert {entry.fencing_token for entry in list_mirror(machines.uri).lineage()} == {4}
    capsys.readouterr()
    assert main(["checkpoints", "list", str(directory), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {entry["name"]: entry["state"] for entry in listed if "mirror" in entry} == {
        "step-00000008-c0002": "abandoned", "step-00000012-c0002": "abandoned",
        "step-00000008-c0004": "whole", "step-00000012-c0004": "whole",
    }  # fmt: skip


@pytest.mark.slow
def test_a_checkpoint_of_the_mirror_is_restored_without_training(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, before = machines.first / machines.name, machines.bucket()
    saved = step_directories(directory)[8]
    content = {path.name: path.read_bytes() for path in saved.iterdir()}
    chain, attempts = chain_of(directory), read_attempts(directory)
    shutil.rmtree(saved)
    for _ in range(2):
        assert main(["checkpoints", "restore", str(directory), "--step", "8"]) == 0
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == content
    said = capsys.readouterr().out
    assert said.count("Restored step 8 from the mirror") == 1
    assert (chain_of(directory), read_attempts(directory)) == (chain, attempts)
    assert main(["checkpoints", "restore", str(directory), "--step", "4"]) == 5
    assert "it has: 8, 12" in capsys.readouterr().err
    assert main(["checkpoints", "restore", machines.name, "--root", str(machines.second)]) == 0
    assert chain_of(machines.second / machines.name) == chain
    assert main(["checkpoints", "restore", machines.uri, "--root", str(machines.folder / "third")]) == 0
    assert list(step_directories(machines.folder / "third" / machines.name)) == [12]
    assert machines.bucket() == before


def test_a_replay_that_lacks_a_mirrored_checkpoint_names_the_command_that_restores_it(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the steps after 8 had run in two processes."""
    directory = machines.first / machines.name
    record = json.loads((directory / "run.json").read_text())
    notes = record["attempts"][1]["notes"]
    notes["steps"]["start_step"] = 8
    notes["environment"]["num_processes"] = 2
    (directory / "run.json").write_text(json.dumps(record))
    shutil.rmtree(step_directories(directory)[8])
    assert main(["replay", str(directory), "--from", "0"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"vorox replay {directory} --from 0 --to 8, then no checkpoint is left" in said
    (command,) = commands(said)
    assert main(shlex.split(command)[1:]) == 0
    assert main(["replay", str(directory), "--from", "0"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"then vorox replay {directory} --from 8 --to 12 --nproc 2" in said
    assert "restore" not in said


@pytest.mark.slow
def test_a_dry_run_says_what_it_would_restore_and_writes_nothing(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    def content(root: Path) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

    before = machines.bucket(), machines.bucket("record"), content(machines.second)
    for resume, root, expected in [
        (machines.uri, machines.second, "restore step 12 from the mirror, and resume from it"),
        (machines.uri, machines.first, "resume from step 12"),
        (f"{machines.uri}/checkpoints/step-00000008-c0002", machines.first, "restore step 8 from the mirror"),
        (machines.name, machines.second, "resume from step 4"),
    ]:
        capsys.readouterr()
        assert main(["train", "--resume", resume, "--dry-run", f"run.directory={root}"]) == 0
        assert f"{root / machines.name} ({expected}" in " ".join(capsys.readouterr().out.split())
    assert (machines.bucket(), machines.bucket("record"), content(machines.second)) == before


def test_a_start_that_is_refused_leaves_the_mirror_to_the_run_in_use(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the process that trains was suspended for longer than its lease."""
    write_text(tmp_path / "text")
    config = configuration(tmp_path, [f"checkpoint.mirror=s3://runs/{tmp_path.name}"])
    monkeypatch.setattr(ownership, "LEASE_SECONDS", 0.0)
    refused: list[ConfigError] = []

    def start_again() -> None:
        (directory,) = (tmp_path / "runs").iterdir()
        for resume_from in ("auto", directory):
            with pytest.raises(ConfigError) as error:
                run(config, resume_from=resume_from)
            refused.append(error.value)

    at_step(monkeypatch, 6, start_again)
    directory = run(config).run_directory
    assert [re.sub("by process .*", "", error.what) for error in refused] == [f"Run {directory.name} is in use "] * 2
    assert [entry.step for entry in list_mirror(f"s3://runs/{tmp_path.name}/{directory.name}").lineage()] == [12, 8]
    assert not events(directory, "mirror_lost")
    (settled,) = events(directory, "mirror_settled")
    assert "NOT" not in settled
