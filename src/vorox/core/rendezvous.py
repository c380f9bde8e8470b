"""Rendezvous: wait until every rank of a run has started, before the engine connects them.

The frameworks abort or block if a rank is missing, without its number. Here rank 0 listens at the address that the
framework uses afterwards, and every other rank sends one line of JSON: its rank, the world size and a value. Rank 0
answers all of them with one decision, or with the ranks that are missing. Both sides close, and the port is free.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from vorox.core.atomic import canonical_json
from vorox.core.distributed_context import Membership
from vorox.core.errors import ConfigError, StalledError, VoroxError
from vorox.core.pluralize import pluralize

_PROTOCOL = "vorox-rendezvous/1"
_MAX_LINE_BYTES = 1 << 24
_GREETING_SECONDS = 5.0
"""Time that a connection has for its line, so that another program on the network cannot block the start."""
_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The place and time at which the ranks of a run meet.

    Attributes:
        host: Host of rank 0.
        port: Port that rank 0 listens on.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout_seconds: Time that the ranks wait for each other.
        time_setting: What sets this time, for messages.
    """

    host: str
    port: int
    rank: int
    world_size: int
    timeout_seconds: float
    time_setting: str = "parallel.start_timeout_seconds"

    @classmethod
    def of(cls, member: Membership, timeout_seconds: float) -> Rendezvous:
        """Return the rendezvous of a member whose rank is known."""
        assert member.rank is not None, "the backend finds the ranks"
        assert member.world_size is not None, "the backend finds the ranks"
        host, _, port = member.free_address.rpartition(":")
        return cls(host.strip("[]"), int(port), member.rank, member.world_size, timeout_seconds)

    def agree(self, value: Any, decide: Callable[[list[Any]], Any], *, allow_missing: bool = False) -> Any:
        """Gather a value from every rank, reduce them on rank 0, and return the result on every rank.

        Args:
            value: Plain JSON of this rank.
            decide: Called on rank 0 with the values by rank; returns plain JSON.
            allow_missing: After the time limit, decide with ``None`` as the value of each rank that is missing.

        Raises:
            StalledError: Some ranks did not start in time, or rank 0 did not; the error names them.
            ConfigError: Rank 0 cannot listen at the address, or two processes have the same rank.
        """
        ends_at = time.monotonic() + self.timeout_seconds
        if self.rank > 0:
            return self._join(value, ends_at)
        return self._gather(value, decide, ends_at, allow_missing=allow_missing)

    def _gather(self, value: Any, decide: Callable[[list[Any]], Any], ends_at: float, *, allow_missing: bool) -> Any:
        values, connections = {0: value}, dict[int, socket.socket]()
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(self._listen())
            connection: socket.socket | None = None
            try:
                while len(values) < self.world_size:
                    server.settimeout(max(0.001, ends_at - time.monotonic()))
                    try:
                        connection, _ = server.accept()
                    except TimeoutError:
                        if allow_missing:
                            break
                        raise self._missing(sorted({*range(self.world_size)} - values.keys())) from None
                    stack.enter_context(connection)
                    greeting = _receive(connection, _GREETING_SECONDS)
                    if greeting is None or greeting.get("protocol") != _PROTOCOL:
                        connection.close()  # another program
                        continue
                    rank = self._check(greeting, connections)
                    values[rank], connections[rank] = greeting["value"], connection
            except VoroxError as error:
                parts = [type(error).__name__, error.what, error.where, error.hint]
                _answer([*connections.values(), connection], {"error": parts})
                raise
            decision = decide([values.get(rank) for rank in range(self.world_size)])
            _answer(connections.values(), {"decision": decision})
            return decision

    def _join(self, value: Any, ends_at: float) -> Any:
        greeting = {"protocol": _PROTOCOL, "rank": self.rank, "world_size": self.world_size, "value": value}
        while time.monotonic() < ends_at:
            try:
                with socket.create_connection((self.host, self.port), ends_at - time.monotonic()) as connection:
                    connection.sendall(canonical_json(greeting) + b"\n")
                    found = _receive(connection, max(0.001, ends_at + _GREETING_SECONDS - time.monotonic()))
            except OSError:
                found = None
            if found is not None and "error" in found:
                kind, what, where, hint = found["error"]
                raise (StalledError if kind == StalledError.__name__ else ConfigError)(what, where=where, hint=hint)
            if found is not None:
                return found["decision"]
            time.sleep(_RETRY_SECONDS)  # rank 0 does not listen yet
        raise self._missing([0])

    def _listen(self) -> socket.socket:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", self.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=self.world_size
                )
            return socket.create_server(("", self.port), backlog=self.world_size)
        except OSError as error:
            raise ConfigError(
                f"Rank 0 cannot listen on port {self.port}: {error.strerror or error}", where=self._address,
                hint="choose a free port by MASTER_PORT or VOROX_COORDINATOR=HOST:PORT",
            ) from error  # fmt: skip

    def _check(self, greeting: dict[str, Any], connections: Mapping[int, socket.socket]) -> int:
        """Return the rank of a greeting; a rank may start again if its first process has ended."""
        rank, world_size = int(greeting["rank"]), int(greeting["world_size"])
        if world_size != self.world_size:
            raise ConfigError(
                f"Rank {rank} has world size {world_size}, rank 0 has {self.world_size}", where="WORLD_SIZE",
                hint="start all ranks with the same world size",
            )  # fmt: skip
        if not 0 < rank < world_size or (rank in connections and not _is_closed(connections[rank])):
            raise ConfigError(
                f"Two processes have rank {rank}", where="RANK", hint="give each process a rank of its own"
            )
        return rank

    def _missing(self, ranks: Iterable[int]) -> StalledError:
        listed = ", ".join(map(str, ranks))
        return StalledError(
            f"{'Ranks' if ',' in listed else 'Rank'} {listed} of {self.world_size} did not start within "
            f"{pluralize(round(self.timeout_seconds), 'second')}",
            where=self._address, hint="start them, or see their logs; they must reach rank 0 at this address; "
            f"{self.time_setting} sets the time",
        )  # fmt: skip

    @property
    def _address(self) -> str:
        return f"{self.host}:{self.port}"


def _receive(connection: socket.socket, timeout_seconds: float) -> dict[str, Any] | None:
    """Return the line of a connection; ``None`` if it closes, stays silent or sends anything else."""
    connection.settimeout(timeout_seconds)
    try:
        with connection.makefile("rb") as file:
            found: Any = json.loads(file.readline(_MAX_LINE_BYTES))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection on which it sends nothing more."""
    connection.settimeout(0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(_GREETING_SECONDS)


def _answer(connections: Iterable[socket.socket | None], answer: dict[str, Any]) -> None:
    for connection in filter(None, connections):
        with contextlib.suppress(OSError):  # that rank has ended
            connection.sendall(canonical_json(answer) + b"\n")
