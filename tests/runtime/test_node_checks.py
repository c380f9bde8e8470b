"""What doctor --nodes concludes from reports and times, and how it compares clocks."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rank_threads import together
from vorox.core.ranks.distributed_context import Membership
from vorox.runtime import node_checks
from vorox.runtime.collective_timing import bus_bytes_per_second, neighbours
from vorox.runtime.node_exchange import ClockOffset, clock_offsets, gather, publish


def report(rank: int, host: str) -> dict[str, Any]:
    return {"rank": rank, "host": host, "machine": host, "versions": {}, "directories": {}}


def test_missing_ranks_have_the_host_of_their_neighbours() -> None:
    reports = [report(0, "a"), None, report(2, "b"), report(3, "b"), None, None]
    finding = node_checks.check_answers(reports, Membership("a:9", 0, 6, 0, 2), 30)
    assert finding.text == (
        "ranks 1, 4-5 of 6 did not answer within 30 s: rank 1 on a, ranks 4-5 on machine 3 of 3; "
        "answered: rank 0 on a, ranks 2-3 on b"
    )
    assert "a:9 can be reached" in finding.remedy


def test_a_version_that_a_rank_lacks() -> None:
    reports = [report(0, "a") | {"versions": {"torch": "2"}}, report(1, "b")]
    assert node_checks.check_versions(reports).text == "torch is missing (rank 1 on b), on rank 0 2"


@pytest.mark.parametrize("ahead", [-7.5, 0.0, 7.5])
def test_a_clock_offset_is_measured(ahead: float) -> None:
    """Within half a round trip, and the round trips of threads are short."""

    def measure(dist: Any) -> Any:
        return clock_offsets(dist, [1, 2], 20.0, lambda: time.time() + ahead * (dist.rank == 2))

    (found, *others), _ = together(3, measure)
    assert others == [{}, {}]
    assert abs(found[1].seconds) <= found[1].error_seconds + 1e-3 < 1.0
    assert abs(found[2].seconds - ahead) <= found[2].error_seconds + 1e-3 < 1.0


def test_clocks_are_judged() -> None:
    reports = [report(0, "a"), report(1, "b"), report(2, "c")]
    offsets = {1: ClockOffset(0.5, 0.001), 2: ClockOffset(-1.5, 0.001)}
    finding = node_checks.check_clocks(offsets, reports, 2)
    assert finding.status == "warn"
    assert finding.text == "the clock of c is 1.500 s behind that of a (within 0.001 s)"
    assert node_checks.check_clocks({1: offsets[1]}, reports, 1).status == "ok"
    assert node_checks.check_clocks({}, reports, 2).status == "warn", "no answer"


def test_a_silent_rank_has_no_value() -> None:
    def program(dist: Any) -> Any:
        if dist.rank == 1:
            return None
        return gather(dist, "topic", dist.rank * 10, 0.2), publish(dist, "verdict", dist.rank == 0, 0.2)

    (first, _, last), _ = together(3, program)
    assert first == ([0, None, 20], True)
    assert last == ([None] * 3, True), "the value of rank 0"


def test_rates_are_judged() -> None:
    """2 (n - 1) / n x bytes / time: four ranks move 1.5 times the bytes."""
    assert bus_bytes_per_second(1000, 0.5, 4) == 3000.0
    latency, rate = node_checks.check_rates({8: 25e-6, 1 << 20: 1e-3, 1 << 24: 1e-2}, 4)
    assert latency.text == "25 us for an all-reduce of 8 bytes"
    assert (rate.status, rate.text) == ("ok", "1 MiB: 1.57 GB/s, 16 MiB: 2.52 GB/s")
    _, slow = node_checks.check_rates({8: 25e-6, 1 << 24: 0.5}, 2)
    assert slow.status == "warn"
    assert "NCCL_SOCKET_IFNAME" in slow.remedy


def test_the_slowest_pair_is_named() -> None:
    assert neighbours(["a", "a", "b", "b", "c"]) == [(0, 2), (2, 4), (4, 0)], "the first ranks of the machines"
    assert neighbours(["a", "a", "a"]) == [(0, 1), (1, 2), (2, 0)]
    assert neighbours(["a", "b"]) == [(0, 1)]
    reports = [report(rank, host) for rank, host in enumerate("abc")]
    (finding,) = node_checks.check_pairs({(0, 1): 1e-3, (1, 2): 4e-3, (2, 0): 1e-3}, reports)
    assert finding.status == "warn"
    assert finding.text == "ranks 1 (b) and 2 (c): 0.26 GB/s each way, median of 3 pairs 1.05 GB/s"
    (finding,) = node_checks.check_pairs({(0, 1): 1e-3, (1, 2): 1.5e-3, (2, 0): 1e-3}, reports)
    assert finding.status == "ok"
