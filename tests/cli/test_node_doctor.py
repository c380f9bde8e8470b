"""``vorox doctor --nodes``: exact sums and figures on two ranks, and every fault by the rank that has it.

Ranks are threads with collectives in memory, or real processes on the loopback interface.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eventually import PATIENCE_SECONDS
from rank_threads import Store
from vorox.backends import node_collectives
from vorox.cli import main
from vorox.cli.checks import node_doctor
from vorox.core.errors import StalledError, VoroxError
from vorox.core.ranks.distributed_context import DistributedContext, Membership
from vorox.runtime import node_checks, node_exchange
from vorox.runtime.machine_checks import Finding

OTHER_VERSION = Path(__file__).parents[1] / "ranks" / "other_version"


class Sums:
    """All-reduces of threads: what a rank adds may be changed by a fault."""

    transport = "memory"
    is_on_host = True

    def __init__(self, size: int, fault: Callable[[int, Any], Any] = lambda rank, array: array) -> None:
        self._barrier = threading.Barrier(size, timeout=PATIENCE_SECONDS)
        self._arrays, self._fault = dict[int, Any](), fault

    def of(self, rank: int) -> OneRank:
        return OneRank(self, rank)

    def abort(self) -> None:
        self._barrier.abort()

    def sum(self, rank: int, array: Any) -> Any:
        self._arrays[rank] = self._fault(rank, array)
        self._barrier.wait()
        total = sum(self._arrays.values())
        self._barrier.wait()
        return total


@dataclass
class OneRank:
    sums: Sums
    rank: int
    transport: str = "memory"
    is_on_host: bool = True

    def sum(self, array: Any) -> Any:
        return self.sums.sum(self.rank, array)

    def all_reduce(self, num_bytes: int) -> Callable[[], None]:
        return lambda: None

    def exchange(self, peer: int, num_bytes: int) -> Callable[[], None]:
        return lambda: None


@dataclass
class Result:
    passed: list[Any]
    findings: dict[str, Finding]
    figures: dict[str, Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_threads(
    monkeypatch: pytest.MonkeyPatch,
    roots: Sequence[Path | None],
    *,
    sums: Sums | None = None,
    reports: Callable[[dict[str, Any]], dict[str, Any]] = lambda report: report,
    timeout_seconds: float = PATIENCE_SECONDS,
) -> Result:
    """Run the checks on ranks with these directories; no rank starts where it is ``None``."""
    size, store, port = len(roots), Store(), free_port()
    found = sums or Sums(size)
    node_report = node_checks.node_report
    monkeypatch.setattr(node_checks, "node_report", lambda rank, paths: reports(node_report(rank, paths)))
    monkeypatch.setattr(node_exchange, "_VISIBLE_SECONDS", 0.1)
    monkeypatch.setattr(
        node_collectives, "join",
        lambda name, member, seconds: (DistributedContext(member.rank, size, store), found.of(member.rank)),
    )  # fmt: skip
    findings: list[Finding] = []
    figures: dict[str, Any] = {}

    def one(rank: int, root: Path) -> Any:
        member = Membership(f"127.0.0.1:{port}", rank, size, rank, 1)
        checks = node_doctor.NodeChecks(member, root, "torch", timeout_seconds, findings.append)
        try:
            return checks.run()
        except VoroxError as error:
            return error
        finally:
            if rank == 0:
                figures.update(checks.figures)

    started = [(rank, root) for rank, root in enumerate(roots) if root is not None]
    with ThreadPoolExecutor(size) as pool:
        passed = list(pool.map(lambda pair: one(*pair), started))
    return Result(passed, {finding.name: finding for finding in findings}, figures)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "VOROX_COORDINATOR", "VOROX_NODE_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_ranks_without_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = as_threads(monkeypatch, [tmp_path / "runs"] * 3)
    assert result.passed == [True] * 3
    assert {name: finding.status for name, finding in result.findings.items()} == dict.fromkeys(
        ["ranks", "versions", "run.directory", "cache directory", "clocks", "all-reduce", "latency", "bus bandwidth",
         "slowest pair"], "ok"
    )  # fmt: skip
    assert result.findings["ranks"].text == f"3 answered: ranks 0-2 on {socket.gethostname()}"
    assert "exact on 3 ranks" in result.findings["all-reduce"].text
    assert [entry["bytes"] for entry in result.figures["all_reduce"]["sizes"]] == [8, 1 << 16, 1 << 20, 1 << 24]
    assert [pair["ranks"] for pair in result.figures["pairs"]] == [[0, 1], [1, 2], [2, 0]]
    assert list(tmp_path.iterdir()) == [], "token files and their directories are removed"


def test_a_rank_that_adds_wrong_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One bit of one element of one rank."""

    def flip(rank: int, array: Any) -> Any:
        if rank == 1 and array.dtype == np.float32:
            array = array.copy()
            array[77] += 1
        return array

    result = as_threads(monkeypatch, [tmp_path] * 2, sums=Sums(2, flip))
    assert result.passed == [False] * 2
    assert result.findings["all-reduce"].status == "fail"
    assert result.figures["all_reduce"]["wrong_elements"] == [1, 1]


