"""Judge what the ranks of a job report about themselves and their network, for vorox doctor --nodes.

Reports of all ranks go in, findings come out. ``cli/checks/node_doctor.py`` collects the reports.
"""

from __future__ import annotations

import platform
import socket
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.files.file_holder import boot_identity
from vorox.core.platform.environment import code_record, package_versions
from vorox.core.ranks.distributed_context import Membership
from vorox.core.version import __version__
from vorox.runtime.collective_timing import LATENCY_BYTES, PAIR_BYTES, bus_bytes_per_second
from vorox.runtime.machine_checks import Finding
from vorox.runtime.node_exchange import ClockOffset

MAX_CLOCK_OFFSET_SECONDS = 1.0
MIN_BUS_BYTES_PER_SECOND = 125e6
"""The rate of Gigabit Ethernet."""
SLOW_PAIR_FACTOR = 2.0
_COMPARED_PACKAGES = ("torch", "jax", "jaxlib", "numpy")
_SETTINGS = {"run.directory": "run.directory", "cache directory": "data.cache.directory (or VOROX_CACHE)"}
_NETWORK = (
    "name the fast network by GLOO_SOCKET_IFNAME (CPU) or NCCL_SOCKET_IFNAME and NCCL_IB_HCA (GPU); NCCL_DEBUG=INFO "
    "shows what NCCL uses"
)


def node_report(rank: int, directories: Mapping[str, Path]) -> dict[str, Any]:
    """Return what a rank reports before the ranks connect, as plain JSON.

    Args:
        rank: This rank.
        directories: The directories that all ranks share, by name.
    """
    return {
        "rank": rank, "host": socket.gethostname(), "machine": boot_identity(), "versions": _versions(),
        "directories": {name: str(path) for name, path in directories.items()},
    }  # fmt: skip


