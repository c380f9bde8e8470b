"""This process's rank in a run, and host-side communication with the other ranks.

A run has one process by default. Otherwise the environment gives the rank (``Membership``), and a backend connects the
processes (``backends.Backend.connect``) and provides its key-value store as the channel. Messages are small JSON
values: decisions, names, digests. Arrays are exchanged between devices by the engine.

Every rank takes part in every collective of a topic, in the same order; different threads may use different topics. A
rank that fails publishes its error, and ranks that wait for it raise the same error.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vorox.core import errors
from vorox.core.atomic import canonical_json
from vorox.core.errors import ConfigError, VoroxError

COORDINATOR, COUNT, INDEX = "VOROX_COORDINATOR", "VOROX_PROCESS_COUNT", "VOROX_PROCESS_INDEX"
FOUND_BY_BACKEND = "auto"
"""Value of ``VOROX_COORDINATOR`` for which the backend queries the cluster (SLURM, Open MPI, Kubernetes, TPU pods)."""
_FAILED = "vorox/failed"
_SLICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Membership:
    """Rank and world size, from the environment.

    Attributes:
        coordinator: ``host:port`` of rank 0; ``auto`` lets the backend query the cluster.
        process_count: World size; ``None`` under ``auto``.
        process_index: Rank, from 0; ``None`` under ``auto``.
    """

    coordinator: str
    process_count: int | None = None
    process_index: int | None = None


def membership(environment: Mapping[str, str] | None = None) -> Membership | None:
    """Return the membership that the environment describes; ``None`` for a run of one process.

    Raises:
        ConfigError: The variables are inconsistent.
    """
    found = os.environ if environment is None else environment
    coordinator = found.get(COORDINATOR, "")
    if not coordinator:
        return None
    if coordinator == FOUND_BY_BACKEND:
        return Membership(coordinator)
    host, _, port = coordinator.rpartition(":")
    numbers = [found.get(COUNT, ""), found.get(INDEX, ""), port]
    count, index, port_number = (int(text) if text.isdecimal() else -1 for text in numbers)
    if not host or not 0 < port_number < 1 << 16 or not 0 <= index < count:
        given = ", ".join(f"{name}={found.get(name, '(not set)')}" for name in (COORDINATOR, COUNT, INDEX))
        raise ConfigError(
            f"Environment variables give no valid rank: {given}", where=COORDINATOR,
            hint=f"set {COORDINATOR}=HOST:PORT, {COUNT}=N and {INDEX}=0..N-1, or {COORDINATOR}={FOUND_BY_BACKEND}",
        )  # fmt: skip
    return Membership(coordinator, count, index) if count > 1 else None


class Channel(Protocol):
    """A key-value store shared by all ranks; a key is written once."""

    def put(self, key: str, value: bytes) -> None:
        """Write a key; later writes of the same key are ignored."""
        ...

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        """Wait for a key; ``None`` after the timeout."""
        ...

    def remove(self, key: str) -> None:
        """Remove a key and all keys below it (``key/...``)."""
        ...


@dataclass(slots=True)
class DistributedContext:
    """This process's rank and its host-side collectives. The default is a single process.

    Attributes:
        process_index: Rank, from 0.
        process_count: World size.
        channel: The shared store; required if there are several ranks.
    """

    process_index: int = 0
    process_count: int = 1
    channel: Channel | None = None
    _turns: Counter[str] = field(default_factory=Counter[str], init=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides, writes files and prints."""
        return self.process_index == 0

    def broadcast(self, topic: str, value: Any = None) -> Any:
        """Return rank 0's value on every rank.

        Args:
            topic: Name of a sequence of collectives.
            value: Plain JSON; ignored on other ranks.
        """
        if self.process_count == 1:
            return value
        key = self._next(topic)
        if self.is_main:
            self._channel.put(key, canonical_json({"value": value}))
            return value
        return self._wait(key)["value"]

    def agree(self, topic: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Gather a value from every rank, reduce them on rank 0, and return the result on every rank.

        Args:
            topic: Name of a sequence of collectives.
            value: Plain JSON of this rank.
            decide: Called on rank 0 with the values by rank; returns plain JSON.
        """
        if self.process_count == 1:
            return decide([value])
        key = self._next(topic)
        if not self.is_main:
            self._channel.put(f"{key}/{self.process_index}", canonical_json({"value": value}))
            return self._wait(f"{key}/decision")["value"]
        others = [self._wait(f"{key}/{index}")["value"] for index in range(1, self.process_count)]
        # Every rank has read the previous collective, or it would not take part in this one.
        self._channel.remove(f"vorox/{topic}/{self._turns[topic] - 1}")
        with self.propagating_failure():
            decision = decide([value, *others])
        self._channel.put(f"{key}/decision", canonical_json({"value": decision}))
        return decision

    def barrier(self, topic: str) -> None:
        """Wait for all ranks."""
        self.agree(topic, None, lambda _: None)

    def decide(self, topic: str, decision: Callable[[], Any]) -> Any:
        """Return on every rank what rank 0 decides; its error is raised on every rank."""
        if not self.is_main:
            return self.broadcast(topic)
        with self.propagating_failure():
            return self.broadcast(topic, decision())

    @contextlib.contextmanager
    def propagating_failure(self) -> Generator[None]:
        """Publish an error of this rank to the ranks that wait for it."""
        try:
            yield
        except BaseException as error:
            if self.process_count > 1:
                with contextlib.suppress(Exception):  # do not hide the original error
                    self._channel.put(_FAILED, canonical_json(self._report(error)))
            raise

    @property
    def _channel(self) -> Channel:
        assert self.channel is not None, "several ranks need a channel"
        return self.channel

    def _next(self, topic: str) -> str:
        """Return the key of the next collective of a topic."""
        self._turns[topic] += 1
        return f"vorox/{topic}/{self._turns[topic]}"

    def _wait(self, key: str) -> Any:
        while True:
            found = self._channel.get(key, _SLICE_SECONDS)
            if found is not None:
                return json.loads(found)
            failed = self._channel.get(_FAILED, 0.0)
            if failed is not None:
                raise _failure(json.loads(failed))

    def _report(self, error: BaseException) -> dict[str, Any]:
        known = error if isinstance(error, VoroxError) else VoroxError(f"{type(error).__name__}: {error}")
        parts = {name: getattr(known, name) for name in ("what", "where", "hint", "saved")}
        return {"process": self.process_index, "type": type(known).__name__, **parts}


def _failure(report: Mapping[str, Any]) -> VoroxError:
    kind = getattr(errors, str(report["type"]), VoroxError)
    what = f"rank {report['process']}: {report['what']}"
    return kind(what, where=report["where"], hint=report["hint"], saved=report["saved"])
