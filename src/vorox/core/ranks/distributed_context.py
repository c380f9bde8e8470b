"""This process's rank in a run, and host-side communication with the other ranks.

A run has one process by default. Otherwise the environment gives the rank (``Membership``), and a backend connects the
processes (``backends.Backend.connect``) and provides its key-value store as the channel. Messages are small JSON
values: decisions, names, digests. Arrays are exchanged between devices by the engine.

Every rank takes part in every collective of a topic, in the same order; different threads may use different topics. A
rank that fails publishes its error, and ranks that wait for it raise the same error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vorox.core import errors
from vorox.core.errors import ConfigError, LostRankError, VoroxError
from vorox.core.files.atomic import canonical_json
from vorox.core.ranks.rank_liveness import HAS_LOST_RANK, Liveness
from vorox.core.ranks.rank_secret import SECRET, seal, unseal

COORDINATOR, COUNT, INDEX = "VOROX_COORDINATOR", "VOROX_PROCESS_COUNT", "VOROX_PROCESS_INDEX"
NODE_COUNT, NODE_INDEX = "VOROX_NODE_COUNT", "VOROX_NODE_INDEX"
RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
FOUND_BY_BACKEND = "auto"
"""Value of ``VOROX_COORDINATOR`` for which the backend queries the cluster (SLURM, Open MPI, Kubernetes, TPU pods)."""
_VOROX, _TORCHRUN = (INDEX, COUNT), (RANK, WORLD_SIZE)
_LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "remote process exited")
"""Texts of gloo and NCCL for a rank that has ended."""
_SLICE_SECONDS, _POLL_SECONDS = 1.0, 0.1
FAN_IN = 8
"""Ranks that a rank reads in ``DistributedContext.reduce``."""
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Membership:
    """Rank and world size, from the environment.

    Attributes:
        coordinator: ``host:port`` of rank 0; ``auto`` lets the backend query the cluster.
        rank: Rank, from 0; ``None`` under ``auto``.
        world_size: Number of ranks; ``None`` under ``auto``.
        local_rank: Rank among the processes of this machine; 0 if the environment does not give it, ``None`` under
            ``auto``.
        local_world_size: Number of ranks on this machine; 1 if the environment does not give it.
        agent_store: Whether torchrun's agent serves its ``TCPStore`` at ``coordinator``: ranks connect to it, and none
            may bind the port. Restarts share the store, so keys need ``TORCHELASTIC_RESTART_COUNT`` as a prefix.
    """

    coordinator: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    agent_store: bool = False

    @property
    def free_address(self) -> str:
        """``host:port`` that rank 0 may bind: ``coordinator``, or the next port if torchrun's agent has bound it."""
        if not self.agent_store:
            return self.coordinator
        host, _, port = self.coordinator.rpartition(":")
        return f"{host}:{int(port) + 1}"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a run whose launchers, one per machine, start the same number of ranks each.

    Attributes:
        host: Host of rank 0.
        port: Port that rank 0 listens on.
        index: Number of this machine, from 0.
        count: Number of machines.
    """

    host: str
    port: int
    index: int
    count: int


def node_membership(environment: Mapping[str, str]) -> Node | None:
    """Return the machine that the environment describes; ``None`` for a run on one machine.

    Raises:
        ConfigError: The variables are incomplete or inconsistent.
    """
    if not environment.get(NODE_COUNT) and not environment.get(NODE_INDEX):
        return None
    count = _number(environment, NODE_COUNT, 1, None)
    index = _number(environment, NODE_INDEX, 0, count - 1)
    if count == 1:
        return None
    coordinator = environment.get(COORDINATOR, "")
    _check_address(coordinator)
    host, _, port = coordinator.rpartition(":")
    return Node(host.strip("[]"), int(port), index, count)


def membership(environment: Mapping[str, str] | None = None) -> Membership | None:
    """Return the membership that the environment describes; ``None`` for a run of one process.

    ``VOROX_COORDINATOR`` with ``VOROX_PROCESS_INDEX`` and ``VOROX_PROCESS_COUNT`` has precedence; without it, the
    variables of torchrun apply. If only ``VOROX_COORDINATOR`` is set, torchrun's variables give the rank.

    Raises:
        ConfigError: The variables are incomplete or inconsistent.
    """
    found = os.environ if environment is None else environment
    coordinator = found.get(COORDINATOR, "")
    if coordinator == FOUND_BY_BACKEND:
        return Membership(coordinator)
    of_vorox, of_torchrun = (any(found.get(name) for name in names) for names in (_VOROX, _TORCHRUN))
    if not coordinator and not of_vorox and not of_torchrun:
        return None
    if of_vorox or coordinator:
        _check_address(coordinator)
    names = _TORCHRUN if of_torchrun and not of_vorox else _VOROX
    world_size = _number(found, names[1], 1, None)
    rank = _number(found, names[0], 0, world_size - 1)
    if world_size == 1:
        return None
    local_rank, local_world_size = _local_numbers(found, rank, world_size)
    if coordinator:
        return Membership(coordinator, rank, world_size, local_rank, local_world_size)
    host, agent_store = found.get(MASTER_ADDR, ""), found.get(AGENT_STORE) == "True"
    if not host:
        raise _invalid(found, MASTER_ADDR, "the address of rank 0")
    port = _number(found, MASTER_PORT, 1, _MAX_PORT - agent_store)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return Membership(f"{host}:{port}", rank, world_size, local_rank, local_world_size, agent_store)


def _local_numbers(found: Mapping[str, str], rank: int, world_size: int) -> tuple[int, int]:
    if not found.get(LOCAL_RANK) and not found.get(LOCAL_WORLD_SIZE):
        return 0, 1
    local_world_size = _number(found, LOCAL_WORLD_SIZE, 1, world_size)
    return _number(found, LOCAL_RANK, 0, min(rank, local_world_size - 1)), local_world_size


def _number(found: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = found.get(name, "")
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    raise _invalid(found, name, f"a number of at least {least}" if most is None else f"a number from {least} to {most}")


def _check_address(coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise _invalid({COORDINATOR: coordinator}, COORDINATOR, f"HOST:PORT of rank 0, or {FOUND_BY_BACKEND}")


def _invalid(found: Mapping[str, str], name: str, wanted: str) -> ConfigError:
    text = found.get(name, "")
    return ConfigError(
        f"Environment variable {name} is {text if text else 'not set'}; it must be {wanted}", where=name,
        hint=f"start the ranks with `vorox train --nproc N` or torchrun, or set {COORDINATOR}=HOST:PORT, {COUNT}=N and "
        f"{INDEX}=0..N-1; a single process needs none of them",
    )  # fmt: skip


class AbandonedError(Exception):
    """This rank no longer takes part in a collective, because it ends."""


class Channel(Protocol):
    """A key-value store shared by all ranks. A key is either put once or replaced, and removed only after all reads."""

    def put(self, key: str, value: bytes) -> None:
        """Write a key that is written once."""
        ...

    def replace(self, key: str, value: bytes) -> None:
        """Write a key over its last value, in one step: who reads it meanwhile gets one of the two."""
        ...

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        """Wait for a key; ``None`` after the timeout."""
        ...

    def get_all(self, folder: str, names: Sequence[str], timeout_seconds: float) -> list[bytes] | None:
        """Wait for the keys ``folder/name``, and read them together; ``None`` after the timeout."""
        ...

    def remove(self, key: str) -> None:
        """Remove a key."""
        ...


@dataclass(frozen=True, slots=True)
class SealedChannel:
    """A channel whose values only ranks of this run can write, and whose keys others cannot guess.

    Raises:
        ConfigError: From ``get`` and ``get_all``: a value was not written by a rank with this run's secret.
    """

    inner: Channel

    def put(self, key: str, value: bytes) -> None:
        self.inner.put(self._place(key), seal(value, key))

    def replace(self, key: str, value: bytes) -> None:
        self.inner.replace(self._place(key), seal(value, key))

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        found = self.inner.get(self._place(key), timeout_seconds)
        return None if found is None else self._opened(key, found)

    def get_all(self, folder: str, names: Sequence[str], timeout_seconds: float) -> list[bytes] | None:
        found = self.inner.get_all(self._place(folder), names, timeout_seconds)
        return found and [self._opened(f"{folder}/{name}", value) for name, value in zip(names, found, strict=True)]

    def remove(self, key: str) -> None:
        self.inner.remove(self._place(key))

    @staticmethod
    def _place(key: str) -> str:
        return f"{seal(b'', 'keys')[:16].decode()}/{key}"

    @staticmethod
    def _opened(key: str, sealed: bytes) -> bytes:
        value = unseal(sealed, key)
        if value is None:
            raise ConfigError(
                f"The message {key} was not written by a rank of this run", where=SECRET,
                hint="another program writes to the store of this run: let only its machines reach the port of rank 0",
            )  # fmt: skip
        return value


@dataclass(slots=True)
class DistributedContext:
    """This process's rank and its host-side collectives. The default is a single process.

    Attributes:
        rank: Rank, from 0.
        world_size: Number of ranks.
        channel: The shared store; required if there are several ranks.
        local_rank: Rank among the processes of this machine; 0 if it is unknown.
        run: Number of the run in this process, from 0; part of every key, because a key is written once.
        liveness: Signs of life of the ranks; without them, a rank waits for another without a limit.
    """

    rank: int = 0
    world_size: int = 1
    channel: Channel | None = None
    local_rank: int = 0
    run: int = 0
    liveness: Liveness | None = None
    _turns: Counter[str] = field(default_factory=Counter[str], init=False, repr=False)

    def watched(self, timeout_seconds: float) -> DistributedContext:
        """Return the context with signs of life, given from now on; a rank that is silent for this long is given up."""
        if self.world_size == 1:
            return self
        return replace(self, liveness=Liveness(self._channel, self.rank, timeout_seconds).start())

    def renewed(self) -> DistributedContext:
        """Return a context of the same ranks for another run in this process; every rank renews equally often."""
        return replace(self, run=self.run + 1)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides, writes files and prints."""
        return self.rank == 0

    def broadcast(self, topic: str, value: Any = None) -> Any:
        """Return rank 0's value on every rank.

        Args:
            topic: Name of a sequence of collectives.
            value: Plain JSON; ignored on other ranks.
        """
        if self.world_size == 1:
            return value
        key = self._next(topic)
        if self.is_main:
            self._channel.put(key, canonical_json({"value": value}))
            return value
        folder, _, name = key.rpartition("/")
        return self._wait(folder, [name], [0])[0]["value"]

    def agree(
        self,
        topic: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Gather a value from every rank, reduce them on rank 0, and return the result on every rank.

        Each rank does the same number of operations of the channel for any number of ranks.

        Args:
            topic: Name of a sequence of collectives.
            value: Plain JSON of this rank.
            decide: Called on rank 0 with the values by rank; returns plain JSON.
            is_abandoned: Polled before this rank takes part and while it waits.

        Raises:
            AbandonedError: ``is_abandoned`` returned true.
        """
        if self.world_size == 1:
            return decide([value])
        if is_abandoned():
            raise AbandonedError
        previous, key = self._key(topic), self._next(topic)
        if not self.is_main:
            self._channel.remove(f"{previous}/{self.rank}")  # rank 0 has read it, or there would be no decision
            self._channel.put(f"{key}/{self.rank}", canonical_json({"value": value}))
            return self._wait(key, ["decision"], [0], is_abandoned)[0]["value"]
        ranks = range(1, self.world_size)
        others = [found["value"] for found in self._wait(key, list(map(str, ranks)), ranks, is_abandoned)]
        self._channel.remove(f"{previous}/decision")  # all have read it, or they would not take part in this turn
        with self.propagating_failure():
            decision = decide([value, *others])
        self._channel.put(f"{key}/decision", canonical_json({"value": decision}))
        return decision

    def reduce(
        self,
        topic: str,
        value: Any,
        combine: Callable[[Any, Any], Any],
        decide: Callable[[Any], Any],
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Combine a value of every rank along a tree, decide on rank 0, and return the decision on every rank.

        A rank reads the values of at most ``FAN_IN`` others and writes one, for any number of ranks.

        Args:
            topic: Name of a sequence of collectives.
            value: Plain JSON of this rank.
            combine: Returns the value of two disjoint groups of ranks; the first has the lower lowest rank.
            decide: Called on rank 0 with the value of all ranks; returns plain JSON.
            is_abandoned: Polled before this rank takes part and while it waits.

        Raises:
            AbandonedError: ``is_abandoned`` returned true.
        """
        if self.world_size == 1:
            return decide(value)
        if is_abandoned():
            raise AbandonedError
        previous, key = self._key(topic), self._next(topic)
        children = range(FAN_IN * self.rank + 1, min(FAN_IN * (self.rank + 1) + 1, self.world_size))
        if children:
            with self.propagating_failure():
                found = self._wait(f"{key}/{self.rank}", list(map(str, children)), children, is_abandoned)
                value = functools.reduce(combine, (child["value"] for child in found), value)
        if not self.is_main:
            place = f"{(self.rank - 1) // FAN_IN}/{self.rank}"
            self._channel.remove(f"{previous}/{place}")  # it has been read, or there would be no decision
            self._channel.put(f"{key}/{place}", canonical_json({"value": value}))
            return self._wait(key, ["decision"], [0], is_abandoned)[0]["value"]
        self._channel.remove(f"{previous}/decision")  # all have read it, or they would not take part in this turn
        with self.propagating_failure():
            decision = decide(value)
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

    def flag(self, topic: str) -> Flag:
        """Return a flag that any rank can set. Every rank creates the flags of a topic in the same order."""
        return Flag(self.channel, self._next(topic))

    @contextlib.contextmanager
    def propagating_failure(self) -> Generator[None]:
        """Publish an error of this rank to the ranks that wait for it; explain the loss of another rank.

        Raises:
            VoroxError: A collective of the framework failed because another rank has ended.
        """
        try:
            yield
        except AbandonedError:
            raise
        except BaseException as error:
            if self.world_size > 1:
                with contextlib.suppress(Exception):  # do not hide the original error
                    self._channel.put(self._failed, canonical_json(self.report(error)))
                lost = self.lost_rank(error)
                if lost is not None:
                    raise lost from error
            raise

    def lost_rank(self, error: BaseException) -> LostRankError | None:
        """Return the explanation of a framework's error because another rank has ended; ``None`` for other errors."""
        is_lost = isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)
        if self.world_size == 1 or not is_lost:
            return None
        HAS_LOST_RANK.set()
        return LostRankError(
            f"Rank {self.rank} lost the connection to another rank: {str(error).splitlines()[0]}",
            hint="see the output of the rank that ended first; the same command resumes the run",
        )

    @property
    def _channel(self) -> Channel:
        assert self.channel is not None, "several ranks need a channel"
        return self.channel

    def _next(self, topic: str) -> str:
        """Return the key of the next collective of a topic."""
        self._turns[topic] += 1
        return self._key(topic)

    def _key(self, topic: str) -> str:
        return f"vorox/{self.run}/{topic}/{self._turns[topic]}"

    @property
    def _failed(self) -> str:
        return f"vorox/{self.run}/failed"

    def _wait(
        self, folder: str, names: Sequence[str], ranks: Sequence[int], is_abandoned: Callable[[], bool] = lambda: False
    ) -> list[Any]:
        """Wait for the values of other ranks, until they are there, a rank has failed, or one is lost."""
        timeout_seconds = _SLICE_SECONDS
        while True:
            found = self._channel.get_all(folder, names, timeout_seconds)
            if found is not None:
                return [json.loads(value) for value in found]
            self._raise_failure()
            if is_abandoned():
                raise AbandonedError
            lost = None if self.liveness is None else self.liveness.lost(ranks)
            if lost is not None:
                HAS_LOST_RANK.set()
                self._raise_failure()  # it may have reported why it ended
                raise lost
            if timeout_seconds == 0.0:
                time.sleep(_POLL_SECONDS)
            timeout_seconds = 0.0  # PyTorch's store prints a warning for every wait that takes too long

    def _raise_failure(self) -> None:
        failed = self._channel.get(self._failed, 0.0)
        if failed is not None:
            raise reported_error(json.loads(failed))

    def report(self, error: BaseException) -> dict[str, Any]:
        """Return an error of this rank as plain JSON, for ``reported_error``."""
        known = error if isinstance(error, VoroxError) else VoroxError(f"{type(error).__name__}: {error}")
        parts = {name: getattr(known, name) for name in ("what", "where", "hint", "saved")}
        return {"rank": self.rank, "type": type(known).__name__, **parts}


@dataclass(slots=True)
class Flag:
    """A flag that any rank sets and all ranks see soon afterwards. It is never cleared."""

    channel: Channel | None
    key: str
    _is_set: bool = field(default=False, init=False)

    def set(self) -> None:
        if self.channel is not None and not self._is_set:
            self.channel.put(self.key, canonical_json(True))
        self._is_set = True

    def is_set(self) -> bool:
        if not self._is_set and self.channel is not None:
            self._is_set = self.channel.get(self.key, 0.0) is not None
        return self._is_set


def reported_error(report: Mapping[str, Any]) -> VoroxError:
    """Return the error that another rank reported."""
    kind = getattr(errors, str(report["type"]), VoroxError)
    what = f"rank {report['rank']}: {report['what']}"
    return kind(what, where=report["where"], hint=report["hint"], saved=report["saved"])
