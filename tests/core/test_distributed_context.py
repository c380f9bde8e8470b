"""What processes tell each other: the same decision everywhere, errors too, and nothing left behind."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from operator import add
from typing import Any

import pytest

from rank_threads import Store, together
from vorox.core.errors import ConfigError, DataError, LostRankError
from vorox.core.ranks.distributed_context import FAN_IN, DistributedContext, Membership, SealedChannel, membership
from vorox.core.ranks.rank_comparison import compare_ranks


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_main_process_decides_upon_what_all_say(count: int) -> None:
    def program(dist: DistributedContext) -> Any:
        first = dist.agree("sum", dist.rank + 1, sum)
        second = dist.agree("sum", first * dist.rank, max)
        dist.barrier("end")
        return first, second, dist.broadcast("name", f"from {dist.rank}")

    total = count * (count + 1) // 2
    results, store = together(count, program)
    assert results == [(total, total * (count - 1), "from 0")] * count
    assert not any("/sum/1" in key for key in store.values), "what all have seen is forgotten"


def test_a_rank_does_as_many_operations_for_any_number_of_ranks() -> None:
    """Ranks agree in every step: a serial read per rank would slow large runs."""

    def program(dist: DistributedContext) -> None:
        for step in range(50):
            assert dist.agree("step", step, lambda steps: steps[0]) == step

    for count in (2, 4, 8):
        _, store = together(count, program)
        assert len(store.operations) == count
        for counts in store.operations.values():
            assert counts == {"put": 50, "get_all": 50, "remove": 50}, count
        assert len(store.values) == count, "only the last turn is kept"


@pytest.mark.parametrize("count", [1, 2, 9, 10, 64, 80])
def test_a_reduction_combines_every_rank_once_and_the_lowest_first(count: int) -> None:
    def combine(first: list[int], second: list[int]) -> list[int]:
        assert min(first) < min(second)
        return first + second

    def program(dist: DistributedContext) -> Any:
        return [dist.reduce("ranks", [dist.rank], combine, sorted) for _ in range(3)]

    results, store = together(count, program)
    assert results == [[[*range(count)]] * 3] * count
    assert not any("/ranks/1/" in key or "/ranks/2/" in key for key in store.values), "what has been read is removed"


def test_a_reduction_costs_every_rank_the_same_for_any_number_of_ranks() -> None:
    """Rank 0 too: it reads 8 values, where a gather of 64 ranks reads 63."""
    value = "x" * 2732  # the lanes of the batch digest
    for count in (9, 16, 32, 64):
        read = Counter[int]()

        class Counted(Store):
            def get_all(
                self, folder: str, names: Sequence[str], timeout_seconds: float, read: Counter[int] = read
            ) -> list[bytes] | None:
                found = super().get_all(folder, names, timeout_seconds)
                read[threading.get_ident()] += sum(map(len, found or ()))
                return found

        def program(dist: DistributedContext) -> None:
            dist.reduce("digest", value, lambda first, second: first, lambda total: total[:64])

        _, store = together(count, program, Counted())
        assert max(sum(counts.values()) for counts in store.operations.values()) <= 4
        assert max(read.values()) < FAN_IN * (len(value) + 20) + 100


def test_the_failure_of_a_rank_deep_in_the_tree_is_the_error_of_all() -> None:
    def program(dist: DistributedContext) -> Any:
        if dist.rank == 19:
            raise DataError("the disk is gone")
        return dist.reduce("sum", 1, add, lambda total: total)

    results, _ = together(20, program)
    assert {(type(error), error.what.removeprefix("rank 19: ")) for error in results} == {
        (DataError, "the disk is gone")
    }


def test_an_error_of_one_is_the_error_of_all() -> None:
    def program(dist: DistributedContext) -> Any:
        if dist.rank == 2:
            raise DataError("the disk is gone", where="here", hint="bring it back")
        return dist.agree("sum", 1, sum)

    results, _ = together(3, program)
    assert [type(found) for found in results] == [DataError] * 3
    assert results[0].what == results[1].what == "rank 2: the disk is gone"
    assert (results[0].where, results[0].hint, results[0].exit_code) == ("here", "bring it back", 4)


def test_an_error_of_the_decision_too() -> None:
    def refuse(values: list[int]) -> int:
        raise ConfigError(f"not with {values}")

    results, _ = together(2, lambda dist: dist.agree("sum", dist.rank, refuse))
    assert [str(found) for found in results] == ["not with [0, 1]", "rank 0: not with [0, 1]"]


def test_a_lost_rank_is_no_bug_of_this_one() -> None:
    """A collective of gloo reports a rank that was killed by the state of its socket."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:17032: Connection reset by peer\nmore")

    def program(dist: DistributedContext) -> Any:
        raise lost

    results, _ = together(2, program)
    assert {type(error) for error in results} == {LostRankError}
    assert results[1].what.startswith("Rank 1 lost the connection to another rank: [gloo/")
    assert results[1].what.endswith("Connection reset by peer")
    with pytest.raises(RuntimeError, match="Connection reset"), DistributedContext().propagating_failure():
        raise lost


