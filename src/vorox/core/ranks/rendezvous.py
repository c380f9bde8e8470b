"""Rendezvous: wait until every rank of a run has started, before the engine connects them.

The frameworks abort or block if a rank is missing, without its number. Here rank 0 listens at the address that the
framework uses afterwards, and every other rank sends one line of JSON: its rank, the world size and a value. Rank 0
answers all of them with one decision, or with the ranks that are missing. Both sides close, and the port is free.
Every line is sealed with the secret of the run (``core/ranks/rank_secret.py``); others are ignored.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from vorox.core.errors import ConfigError, StalledError, VoroxError
from vorox.core.files.atomic import canonical_json
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import Membership
from vorox.core.ranks.rank_secret import seal, unseal

_PROTOCOL = "vorox-rendezvous/2"
_GREETING, _ANSWER = "rendezvous greeting", "rendezvous answer"
"""Purposes of sealed lines."""
_GREETING_KEYS = {"protocol", "rank", "world_size", "value"}
_MAX_LINE_BYTES = 1 << 24
_GREETING_SECONDS = 5.0
"""Time that a connection has for its line, so that another program on the network cannot block the start."""
_RETRY_SECONDS = 0.1
_MAX_GREETING = 4096
"""Connections that may be sending their line at the same time; a rank that is dropped dials again."""


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
            greetings = stack.enter_context(_Greetings(self._listen()))
            rejected: socket.socket | None = None
            try:
                while len(values) < self.world_size:
                    found = greetings.next(ends_at)
                    if found is None:
                        if allow_missing:
                            break
                        raise self._missing(sorted({*range(self.world_size)} - values.keys()))
                    rejected, greeting = found
                    stack.enter_context(rejected)
                    rank = self._check(greeting, connections)
                    values[rank], connections[rank], rejected = greeting["value"], rejected, None
            except VoroxError as error:
                parts = [type(error).__name__, error.what, error.where, error.hint]
                _answer([*connections.values(), rejected], {"error": parts})
                raise
            decision = decide([values.get(rank) for rank in range(self.world_size)])
            _answer(connections.values(), {"decision": decision})
            return decision

    def _join(self, value: Any, ends_at: float) -> Any:
        greeting = {"protocol": _PROTOCOL, "rank": self.rank, "world_size": self.world_size, "value": value}
        while time.monotonic() < ends_at:
            try:
                with socket.create_connection((self.host, self.port), ends_at - time.monotonic()) as connection:
                    connection.sendall(seal(canonical_json(greeting), _GREETING) + b"\n")
                    found = _receive_answer(connection, ends_at + _GREETING_SECONDS)
            except OSError:
                found = None
            if found is not None and "error" in found:
                kind, what, where, hint = found["error"]
                raise (StalledError if kind == StalledError.__name__ else ConfigError)(what, where=where, hint=hint)
            if found is not None:
                return found["decision"]
            time.sleep(_RETRY_SECONDS)  # rank 0 does not listen yet, or another program does
        raise self._missing([0])

    def _listen(self) -> socket.socket:
        try:
            return listen(self.host, self.port, backlog=self.world_size)
        except OSError as error:
            raise ConfigError(
                f"Rank 0 cannot listen on port {self.port}: {error.strerror or error}", where=self._address,
                hint="choose a free port by MASTER_PORT or VOROX_COORDINATOR=HOST:PORT",
            ) from error  # fmt: skip

    def _check(self, greeting: dict[str, Any], connections: Mapping[int, socket.socket]) -> int:
        """Return the rank of a greeting; a rank may start again if its first process has ended."""
        rank, world_size = greeting["rank"], greeting["world_size"]
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


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback interface, so that no other machine takes part."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def loopback_interface() -> str:
    """Return the name of the loopback interface of this machine."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Listen at the address of rank 0: on loopback if that is the address, else on all interfaces.

    A machine may know itself under another address than the others do (a container, a load balancer), so the address
    itself cannot be bound everywhere.
    """
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server(
            ("::1" if family == socket.AF_INET6 else "127.0.0.1", port), family=family, backlog=backlog
        )
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


class _Greetings:
    """Receives greetings on a listening socket, from any number of connections at once.

    Every connection has ``_GREETING_SECONDS`` in all, so that a slow or silent one delays no other. What is not sealed
    with the secret of the run is closed without an answer.
    """

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, tuple[bytearray, float]] = {}

    def __enter__(self) -> _Greetings:
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._received:
            connection.close()
        self._selector.close()
        self._server.close()

    def next(self, ends_at: float) -> tuple[socket.socket, dict[str, Any]] | None:
        """Return the next connection with a valid greeting; ``None`` after the time limit."""
        while (now := time.monotonic()) < ends_at:
            next_end = min((end for _, end in self._received.values()), default=ends_at)
            for key, _ in self._selector.select(max(0.0, min(ends_at, next_end) - now)):
                connection = cast("socket.socket", key.fileobj)
                if connection is self._server:
                    self._accept()
                elif (greeting := self._read(connection)) is not None:
                    return connection, greeting
            for connection in [one for one, (_, end) in self._received.items() if end <= time.monotonic()]:
                self._forget(connection)
                connection.close()
        return None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if len(self._received) >= _MAX_GREETING:  # a flood: the oldest gives way
                oldest = next(iter(self._received))
                self._forget(oldest)
                oldest.close()
            self._received[connection] = bytearray(), time.monotonic() + _GREETING_SECONDS
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> dict[str, Any] | None:
        """Read what has arrived; return the greeting when it is complete and valid."""
        buffer, _ = self._received[connection]
        try:
            part = connection.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        buffer += part
        if part and not part.endswith(b"\n") and len(buffer) <= _MAX_LINE_BYTES:
            return None
        self._forget(connection)
        greeting = _parsed(bytes(buffer), _GREETING)
        if greeting is None or not _is_greeting(greeting):
            connection.close()  # another program
            return None
        connection.settimeout(_GREETING_SECONDS)
        return greeting

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._received[connection]


def _is_greeting(found: dict[str, Any]) -> bool:
    is_complete = found.get("protocol") == _PROTOCOL and found.keys() >= _GREETING_KEYS
    return is_complete and all(type(found[name]) is int for name in ("rank", "world_size"))


def _parsed(line: bytes, purpose: str) -> dict[str, Any] | None:
    """Return the message of a sealed line; ``None`` if it is none."""
    message = unseal(line.removesuffix(b"\n"), purpose)
    if message is None:
        return None
    try:
        found: Any = json.loads(message)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _receive_answer(connection: socket.socket, ends_at: float) -> dict[str, Any] | None:
    """Return the answer of rank 0; ``None`` if the connection closes, or sends anything else."""
    buffer = bytearray()
    while not buffer.endswith(b"\n"):
        connection.settimeout(max(0.001, ends_at - time.monotonic()))
        part = connection.recv(1 << 16)
        buffer += part
        if not part or len(buffer) > _MAX_LINE_BYTES:
            return None
    found = _parsed(bytes(buffer), _ANSWER)
    return found if found is not None and ("error" in found or "decision" in found) else None


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
            connection.sendall(seal(canonical_json(answer), _ANSWER) + b"\n")
