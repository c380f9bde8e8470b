"""Who this process is among the processes of a run, and what they tell each other on the host.

A run is one process by default. Several of them are told who they are by the environment (``Membership``); a backend
connects them (``backends.Backend.connect``) and lends its key-value store as the channel. What passes here is small and
JSON: decisions, names, digests. Arrays go between devices and are the engine's business.

Every process takes part in every exchange of a topic, in the same order; different topics may be used by different
threads. A process that fails says so, and whoever waits for it raises the same error.
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
"""Value of ``VOROX_COORDINATOR`` under which the backend asks the cluster (SLURM, Open MPI, Kubernetes, TPU pods)."""
_FAILED = "vorox/failed"
_SLICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Membership:
    """What the environment says of the processes of a run.

    Attributes:
        coordinator: ``host:port`` where the first process listens; ``auto`` lets the backend ask the cluster.
        process_count: All processes; ``None`` under ``auto``.
        process_index: From 0; ``None`` under ``auto``.
    """

    coordinator: str
    process_count: int | None = None
    process_index: int | None = None


def membership(environment: Mapping[str, str] | None = None) -> Membership | None:
    """The membership that the environment describes; ``None`` for a run of one process.

    Raises:
        ConfigError: The variables contradict each other.
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
        said = ", ".join(f"{name}={found.get(name, '(not set)')}" for name in (COORDINATOR, COUNT, INDEX))
        raise ConfigError(
            f"the environment describes no process of a run: {said}", where=COORDINATOR,
            hint=f"{COORDINATOR}=HOST:PORT, {COUNT}=N and {INDEX}=0..N-1, or {COORDINATOR}={FOUND_BY_BACKEND}",
        )  # fmt: skip
    return Membership(coordinator, count, index) if count > 1 else None


class Channel(Protocol):
    """A store that all processes of a run see: a key is written once."""

    def put(self, key: str, value: bytes) -> None:
        """Write a key; a second writer of the same key is ignored."""
        ...

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        """Wait for a key; ``None`` if nobody has written it by then."""
        ...

    def remove(self, key: str) -> None:
        """Forget a key and all keys below it (``key/...``)."""
        ...


@dataclass(slots=True)
class DistributedContext:
    """Identity of this process in a run, and its talk with the others. The default is one process alone.

    Attributes:
        process_index: From 0.
        process_count: All processes of the run.
        channel: What they share; needed by more than one.
    """

    process_index: int = 0
    process_count: int = 1
    channel: Channel | None = None
    _turns: Counter[str] = field(default_factory=Counter[str], init=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this process decides, writes files and prints."""
        return self.process_index == 0

    def broadcast(self, topic: str, value: Any = None) -> Any:
        """What the main process gives, in every process.

        Args:
            topic: What it is about; its exchanges are numbered.
            value: Plain JSON; counts in the main process only.
        """
        if self.process_count == 1:
            return value
        key = self._next(topic)
        if self.is_main:
            self._channel.put(key, canonical_json({"value": value}))
            return value
        return self._wait(key)["value"]

    def agree(self, topic: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What the main process decides upon the values of all, in every process.

        Args:
            topic: What it is about; its exchanges are numbered.
            value: Plain JSON that this process contributes.
            decide: Called in the main process with the contributions by process index; gives plain JSON.
        """
        if self.process_count == 1:
            return decide([value])
        key = self._next(topic)
        if not self.is_main:
            self._channel.put(f"{key}/{self.process_index}", canonical_json({"value": value}))
            return self._wait(f"{key}/decision")["value"]
        others = [self._wait(f"{key}/{index}")["value"] for index in range(1, self.process_count)]
        self._channel.remove(f"vorox/{topic}/{self._turns[topic] - 1}")  # all have seen it, or they were not here
        with self.failing_together():
            decision = decide([value, *others])
        self._channel.put(f"{key}/decision", canonical_json({"value": decision}))
        return decision

    def barrier(self, topic: str) -> None:
        """Wait until every process has come here."""
        self.agree(topic, None, lambda _: None)

    def decide(self, topic: str, decision: Callable[[], Any]) -> Any:
        """What the main process decides, in every process; if it fails, it fails in all of them."""
        if not self.is_main:
            return self.broadcast(topic)
        with self.failing_together():
            return self.broadcast(topic, decision())

    @contextlib.contextmanager
    def failing_together(self) -> Generator[None]:
        """While inside, an error of this process is told to those who wait for it, or will."""
        try:
            yield
        except BaseException as error:
            if self.process_count > 1:
                with contextlib.suppress(Exception):  # the error at hand matters more
                    self._channel.put(_FAILED, canonical_json(self._report(error)))
            raise

    @property
    def _channel(self) -> Channel:
        assert self.channel is not None, "several processes need a channel"
        return self.channel

    def _next(self, topic: str) -> str:
        """The key of the next exchange of a topic."""
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
    what = f"process {report['process']}: {report['what']}"
    return kind(what, where=report["where"], hint=report["hint"], saved=report["saved"])