def test_a_bug_of_one_is_not_waited_for() -> None:
    def program(dist: DistributedContext) -> Any:
        if dist.is_main:
            raise AssertionError("a bug")
        return dist.broadcast("anything")

    with pytest.raises(AssertionError, match="a bug"):
        together(2, program)


def test_ranks_that_differ_are_named_with_the_field() -> None:
    facts = [
        {"jax": "0.7.0", "optimizer.lr": 0.01},
        {"jax": "0.7.0", "optimizer.lr": 0.01},
        {"jax": "0.7.1", "optimizer.lr": 0.02, "extra": None},
    ]
    results, _ = together(3, lambda dist: compare_ranks(dist, "start", facts[dist.rank], "start them equally"))
    assert {type(error) for error in results} == {ConfigError}
    assert {error.what for error in results} == {
        "Rank 2 differs from rank 0: jax is 0.7.1, on rank 0 0.7.0; optimizer.lr is 0.02, on rank 0 0.01"
    }
    assert (results[1].where, results[1].hint) == ("jax", "start them equally")
    results, _ = together(2, lambda dist: compare_ranks(dist, "start", {"all": [1, {"equal": True}]}, ""))
    assert results == [None, None]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"a": 1}, {}, "a is missing, on rank 0 1"),
        ({}, {"a": 1}, "a is 1, on rank 0 missing"),
        ({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, {}, "; 2 more differ"),
    ],
)
def test_missing_and_many_fields(first: dict[str, int], second: dict[str, int], text: str) -> None:
    results, _ = together(2, lambda dist: compare_ranks(dist, "start", (first, second)[dist.rank], ""))
    assert [text in error.what for error in results] == [True, True]


VOROX = {"VOROX_COORDINATOR": "node7:1234", "VOROX_PROCESS_COUNT": "4", "VOROX_PROCESS_INDEX": "3"}
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip


def test_the_rank_comes_from_the_environment() -> None:
    assert membership(VOROX) == Membership("node7:1234", 3, 4, local_rank=0, local_world_size=1)
    assert membership({}) is None
    assert membership({**VOROX, "VOROX_PROCESS_COUNT": "1", "VOROX_PROCESS_INDEX": "0"}) is None
    assert membership({"VOROX_COORDINATOR": "auto", **TORCHRUN}) == Membership("auto")


