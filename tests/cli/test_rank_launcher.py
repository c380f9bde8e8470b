"""--nproc: who each process is, and how their ends become one end. Processes here are shells, not runs."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eventually import wait_until
from tiny_runs import configuration, write_text
from vorox.cli import main
from vorox.cli.commands import declares_option
from vorox.cli.failure import _four_lines
from vorox.cli.launch import rank_launcher
from vorox.cli.training import run as training_run
from vorox.core.errors import ConfigError, VoroxError
from vorox.core.ranks.distributed_context import Membership, Node, membership, node_membership
from vorox.core.run_layout import RunLayout
from vorox.core.user_code.trusted_code import take_flag

HERE = Node("127.0.0.1", 4321, 0, 1)


def test_each_process_is_told_who_it_is() -> None:
    found = [membership(environment) for environment in rank_launcher.environments_of(3, HERE, {"HOME": "/root"})]
    assert found == [Membership("127.0.0.1:4321", rank, 3, local_rank=rank, local_world_size=3) for rank in range(3)]
    assert rank_launcher.environments_of(2, HERE, {"HOME": "/root"})[1]["HOME"] == "/root"


def test_ranks_forget_the_run_that_the_launcher_is_part_of() -> None:
    """Under torchrun or with the variables of a cluster set, ``--nproc`` starts a run of its own."""
    around = {
        "VOROX_COORDINATOR": "node7:80", "VOROX_PROCESS_COUNT": "9", "VOROX_PROCESS_INDEX": "8",
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    found = [membership(environment) for environment in rank_launcher.environments_of(2, HERE, around)]
    assert found == [Membership("127.0.0.1:4321", rank, 2, local_rank=rank, local_world_size=2) for rank in range(2)]


def test_ranks_of_several_machines_are_numbered_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    around = {"VOROX_COORDINATOR": "[fe80::1]:700", "VOROX_NODE_COUNT": "3", "VOROX_NODE_INDEX": "2"}
    node = node_membership(around)
    assert node is not None
    assert node == Node("fe80::1", 700, 2, 3)
    found = [membership(environment) for environment in rank_launcher.environments_of(2, node, around)]
    assert found == [Membership("[fe80::1]:700", 4 + rank, 6, local_rank=rank, local_world_size=2) for rank in range(2)]
    assert node_membership(around | {"VOROX_NODE_COUNT": "1", "VOROX_NODE_INDEX": "0"}) is None
    for wrong in ({"VOROX_NODE_INDEX": "3"}, {"VOROX_NODE_COUNT": ""}, {"VOROX_COORDINATOR": "host"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            node_membership(around | wrong)
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    assert rank_launcher.is_launcher(1, 0), "one rank on each of three machines"
    with pytest.raises(ConfigError, match="several machines"):
        rank_launcher.is_launcher(2, 5)


@pytest.mark.parametrize(("index", "count", "is_main"), [("0", "2", True), ("1", "2", False), ("0", "1", True)])
def test_the_launcher_of_a_machine_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, index: str, count: str, is_main: bool
) -> None:
    """The launcher on rank 0's machine prints for the run; its environment describes no rank yet."""
    around = {"VOROX_COORDINATOR": "10.0.0.1:700", "VOROX_NODE_COUNT": count, "VOROX_NODE_INDEX": index}
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    assert rank_launcher.is_main_rank() == is_main


def test_commands_that_go_on_start_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_launcher.nproc_option() == ""
    for name, value in rank_launcher.environments_of(2, HERE, {})[1].items():
        monkeypatch.setenv(name, value)
    assert rank_launcher.nproc_option() == " --nproc 2"
    monkeypatch.setenv("MASTER_ADDR", "host0")
    assert rank_launcher.nproc_option() == "", "each machine has a command of its own"