def test_a_rank_that_ends_during_the_sums(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def end(rank: int, array: Any) -> Any:
        if rank == 1:
            sums.abort()
            raise RuntimeError("Connection closed by peer\nframes")
        return array

    sums = Sums(2, end)
    passed, error = (result := as_threads(monkeypatch, [tmp_path] * 2, sums=sums)).passed
    assert passed is False
    assert isinstance(error, VoroxError)
    assert error.what == "failed on rank 1: Connection closed by peer"
    assert result.findings["all-reduce"].status == "fail"
    assert result.findings["all-reduce"].text.startswith("failed on rank 0")


def test_a_missing_rank_is_named_with_its_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = as_threads(monkeypatch, [tmp_path, None, tmp_path], timeout_seconds=3.0)
    assert result.passed == [False, False]
    finding = result.findings["ranks"]
    host = socket.gethostname()
    assert finding.status == "fail"
    assert finding.text == (
        f"rank 1 of 3 did not answer within 3 s: rank 1 on machine 2 of 3; answered: ranks 0, 2 on {host}"
    )
    assert "--timeout" in finding.remedy
    assert "all-reduce" not in result.findings


def test_a_missing_rank_0_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (error,) = as_threads(monkeypatch, [None, tmp_path], timeout_seconds=0.5).passed
    assert isinstance(error, StalledError)
    assert error.what.startswith("Rank 0 of 2 did not start within ")
    assert "--timeout sets the time" in error.hint


def test_a_rank_with_another_version_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def other(report: dict[str, Any]) -> dict[str, Any]:
        if report["rank"] == 1:
            report = {**report, "host": "node-b", "versions": {**report["versions"], "commit": "abc", "torch": "1.0"}}
        return report

    result = as_threads(monkeypatch, [tmp_path] * 2, reports=other)
    assert result.passed == [False] * 2
    text = result.findings["versions"].text
    assert "commit is abc (rank 1 on node-b), on rank 0 " in text
    assert "torch is 1.0 (rank 1 on node-b), on rank 0 " in text
    assert result.findings["all-reduce"].text == "not measured: the ranks have different versions of torch"


def test_a_directory_that_is_not_shared_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = as_threads(monkeypatch, [tmp_path / "a", tmp_path / "b"])
    assert result.passed == [False] * 2
    finding = result.findings["run.directory"]
    assert finding.status == "fail"
    assert finding.text == (
        f"a file of rank 0 in {tmp_path}/a does not appear in {tmp_path}/b on rank 1 on {socket.gethostname()}"
    )
    assert finding.remedy.startswith("set run.directory to ")
    assert result.findings["cache directory"].status == "ok"
    assert result.findings["all-reduce"].status == "ok", "the other checks still run"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--nodes"], "a single process"),
        (["--nodes", "--network"], "huggingface.co"),
        (["--nodes", "--backend", "tpu"], "Unknown backend 'tpu'"),
        (["--nproc", "2"], "--nproc needs --nodes"),
        (["--timeout", "5"], "--timeout needs --nodes"),
        (["--backend", "torch"], "--backend needs --nodes"),
    ],
)
def test_options_are_honoured_or_refused(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert what in capsys.readouterr().err


def test_auto_discovery_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VOROX_COORDINATOR", "auto")
    assert main(["doctor", "--nodes"]) == 2
    assert "--nodes needs the rank of every process" in capsys.readouterr().err


def run_doctor(directory: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    return subprocess.Popen(
        [sys.executable, "-m", "vorox", "doctor", "--nodes", *words], cwd=directory, text=True,
        env={**environment, "OMP_NUM_THREADS": "1", **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_two_processes_sum_exactly(tmp_path: Path, backend: str) -> None:
    process = run_doctor(tmp_path, "--nproc", "2", "--json", "--backend", backend)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
    value = json.loads(out)
    assert value["ok"] is True
    figures = value["nodes"]
    assert figures["world_size"] == 2
    assert figures["all_reduce"]["wrong_elements"] == [0, 0]
    for entry in figures["all_reduce"]["sizes"]:
        assert entry["bus_bytes_per_second"] == pytest.approx(entry["bytes"] / entry["seconds"]), "2 (n - 1) / n is 1"
    assert [pair["ranks"] for pair in figures["pairs"]] == ([[0, 1]] if backend == "torch" else [])


@pytest.mark.slow
@pytest.mark.torch
def test_processes_of_another_launcher_name_what_differs(tmp_path: Path) -> None:
    """Rank 1 has other versions and directories of its own; only rank 0 prints, and both end with its exit code."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    other = tmp_path / "other"
    other.mkdir()
    ranks = [
        run_doctor(tmp_path, RANK="0", **place),
        run_doctor(other, RANK="1", PYTHONPATH=str(OTHER_VERSION), VOROX_CACHE=str(other / "cache"), **place),
    ]
    (out, errors), others = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], out + errors + "".join(others)
    assert others == ("", "")
    status = {line[6:21].strip(): line[:4].strip() for line in out.splitlines() if line[:4].strip()}
    assert "jaxlib is 0.0.1 (rank 1 on " in out
    assert {name for name, value in status.items() if value == "fail"} == {
        "versions", "run.directory", "cache directory"
    }  # fmt: skip
    assert status["all-reduce"] == "ok"
    assert "Not ready to train: " in out


@pytest.mark.slow
@pytest.mark.torch
def test_a_process_that_does_not_start_is_named(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0"}
    process = run_doctor(tmp_path, "--timeout", "1", **place)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert "rank 1 of 2 did not answer within 1 s: rank 1 on machine 2 of 2" in out
