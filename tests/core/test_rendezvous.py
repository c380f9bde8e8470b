"""The rendezvous of ranks: a decision upon all values, missing ranks by number, and a port that is free afterwards."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vorox.core.distributed_context import Membership
from vorox.core.errors import ConfigError, StalledError, VoroxError
from vorox.core.rendezvous import Rendezvous


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls that run at the same time; an error is a result."""

    def one(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except VoroxError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def rank(port: int, rank: int, size: int, seconds: float = 20.0) -> Rendezvous:
    return Rendezvous("127.0.0.1", port, rank, size, seconds)


def dial(port: int) -> socket.socket:
    """A connection to rank 0, once it listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5.0)
        except ConnectionRefusedError:
            time.sleep(0.02)


def test_the_address_is_that_of_the_framework() -> None:
    assert Rendezvous.of(Membership("node7:1234", 3, 4), 9.0) == Rendezvous("node7", 1234, 3, 4, 9.0)
    agent = Membership("[::1]:1234", 3, 4, agent_store=True)
    assert Rendezvous.of(agent, 9.0) == Rendezvous("::1", 1235, 3, 4, 9.0)


@pytest.mark.parametrize("size", [2, 5])
def test_all_ranks_get_the_decision_of_rank_0_whenever_they_come(size: int) -> None:
    port = free_port()

    def call(number: int) -> Any:
        time.sleep(random.random() * 0.5)
        return rank(port, number, size).agree({"value": number * 10}, lambda found: [one["value"] for one in found])

    results = together([lambda number=number: call(number) for number in range(size)])
    assert results == [[number * 10 for number in range(size)]] * size
    with socket.create_server(("127.0.0.1", port)):
        pass  # the framework can bind the port


def test_missing_ranks_are_named_on_every_rank() -> None:
    port = free_port()
    started = time.monotonic()
    results = together([lambda number=number: rank(port, number, 5, 1.0).agree(None, len) for number in (0, 2)])
    assert time.monotonic() - started < 6.0
    for error in results:
        assert isinstance(error, StalledError)
        assert error.what == "Ranks 1, 3, 4 of 5 did not start within 1 second"
        assert (error.where, error.exit_code) == (f"127.0.0.1:{port}", 6)


def test_a_missing_rank_0_is_named() -> None:
    with pytest.raises(StalledError, match="Rank 0 of 2 did not start within 1 second"):
        rank(free_port(), 1, 2, 1.0).agree(None, len)


def test_world_sizes_must_be_equal() -> None:
    port = free_port()
    results = together([lambda: rank(port, 0, 2).agree(None, len), lambda: rank(port, 1, 3).agree(None, len)])
    assert [error.what for error in results] == ["Rank 1 has world size 3, rank 0 has 2"] * 2
    assert [error.where for error in results] == ["WORLD_SIZE"] * 2


def test_two_processes_with_one_rank_are_refused() -> None:
    port = free_port()
    results = together([lambda number=number: rank(port, number, 3).agree(None, len) for number in (0, 1, 1)])
    assert {type(error) for error in results} == {ConfigError}
    assert {error.what for error in results} == {"Two processes have rank 1"}


def test_a_rank_that_ends_and_starts_again_takes_part() -> None:
    """A cluster restarts a process that dies before all others have come."""
    port, restarted = free_port(), threading.Event()

    def restart() -> Any:
        with dial(port) as first:
            greeting = {"protocol": "vorox-rendezvous/1", "rank": 1, "world_size": 3, "value": "old"}
            first.sendall(json.dumps(greeting).encode() + b"\n")
            time.sleep(0.2)
        restarted.set()
        return rank(port, 1, 3).agree("new", list)

    def late() -> Any:
        assert restarted.wait(10)
        time.sleep(1.0)
        return rank(port, 2, 3).agree("late", list)

    results = together([lambda: rank(port, 0, 3).agree("main", list), restart, late])
    assert results == [["main", "new", "late"]] * 3


def test_other_programs_on_the_network_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vorox.core.rendezvous._GREETING_SECONDS", 0.2)
    port, done = free_port(), threading.Event()
    silent: list[socket.socket] = []

    def disturb() -> None:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b""):
            with dial(port) as connection:
                connection.sendall(noise)
        silent.append(dial(port))
        done.set()

    def join() -> Any:
        assert done.wait(10)
        return rank(port, 1, 2).agree(1, sum)

    results = together([lambda: rank(port, 0, 2).agree(1, sum), disturb, join])
    assert results == [2, None, 2]
    silent[0].close()


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(ConfigError, match=f"Rank 0 cannot listen on port {port}: Address already in use"):
            rank(port, 0, 2).agree(None, len)


def test_missing_ranks_can_be_part_of_the_decision() -> None:
    port = free_port()
    calls = [
        lambda number=number: rank(port, number, 4, 0.5).agree(number * 10, list, allow_missing=True)
        for number in (0, 2)
    ]
    assert together(calls) == [[0, None, 20, None]] * 2