def test_torchrun_gives_the_rank() -> None:
    assert membership(TORCHRUN) == Membership("node0:29500", 5, 8, local_rank=1, local_world_size=4)
    assert membership({**TORCHRUN, "MASTER_ADDR": "::1"}) == Membership("[::1]:29500", 5, 8, 1, 4)
    assert membership({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) is None
    one_per_machine = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL_")}
    assert membership(one_per_machine) == Membership("node0:29500", 5, 8, local_rank=0, local_world_size=1)


def test_our_variables_have_precedence_over_those_of_torchrun() -> None:
    assert membership({**TORCHRUN, **VOROX}) == Membership("node7:1234", 3, 4, local_rank=1, local_world_size=4)
    address = {**TORCHRUN, "VOROX_COORDINATOR": "node7:1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert membership(address) == Membership("node7:1234", 5, 8, local_rank=1, local_world_size=4)


def test_a_port_that_the_agent_of_torchrun_has_bound_is_not_bound_again() -> None:
    served = membership({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    unserved = membership({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert served is not None
    assert unserved is not None
    assert (served.agent_store, served.coordinator, served.free_address) == (True, "node0:29500", "node0:29501")
    assert (unserved.agent_store, unserved.coordinator, unserved.free_address) == (False, "node0:29500", "node0:29500")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("VOROX_PROCESS_INDEX", {**VOROX, "VOROX_PROCESS_INDEX": "4"}),
        ("VOROX_PROCESS_INDEX", {**VOROX, "VOROX_PROCESS_INDEX": ""}),
        ("VOROX_PROCESS_INDEX", {**VOROX, "VOROX_PROCESS_INDEX": "-1"}),
        ("VOROX_PROCESS_COUNT", {**VOROX, "VOROX_PROCESS_COUNT": "0"}),
        ("VOROX_PROCESS_COUNT", {**VOROX, "VOROX_PROCESS_COUNT": "two"}),
        ("VOROX_PROCESS_COUNT", {"VOROX_COORDINATOR": "node7:1234"}),
        ("VOROX_COORDINATOR", {**VOROX, "VOROX_COORDINATOR": ""}),
        ("VOROX_COORDINATOR", {**VOROX, "VOROX_COORDINATOR": "node7"}),
        ("VOROX_COORDINATOR", {**VOROX, "VOROX_COORDINATOR": ":80"}),
        ("VOROX_COORDINATOR", {**VOROX, "VOROX_COORDINATOR": "node7:70000"}),
        ("LOCAL_RANK", {**VOROX, **TORCHRUN, "LOCAL_RANK": "4"}),
        ("RANK", {**TORCHRUN, "RANK": "8"}),
        ("RANK", {**TORCHRUN, "RANK": ""}),
        ("WORLD_SIZE", {**TORCHRUN, "WORLD_SIZE": ""}),
        ("WORLD_SIZE", {**TORCHRUN, "WORLD_SIZE": "0x8"}),
        ("LOCAL_RANK", {**TORCHRUN, "LOCAL_RANK": ""}),
        ("LOCAL_RANK", {**TORCHRUN, "LOCAL_RANK": "4"}),
        ("LOCAL_RANK", {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "1"}),
        ("LOCAL_WORLD_SIZE", {**TORCHRUN, "LOCAL_WORLD_SIZE": ""}),
        ("LOCAL_WORLD_SIZE", {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}),
        ("MASTER_ADDR", {**TORCHRUN, "MASTER_ADDR": ""}),
        ("MASTER_PORT", {**TORCHRUN, "MASTER_PORT": ""}),
        ("MASTER_PORT", {**TORCHRUN, "MASTER_PORT": "65536"}),
        ("MASTER_PORT", {**TORCHRUN, "MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"}),
    ],
)
def test_an_inconsistent_environment_is_refused_with_the_variable(name: str, change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"Environment variable {name} is ") as refused:
        membership(change)
    assert (refused.value.where, refused.value.exit_code) == (name, 2)


class _Store:
    """A channel in memory, which any program may write to."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    replace = put

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        return self.values.get(key)

    def get_all(self, folder: str, names: Sequence[str], timeout_seconds: float) -> list[bytes] | None:
        found = [self.values.get(f"{folder}/{name}") for name in names]
        return None if None in found else [value for value in found if value is not None]

    def remove(self, key: str) -> None:
        self.values.pop(key, None)


def test_a_sealed_channel_carries_what_ranks_of_the_run_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOROX_RANK_SECRET", "drawn")
    store = _Store()
    channel = SealedChannel(store)
    channel.put("step/1/a", b"one")
    channel.put("step/1/b", b"two")
    assert channel.get("step/1/a", 0.0) == b"one"
    assert channel.get_all("step/1", ["a", "b"], 0.0) == [b"one", b"two"]
    assert channel.get_all("step/1", ["a", "c"], 0.0) is None
    assert not any("step" in key.partition("/")[0] for key in store.values), "others cannot guess the keys"
    channel.remove("step/1/a")
    assert channel.get("step/1/a", 0.0) is None


@pytest.mark.parametrize("forgery", ["unsealed", "another secret", "changed", "moved"])
def test_a_value_that_no_rank_wrote_ends_the_run_with_the_reason(forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOROX_RANK_SECRET", "drawn")
    store = _Store()
    channel = SealedChannel(store)
    channel.put("step/1/decision", b"go on")
    channel.put("step/2/decision", b"stop")
    one, two = store.values
    if forgery == "another secret":
        monkeypatch.setenv("VOROX_RANK_SECRET", "guess")
        SealedChannel(other := _Store()).put("step/1/decision", b"stop")
        monkeypatch.setenv("VOROX_RANK_SECRET", "drawn")
        store.values[one] = next(iter(other.values.values()))
    else:
        store.values[one] = {
            "unsealed": b"stop", "changed": store.values[one].replace(b"go on", b"go up"), "moved": store.values[two],
        }[forgery]  # fmt: skip
    for read in (lambda: channel.get("step/1/decision", 0.0), lambda: channel.get_all("step/1", ["decision"], 0.0)):
        with pytest.raises(ConfigError, match="step/1/decision was not written by a rank of this run"):
            read()
