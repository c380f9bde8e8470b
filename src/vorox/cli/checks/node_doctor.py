"""``vorox doctor --nodes``: check the ranks of a job and the network between them.

Every rank runs the same steps. The ranks meet at the address that training uses and exchange versions and paths; then
an engine connects them and sums arrays. Rank 0 prints; the verdict is the exit code of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from vorox.backends import node_collectives
from vorox.cli.launch.rank_launcher import is_launcher, launch_ranks
from vorox.core.errors import ConfigError, VoroxError
from vorox.core.ranks.distributed_context import FOUND_BY_BACKEND, DistributedContext, Membership, membership
from vorox.core.ranks.rendezvous import Rendezvous
from vorox.data.corpus.cache_location import root_of
from vorox.runtime import collective_timing, node_checks, node_exchange
from vorox.runtime.machine_checks import Finding

_CONNECTED = "check that all machines reach each other on all ports (firewall), and name the network interface by "


def rank_or_launch(nproc: int, arguments: Sequence[str]) -> Membership:
    """Return the rank of this process; a launcher starts the ranks instead, and ends with their exit code.

    Args:
        nproc: Number of ranks to start on this machine.
        arguments: The command line of a rank.

    Raises:
        ConfigError: There is one rank, or its number is not in the environment.
        typer.Exit: This process was the launcher.
    """
    if is_launcher(nproc, 0):
        raise typer.Exit(launch_ranks(nproc, arguments, advice="Run the same command again."))
    member = membership()
    if member is None:
        raise ConfigError(
            "--nodes checks the network between several ranks, and this is a single process", where="--nodes",
            hint="start it as you start training: under torchrun, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
            "on every machine, or here with --nproc N",
        )  # fmt: skip
    if member.coordinator == FOUND_BY_BACKEND:
        raise ConfigError(
            "--nodes needs the rank of every process", where="VOROX_COORDINATOR",
            hint="set VOROX_COORDINATOR=HOST:PORT, VOROX_PROCESS_COUNT and VOROX_PROCESS_INDEX",
        )  # fmt: skip
    return member


@dataclass(slots=True)
class NodeChecks:
    """The checks of one rank.

    Attributes:
        member: The rank of this process.
        root: Parent directory of runs.
        engine: The engine that connects the ranks.
        timeout_seconds: Time that the ranks have for each step.
        on_finding: Receives findings on rank 0.
        figures: What was measured, as plain JSON, on rank 0.
    """

    member: Membership
    root: Path
    engine: str
    timeout_seconds: float
    on_finding: Callable[[Finding], None]
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    _has_failed: bool = field(default=False, init=False)

    def run(self) -> bool:
        """Run all checks; return whether none has failed, on every rank.

        Raises:
            VoroxError: On ranks other than 0, where the checks ended early.
        """
        reports = self._meet()
        if reports is None:
            return False
        try:
            dist, collectives = node_collectives.join(self.engine, self.member, self.timeout_seconds)
        except VoroxError as error:
            if self.member.rank:
                raise
            variable = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
            self._report(Finding("all-reduce", "fail", error.what, f"{_CONNECTED}{variable}"))
            return False
        try:
            self._check_clocks(dist, reports)
            self._check_collectives(dist, collectives, reports)
            return bool(node_exchange.publish(dist, "verdict", not self._has_failed, self.timeout_seconds))
        except RuntimeError as error:  # of the framework, for a rank that has ended or a network that fails
            what = (str(error).strip() or type(error).__name__).splitlines()[0]
            text, hint = f"failed on rank {dist.rank}: {what}", "see the output of the rank that ended first"
            if not dist.is_main:
                raise VoroxError(text, where="all-reduce", hint=hint) from error
            self._report(Finding("all-reduce", "fail", text, hint))
            return False

    def _report(self, finding: Finding) -> None:
        self._has_failed |= finding.status == "fail"
        if self.member.rank == 0:
            self.on_finding(finding)

    def _meet(self) -> list[dict[str, Any]] | None:
        """Exchange reports; return those of all ranks, or ``None`` if the engine cannot connect the ranks."""
        assert self.member.rank is not None, "checked by rank_or_launch"
        directories = {"run.directory": self.root.absolute(), "cache directory": root_of(None)}
        report = node_checks.node_report(self.member.rank, directories)
        meeting = replace(Rendezvous.of(self.member, self.timeout_seconds), time_setting="--timeout")
        with node_exchange.token_files(directories if self.member.rank == 0 else {}) as tokens:
            agreed = meeting.agree(report, lambda reports: {"reports": reports, "tokens": tokens}, allow_missing=True)
            self._report(node_checks.check_answers(agreed["reports"], self.member, self.timeout_seconds))
            reports: list[dict[str, Any]] = [found for found in agreed["reports"] if found is not None]
            self.figures |= {"world_size": self.member.world_size, "engine": self.engine, "ranks": reports}
            self._report(node_checks.check_versions(reports))
            if len(reports) < len(agreed["reports"]):
                return None
            if not self._check_directories(meeting, directories, agreed["tokens"], reports):
                return None
        differing = [
            name for name in node_checks.differing_versions(reports) if name in {self.engine, f"{self.engine}lib"}
        ]
        if differing:
            text = f"not measured: the ranks have different versions of {' and '.join(differing)}"
            self._report(Finding("all-reduce", "fail", text, "install the same version on all machines"))
            return None
        return reports

    def _check_directories(
        self,
        meeting: Rendezvous,
        directories: Mapping[str, Path],
        tokens: Mapping[str, str],
        reports: list[dict[str, Any]],
    ) -> bool:
        """Report which directories are shared; return whether all ranks have answered."""
        sees: dict[str, bool | None] = {
            name: node_exchange.sees_file(directories[name], token) if token else None for name, token in tokens.items()
        }
        by_rank = meeting.agree(sees, list, allow_missing=True)
        ended = [report for report, found in zip(reports, by_rank, strict=True) if found is None]
        if ended:
            text = f"{node_checks.ranks_by_host(ended)} answered, and then ended"
            self._report(Finding("ranks", "fail", text, "see the output of these ranks"))
            return False
        for name in tokens:
            self._report(node_checks.check_directory(name, reports, [found[name] for found in by_rank]))
        return True

    def _check_clocks(self, dist: DistributedContext, reports: Sequence[Mapping[str, Any]]) -> None:
        machines = [report["machine"] for report in reports]
        ranks = [rank for rank, machine in enumerate(machines) if machines.index(machine) == rank][1:]
        offsets = node_exchange.clock_offsets(dist, ranks, self.timeout_seconds)
        if dist.is_main:
            self.figures["clocks"] = [{"rank": rank, **asdict(offset)} for rank, offset in offsets.items()]
            self._report(node_checks.check_clocks(offsets, reports, len(ranks)))

    def _check_collectives(
        self,
        dist: DistributedContext,
        collectives: collective_timing.Collectives,
        reports: Sequence[Mapping[str, Any]],
    ) -> None:
        wrong = collective_timing.count_wrong_elements(collectives, dist.rank, dist.world_size)
        all_wrong = node_exchange.gather(dist, "sums", wrong, self.timeout_seconds)
        self.figures["all_reduce"] = {"transport": collectives.transport, "wrong_elements": all_wrong}
        if dist.is_main:
            self._report(node_checks.check_sums(all_wrong, reports, collectives.transport))
        pairs = collective_timing.neighbours([report["machine"] for report in reports])
        own = {
            "sizes": list(collective_timing.time_all_reduces(collectives).items()),
            "pairs": collective_timing.time_pairs(collectives, dist.rank, pairs),
        }
        times = node_exchange.gather(dist, "times", own, self.timeout_seconds)
        if dist.is_main:
            self._report_times([found for found in times if found is not None], pairs, dist.world_size, reports)

    def _report_times(
        self,
        times: Sequence[Mapping[str, Any]],
        pairs: Sequence[tuple[int, int]],
        world_size: int,
        reports: Sequence[Mapping[str, Any]],
    ) -> None:
        """Report the times of the slowest ranks."""
        seconds: dict[int, float] = {}
        for size, time in (pair for found in times for pair in found["sizes"]):
            seconds[size] = max(time, seconds.get(size, 0.0))
        self.figures["all_reduce"]["sizes"] = [
            {
                "bytes": size, "seconds": time,
                "bus_bytes_per_second": collective_timing.bus_bytes_per_second(size, time, world_size),
            }
            for size, time in seconds.items()
        ]  # fmt: skip
        by_pair = {
            pair: max(known)
            for number, pair in enumerate(pairs)
            if (known := [found["pairs"][number] for found in times if found["pairs"][number] is not None])
        }
        self.figures["pairs"] = [
            {"ranks": list(pair), "bytes": collective_timing.PAIR_BYTES, "seconds": time}
            for pair, time in by_pair.items()
        ]
        for finding in (*node_checks.check_rates(seconds, world_size), *node_checks.check_pairs(by_pair, reports)):
            self._report(finding)


def rank_arguments(root: str, backend: str | None, timeout_seconds: float, *, as_json: bool) -> list[str]:
    """Return the command line of a rank."""
    words = ["doctor", "--nodes", "--root", root, "--timeout", f"{timeout_seconds:g}"]
    return [*words, *([] if backend is None else ["--backend", backend]), *(["--json"] if as_json else [])]