def _versions() -> dict[str, str]:
    """Return what must be equal on all ranks."""
    packages, code = package_versions(), code_record()
    versions = {"vorox": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    versions |= {name: packages[name] for name in _COMPARED_PACKAGES if name in packages}
    if code is not None:
        changes = f" with changes {code['diff_sha256'][:8]}" if code["dirty"] else ""
        versions["commit"] = f"{code['commit'][:12]}{changes}"
    return versions


def check_answers(reports: Sequence[Mapping[str, Any] | None], member: Membership, timeout_seconds: float) -> Finding:
    """Judge which ranks answered.

    Args:
        reports: Report by rank; ``None`` for a rank that did not answer.
        member: Rank 0.
        timeout_seconds: Time that the ranks had.
    """
    answered = [report for report in reports if report is not None]
    missing = [rank for rank, report in enumerate(reports) if report is None]
    hosts = ranks_by_host(answered)
    if not missing:
        return Finding("ranks", "ok", f"{len(reports)} answered: {hosts}")
    text = (
        f"{_ranks(missing)} of {len(reports)} did not answer within {timeout_seconds:g} s: "
        f"{_missing_hosts(missing, reports, member.local_world_size or 1)}; answered: {hosts}"
    )
    remedy = (
        f"start `vorox doctor --nodes` there with the same WORLD_SIZE and MASTER_ADDR, and check that "
        f"{member.free_address} can be reached from there (DNS, firewall); --timeout sets the time"
    )
    return Finding("ranks", "fail", text, remedy)


def _missing_hosts(missing: Sequence[int], reports: Sequence[Mapping[str, Any] | None], local_world_size: int) -> str:
    """Return the hosts of missing ranks: by name if another rank of the machine answered, else by number."""
    machines: dict[str, list[int]] = {}
    num_machines = -(-len(reports) // local_world_size)
    for rank in missing:
        index = rank // local_world_size
        own = reports[index * local_world_size : (index + 1) * local_world_size]
        name = next((report["host"] for report in own if report is not None), f"machine {index + 1} of {num_machines}")
        machines.setdefault(name, []).append(rank)
    return ", ".join(f"{_ranks(ranks)} on {name}" for name, ranks in machines.items())


def ranks_by_host(reports: Iterable[Mapping[str, Any]]) -> str:
    """Return ``ranks 0-3 on host-a, rank 4 on host-b``."""
    hosts: dict[str, list[int]] = {}
    for report in reports:
        hosts.setdefault(report["host"], []).append(report["rank"])
    return ", ".join(f"{_ranks(ranks)} on {host}" for host, ranks in hosts.items())


def differing_versions(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, str]]:
    """Return what differs from rank 0: by name, the version of each rank that differs."""
    first = reports[0]["versions"]
    names = dict.fromkeys(name for report in reports for name in report["versions"])
    found = {
        name: {
            report["rank"]: report["versions"].get(name, "missing")
            for report in reports
            if report["versions"].get(name) != first.get(name)
        }
        for name in names
    }
    return {name: ranks for name, ranks in found.items() if ranks}


def check_versions(reports: Sequence[Mapping[str, Any]]) -> Finding:
    """Judge versions and commit, which must be equal on all ranks."""
    first, differing = reports[0]["versions"], differing_versions(reports)
    if not differing:
        return Finding("versions", "ok", "equal: " + ", ".join(f"{name} {value}" for name, value in first.items()))
    texts, report_of = list[str](), {report["rank"]: report for report in reports}
    for name, by_rank in differing.items():
        for value in dict.fromkeys(by_rank.values()):
            where = ranks_by_host(report_of[rank] for rank, own in by_rank.items() if own == value)
            texts.append(f"{name} is {value} ({where}), on rank 0 {first.get(name, 'missing')}")
    return Finding("versions", "fail", "; ".join(texts), "install the same versions, from the same commit, everywhere")


def check_directory(name: str, reports: Sequence[Mapping[str, Any]], sees: Sequence[bool | None]) -> Finding:
    """Judge whether a directory is shared.

    Args:
        name: Its name in the reports.
        reports: Report by rank.
        sees: Whether a rank sees the file that rank 0 has written; ``None`` on rank 0 if it cannot write there.
    """
    paths = [report["directories"][name] for report in reports]
    remedy = f"set {_SETTINGS[name]} to a directory on storage that all machines mount"
    if sees[0] is None:
        return Finding(name, "fail", f"rank 0 cannot write in {paths[0]}", remedy)
    blind = [report for report, is_visible in zip(reports, sees, strict=True) if not is_visible]
    if not blind:
        return Finding(name, "ok", f"{paths[0]} is shared")
    where = paths[blind[0]["rank"]]
    text = f"a file of rank 0 in {paths[0]} does not appear in {where} on {ranks_by_host(blind)}"
    return Finding(name, "fail", text, remedy)


def check_clocks(offsets: Mapping[int, ClockOffset], reports: Sequence[Mapping[str, Any]], expected: int) -> Finding:
    """Judge the differences between the clocks of machines.

    Args:
        offsets: Offset from the clock of rank 0, by the first rank of each other machine.
        reports: Report by rank.
        expected: Number of machines whose clocks were measured.
    """
    if not expected:
        return Finding("clocks", "ok", "one machine, one clock")
    silent = expected - len(offsets)
    if silent:
        text = f"{silent} of {expected} machines did not answer"
        return Finding("clocks", "warn", text, "run the check again; the network is very slow, or a rank has ended")
    rank, largest = max(offsets.items(), key=lambda item: abs(item[1].seconds))
    text = (
        f"the clock of {reports[rank]['host']} is {abs(largest.seconds):,.3f} s "
        f"{'ahead of' if largest.seconds > 0 else 'behind'} that of {reports[0]['host']} "
        f"(within {largest.error_seconds:.3f} s)"
    )
    if abs(largest.seconds) > MAX_CLOCK_OFFSET_SECONDS:
        return Finding("clocks", "warn", text, "synchronise the clocks (NTP): leases, logs and stores compare times")
    return Finding("clocks", "ok", f"largest difference: {text}")


def check_sums(wrong: Sequence[int | None], reports: Sequence[Mapping[str, Any]], transport: str) -> Finding:
    """Judge the sums of random integers.

    Args:
        wrong: Number of wrong elements by rank; ``None`` for a rank that did not answer.
        reports: Report by rank.
        transport: What carried the messages.
    """
    silent = [report for report, count in zip(reports, wrong, strict=True) if count is None]
    failed = [report for report, count in zip(reports, wrong, strict=True) if count]
    if silent:
        return Finding("all-reduce", "fail", f"no result from {ranks_by_host(silent)}", "see the output of these ranks")
    if failed:
        text = f"wrong sums of integers on {ranks_by_host(failed)} ({transport})"
        remedy = "repeat with fewer machines to find the faulty one; check its memory, devices and network adapter"
        return Finding("all-reduce", "fail", text, remedy)
    return Finding("all-reduce", "ok", f"sums of random integers are exact on {len(reports)} ranks ({transport})")


def check_rates(seconds: Mapping[int, float], world_size: int) -> Iterator[Finding]:
    """Judge latency and bandwidth.

    Args:
        seconds: Time of the slowest rank by size in bytes.
        world_size: Number of ranks.
    """
    yield Finding("latency", "ok", f"{seconds[LATENCY_BYTES] * 1e6:,.0f} us for an all-reduce of {LATENCY_BYTES} bytes")
    rates = {
        size: bus_bytes_per_second(size, time, world_size) for size, time in seconds.items() if size != LATENCY_BYTES
    }
    text = ", ".join(f"{_size(size)}: {rate / 1e9:,.2f} GB/s" for size, rate in rates.items())
    if rates[max(rates)] < MIN_BUS_BYTES_PER_SECOND:
        yield Finding("bus bandwidth", "warn", f"{text}: slower than Gigabit Ethernet", _NETWORK)
    else:
        yield Finding("bus bandwidth", "ok", text)


def check_pairs(seconds: Mapping[tuple[int, int], float], reports: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Judge the exchanges of neighbouring ranks; nothing for a single pair.

    Args:
        seconds: Time in which a pair exchanges ``PAIR_BYTES`` in both directions.
        reports: Report by rank.
    """
    if len(seconds) < 2:
        return
    (one, other), slowest = max(seconds.items(), key=lambda item: item[1])
    median = statistics.median(seconds.values())
    text = (
        f"ranks {one} ({reports[one]['host']}) and {other} ({reports[other]['host']}): "
        f"{PAIR_BYTES / slowest / 1e9:,.2f} GB/s each way, median of {len(seconds)} pairs "
        f"{PAIR_BYTES / median / 1e9:,.2f} GB/s"
    )
    if slowest > SLOW_PAIR_FACTOR * median:
        remedy = "check cable, port and adapter between them, and other programs on both machines"
        yield Finding("slowest pair", "warn", text, remedy)
    else:
        yield Finding("slowest pair", "ok", text)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