def test_listed_gpus_must_divide_evenly() -> None:
    found = rank_launcher.environments_of(2, HERE, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["4,5,6,7"] * 2, "the engine divides them by local rank"
    with pytest.raises(ConfigError, match="Cannot divide 3 visible GPUs evenly among 2"):
        rank_launcher.environments_of(2, HERE, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def as_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> list[str]:
    """Stands in for the interpreter of the ranks: a program that sees who it is."""
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ncase $RANK in\n{text}\nesac\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return ["train"]


def test_all_well_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert rank_launcher.launch_ranks(3, as_program(monkeypatch, tmp_path, "*) exit 0;;")) == 0


def test_the_first_failure_is_said_and_its_code_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Process 1 fails; the others hang and are ended after the grace."""
    monkeypatch.setattr(rank_launcher, "GRACE_SECONDS", 0.2)
    words = as_program(monkeypatch, tmp_path, "1) echo 'the disk is full' >&2; exit 5;;\n*) exec sleep 600;;")
    assert rank_launcher.launch_ranks(3, words) == 5
    assert "the disk is full" in capfd.readouterr().err


def test_a_process_that_was_asked_to_stop_leaves_the_others_their_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 may take as long as it needs to write the checkpoint, even if other ranks have exited."""
    monkeypatch.setattr(rank_launcher, "GRACE_SECONDS", 0.0)
    words = as_program(monkeypatch, tmp_path, f"1) exit 75;;\n*) sleep 1; touch {tmp_path}/saved; exit 75;;")
    assert rank_launcher.launch_ranks(2, words) == 75
    assert (tmp_path / "saved").exists()


def test_a_killed_process_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    later = f"until [ -e {tmp_path}/dies ]; do sleep 0.05; done; sleep 0.2; exit 7"
    text = f"1) touch {tmp_path}/dies; kill -9 $$;;\n*) {later};;"
    assert rank_launcher.launch_ranks(2, as_program(monkeypatch, tmp_path, text)) == 1
    assert "Rank 1 of 2 was killed by SIGKILL. Run the same command again to resume.\n" in capfd.readouterr().err
    (tmp_path / "dies").unlink()
    assert rank_launcher.launch_ranks(2, as_program(monkeypatch, tmp_path, text), advice="Run the check again.") == 1
    assert "Rank 1 of 2 was killed by SIGKILL. Run the check again.\n" in capfd.readouterr().err


LAUNCHER = """
import signal
import subprocess
import sys
from vorox.cli.launch import rank_launcher
sys.executable = sys.argv[1]
rank_launcher.launch_ranks(2, ["train"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at the death of a parent")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_no_rank_outlives_its_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sent: signal.Signals) -> None:
    """The ranks get SIGTERM and may save; the launcher gets the signal alone."""
    python = sys.executable
    rank = f"trap 'touch {tmp_path}/saved-$RANK; exit 75' TERM HUP; touch {tmp_path}/ready-$RANK"
    as_program(monkeypatch, tmp_path, f"*) {rank}; while :; do sleep 0.05; done;;")
    with subprocess.Popen([python, "-c", LAUNCHER, sys.executable]) as launcher:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        launcher.send_signal(sent)
    wait_until(lambda: len(list(tmp_path.glob("saved-*"))) == 2)


def test_what_a_rank_records_and_prints_starts_as_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank is not given the launcher's ``--nproc``; typed without it, the command would compute other bits."""
    write_text(tmp_path / "text", documents=2)
    configuration(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in rank_launcher.environments_of(2, HERE, {})[0].items():
        monkeypatch.setenv(name, value)
    recorded: list[list[str]] = []
    monkeypatch.setattr(training_run, "start_run", lambda run, minutes, command, launched_at: recorded.append(command))
    assert main(["train", "tiny.yaml", "--minutes", "5", "--resume", "never"]) == 0
    assert recorded == [["vorox", "train", "tiny.yaml", "--resume", "never", "--nproc", "2", "--minutes", "5"]]
    stop = VoroxError("Stopped")
    assert _four_lines(stop, ["train", "tiny.yaml"])[1].strip() == "where   vorox train tiny.yaml --nproc 2"
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert _four_lines(stop, ["train", "tiny.yaml"])[1].strip() == "where   vorox train tiny.yaml"


@pytest.mark.parametrize("command", [["replay", "latest"], ["checkpoints", "materialize", "latest", "--step", "3"]])
@pytest.mark.parametrize("flag", [[], ["--trust-code"]])
def test_ranks_trust_what_their_command_trusts(
    command: list[str],
    flag: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each rank gets a command line that takes the flag itself, before any option of the command."""
    monkeypatch.chdir(tmp_path)
    RunLayout(tmp_path / "runs" / "a").directory.mkdir(parents=True)
    RunLayout(tmp_path / "runs" / "a").record.write_text('{"format": "vorox-run/2", "attempts": []}')
    monkeypatch.setattr(
        rank_launcher, "child_command",
        lambda program, *words: [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words],
    )  # fmt: skip
    assert main([*command, "--nproc", "2", *flag]) == 0
    (printed,) = capfd.readouterr().out.splitlines()
    words = ast.literal_eval(printed)
    assert words[: len(flag)] == flag
    assert words[len(flag) :][: len(command)] == command
    assert words.count("--trust-code") == len(flag)
    assert take_flag(words, lambda found: declares_option(found, "--trust-code")) == words[len(flag) :]
    take_flag((), lambda _: False)
