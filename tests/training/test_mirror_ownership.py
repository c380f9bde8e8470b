"""The fencing token of a mirror's owner, without a store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vorox.data.storage import StoredFile, WriteConflict
from vorox.training.mirror import ownership
from vorox.training.mirror.contents import OWNER_NAME, Contents, MirroredCheckpoint


def stored(uri: str) -> StoredFile:
    return StoredFile(uri, 1, "1", 0)


class Mirror:
    """A mirror with an owner's record and the checkpoints of some fencing tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any] | None, tokens: list[int]) -> None:
        self.record, self.tokens, self.probes = record, tokens, list[str]()
        monkeypatch.setattr(ownership, "list_mirror", lambda uri: self.contents())
        monkeypatch.setattr(ownership, "read_object", lambda file: json.dumps(self.record).encode())
        monkeypatch.setattr(ownership, "remove_object", lambda uri: None)
        monkeypatch.setattr(ownership, "put_bytes", self.put)

    def contents(self) -> Contents:
        others = dict.fromkeys(self.probes, stored("m/run/probe"))
        if self.record is not None:
            others[OWNER_NAME] = stored("m/run/OWNER.json")
        return Contents("m/run", [MirroredCheckpoint(4, token) for token in self.tokens], others)

    def put(self, data: bytes, uri: str, *, mode: Any = "overwrite") -> StoredFile:
        if uri.endswith(OWNER_NAME):
            self.record = json.loads(data)
        else:
            self.probes.append(uri.rpartition("/")[2])
        return stored(uri)


@pytest.mark.parametrize(
    ("claim", "tokens", "expected"),
    [(None, [], 1), (None, [3, 1], 4), (5, [], 6), (5, [7], 8), (7, [5], 8), (True, [2], 3), ("9", [2], 3)],
)
def test_the_token_is_above_all_earlier_ones(
    monkeypatch: pytest.MonkeyPatch, claim: object, tokens: list[int], expected: int
) -> None:
    """Of the record and of the names of checkpoints: either may be all that is left of an owner."""
    record = None if claim is None else {"claim": claim, "released": True, "holder": {}}
    mirror = Mirror(monkeypatch, record, tokens)
    owner, _ = ownership.acquire("m/run", lambda *_: None)
    owner.release(5.0)
    assert owner.fencing_token == expected
    assert mirror.record is not None
    assert (mirror.record["claim"], mirror.record["released"]) == (expected, True)


@pytest.mark.parametrize(("claim", "is_lost"), [(1, False), (2, True), (0, True), (None, True)])
def test_a_conflict_with_a_record_of_another_token_loses_the_mirror(
    monkeypatch: pytest.MonkeyPatch, claim: int | None, is_lost: bool
) -> None:
    mirror = Mirror(monkeypatch, None, [])
    owner, _ = ownership.acquire("m/run", lambda *_: None)
    assert owner.fencing_token == 1
    mirror.record = {"claim": claim}
    tries = list[int]()

    def put(data: bytes, uri: str, *, mode: Any = "overwrite") -> StoredFile:
        tries.append(1)
        if len(tries) == 1:
            raise WriteConflict("it has changed")
        return stored(uri)

    monkeypatch.setattr(ownership, "put_bytes", put)
    owner.confirm()
    assert owner.lost == is_lost
    owner.release(5.0)
