"""The rendezvous of ranks: a decision upon all values, missing ranks by number, and a port that is free afterwards."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vorox.core.errors import ConfigError, StalledError, VoroxError
from vorox.core.ranks.distributed_context import Membership
from vorox.core.ranks.rank_secret import seal
from vorox.core.ranks.rendezvous import Rendezvous, listen


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
            greeting = {"protocol": "vorox-rendezvous/2", "rank": 1, "world_size": 3, "value": "old"}
            first.sendall(seal(json.dumps(greeting).encode(), "rendezvous greeting") + b"\n")
            time.sleep(0.2)
        restarted.set()
        return rank(port, 1, 3).agree("new", list)

    def late() -> Any:
        assert restarted.wait(10)
        time.sleep(1.0)
        return rank(port, 2, 3).agree("late", list)

    results = together([lambda: rank(port, 0, 3).agree("main", list), restart, late])
    assert results == [["main", "new", "late"]] * 3


def greeting(secret: str = "", **changes: Any) -> bytes:
    """The line of rank 1 of 2, with some changes, sealed with a secret."""
    values = {"protocol": "vorox-rendezvous/2", "rank": 1, "world_size": 2, "value": 1000} | changes
    line = json.dumps({name: value for name, value in values.items() if value is not None})
    return seal(line.encode(), "rendezvous greeting", {"VOROX_RANK_SECRET": secret}) + b"\n"


NOISE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a list": b"[1, 2]\n",
    "nothing": b"",
    "unsealed": json.dumps({"protocol": "vorox-rendezvous/2", "rank": 1, "world_size": 2, "value": 9}).encode() + b"\n",
    "an impostor": greeting("guess"),
    "another run": greeting("guess", world_size=7),
    "an answer": seal(b'{"decision": 5}', "rendezvous answer", {"VOROX_RANK_SECRET": "drawn"}) + b"\n",
    "no rank": greeting("drawn", rank=None),
    "no value": greeting("drawn", value=None),
    "a text as rank": greeting("drawn", rank="1"),
    "deep": seal(b"[" * 100_000, "rendezvous greeting", {"VOROX_RANK_SECRET": "drawn"}) + b"\n",
    "not UTF-8": seal(b"\xff\xfe", "rendezvous greeting", {"VOROX_RANK_SECRET": "drawn"}) + b"\n",
}


def test_slow_and_silent_connections_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte every now and then would keep a server busy that reads one connection after the other."""
    port, ended = free_port(), threading.Event()
    dialled = threading.Event()

    def drip() -> None:
        connections = [dial(port) for _ in range(20)]
        dialled.set()
        while not ended.wait(0.05):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
        for connection in connections:
            connection.close()

    def join() -> Any:
        assert dialled.wait(10)
        started = time.monotonic()
        found = rank(port, 1, 2).agree(1, sum)
        ended.set()
        return found if time.monotonic() - started < 4.0 else "late"

    assert together([lambda: rank(port, 0, 2).agree(1, sum), drip, join]) == [2, None, 2]


def test_a_slow_connection_does_not_outlast_the_time_of_the_start() -> None:
    port, ended = free_port(), threading.Event()

    def drip() -> None:
        with dial(port) as connection:
            while not ended.wait(0.1):
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")

    def main() -> Any:
        started = time.monotonic()
        try:
            return rank(port, 0, 2, 1.0).agree(None, len)
        except StalledError as error:
            assert time.monotonic() - started < 3.0
            return error.what
        finally:
            ended.set()

    assert together([main, drip])[0] == "Rank 1 of 2 did not start within 1 second"


def test_a_rank_ignores_an_impostor_in_the_place_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOROX_RANK_SECRET", "drawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])

        def lie() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(
                    seal(b'{"decision": 13}', "rendezvous answer", {"VOROX_RANK_SECRET": "guess"}) + b"\n"
                )
                server.close()

        results = together([lambda: rank(port, 1, 2, 2.0).agree(None, len), lie])
    assert isinstance(results[0], StalledError)


@pytest.mark.parametrize(("host", "expected"), [
    ("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.3.4.5", "127.0.0.1"), ("node7", "::"),
])  # fmt: skip
def test_a_run_on_one_machine_listens_on_loopback_only(host: str, expected: str) -> None:
    with listen(host, 0, backlog=1) as server:
        assert server.getsockname()[0] in {expected, "0.0.0.0" if expected == "::" else expected}


@pytest.mark.parametrize("noise", NOISE)
def test_other_programs_on_the_network_do_not_disturb(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vorox.core.ranks.rendezvous._GREETING_SECONDS", 0.2)
    monkeypatch.setenv("VOROX_RANK_SECRET", "drawn")
    port, done = free_port(), threading.Event()
    silent: list[socket.socket] = []

    def disturb() -> None:
        with dial(port) as connection:
            connection.sendall(NOISE[noise])
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
