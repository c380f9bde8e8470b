"""What processes tell each other: the same decision everywhere, errors too, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vorox.core.distributed_context import DistributedContext, Membership, membership
from vorox.core.errors import ConfigError, DataError, VoroxError


class Store:
    """A channel in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values.setdefault(key, value)
            self._changed.notify_all()

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, timeout_seconds)
            return self.values.get(key)

    def remove(self, key: str) -> None:
        with self._changed:
            for known in [known for known in self.values if known == key or known.startswith(f"{key}/")]:
                del self.values[known]


def together(count: int, program: Callable[[DistributedContext], Any]) -> tuple[list[Any], Store]:
    """What every process of a run gets from one program; an error is a result."""
    store = Store()

    def one(index: int) -> Any:
        dist = DistributedContext(index, count, store)
        try:
            with dist.propagating_failure():
                return program(dist)
        except VoroxError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count))), store


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_main_process_decides_upon_what_all_say(count: int) -> None:
    def program(dist: DistributedContext) -> Any:
        first = dist.agree("sum", dist.process_index + 1, sum)
        second = dist.agree("sum", first * dist.process_index, max)
        dist.barrier("end")
        return first, second, dist.broadcast("name", f"from {dist.process_index}")

    total = count * (count + 1) // 2
    results, store = together(count, program)
    assert results == [(total, total * (count - 1), "from 0")] * count
    assert not any("/sum/1" in key for key in store.values), "what all have seen is forgotten"


def test_an_error_of_one_is_the_error_of_all() -> None:
    def program(dist: DistributedContext) -> Any:
        if dist.process_index == 2:
            raise DataError("the disk is gone", where="here", hint="bring it back")
        return dist.agree("sum", 1, sum)

    results, _ = together(3, program)
    assert [type(found) for found in results] == [DataError] * 3
    assert results[0].what == results[1].what == "rank 2: the disk is gone"
    assert (results[0].where, results[0].hint, results[0].exit_code) == ("here", "bring it back", 4)


def test_an_error_of_the_decision_too() -> None:
    def refuse(values: list[int]) -> int:
        raise ConfigError(f"not with {values}")

    results, _ = together(2, lambda dist: dist.agree("sum", dist.process_index, refuse))
    assert [str(found) for found in results] == ["not with [0, 1]", "rank 0: not with [0, 1]"]


def test_a_bug_of_one_is_not_waited_for() -> None:
    def program(dist: DistributedContext) -> Any:
        if dist.is_main:
            raise AssertionError("a bug")
        return dist.broadcast("anything")

    with pytest.raises(AssertionError, match="a bug"):
        together(2, program)


def test_who_one_is_comes_from_the_environment() -> None:
    place = {"VOROX_COORDINATOR": "node7:1234", "VOROX_PROCESS_COUNT": "4", "VOROX_PROCESS_INDEX": "3"}
    assert membership(place) == Membership("node7:1234", 4, 3)
    assert membership({}) is None
    assert membership({**place, "VOROX_PROCESS_COUNT": "1", "VOROX_PROCESS_INDEX": "0"}) is None
    assert membership({"VOROX_COORDINATOR": "auto"}) == Membership("auto")


@pytest.mark.parametrize(
    "change",
    [
        {"VOROX_PROCESS_INDEX": "4"}, {"VOROX_PROCESS_INDEX": ""}, {"VOROX_PROCESS_COUNT": "0"},
        {"VOROX_PROCESS_COUNT": "two"}, {"VOROX_COORDINATOR": "node7"}, {"VOROX_COORDINATOR": ":80"},
        {"VOROX_COORDINATOR": "node7:70000"}, {"VOROX_PROCESS_INDEX": "-1"},
    ],
)  # fmt: skip
def test_half_an_environment_is_refused(change: dict[str, str]) -> None:
    place = {"VOROX_COORDINATOR": "node7:1234", "VOROX_PROCESS_COUNT": "4", "VOROX_PROCESS_INDEX": "3"}
    with pytest.raises(ConfigError, match="give no valid rank") as refused:
        membership({**place, **change})
    assert refused.value.exit_code == 2
