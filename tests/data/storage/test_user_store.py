"""User-defined stores: listing, ranges, retries, changes and errors through the uri alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from vorox.core.errors import ConfigError, DataError
from vorox.data.storage import RetryPolicy, list_files, open_range, open_seekable, retry_budget, scheme_of

STORE = """
CONTENT = {}
FAILURES = []


class Memory:
    def list(self, prefix):
        if FAILURES and FAILURES[0][0] == "list":
            raise FAILURES.pop(0)[1]
        return [(name, len(data), str(hash(data))) for name, data in CONTENT.items() if name.startswith(prefix)]

    def read(self, name, version, start_byte, end_byte):
        if FAILURES and FAILURES[0][0] == "read":
            failure = FAILURES.pop(0)[1]
            if isinstance(failure, Exception):
                raise failure
            return failure
        if str(hash(CONTENT[name])) != version:
            raise FileNotFoundError(name)
        return CONTENT[name][start_byte:end_byte]


def memory():
    return Memory()
"""
POLICY = RetryPolicy(retries_per_unit=3, first_backoff_seconds=0.001, longest_backoff_seconds=0.002)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module of a store that keeps its objects in a dictionary, importable under a name of its own."""
    name = f"memory_store_{random.getrandbits(64):x}"
    (tmp_path / f"{name}.py").write_text(STORE)
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__(name)
    module.CONTENT.update({"b/one.txt": random.randbytes(3_000_000), "b/c/two.txt": b"two", "b/three.md": b"three"})
    with retry_budget(POLICY):
        yield module


def uri(module, rest: str) -> str:
    return f"{module.__name__}:memory://{rest}"


def test_folders_patterns_and_single_objects(memory) -> None:
    def names(location: str, *suffixes: str) -> list[str]:
        return [file.uri.partition("://")[2] for file in list_files(uri(memory, location), suffixes)]

    assert scheme_of(uri(memory, "b")) == f"{memory.__name__}:memory"
    assert names("b", ".txt") == ["b/c/two.txt", "b/one.txt"]
    assert names("b/*.txt") == ["b/one.txt"]
    assert names("b/**/t*") == ["b/c/two.txt", "b/three.md"]
    assert names("b/three.md") == ["b/three.md"]
    with pytest.raises(DataError, match="no-such"):
        names("no-such/*.txt")


def test_ranges_are_exact(memory) -> None:
    (file,) = list_files(uri(memory, "b/one.txt"), ())
    content = memory.CONTENT["b/one.txt"]
    assert file.size_bytes == len(content)
    for start, end in [(0, len(content)), (5, 6), (1_000_000, 2_500_001)]:
        with open_range(file, start, end) as reader:
            assert reader.read() == content[start:end]
    with open_seekable(file) as reader:
        reader.seek(2_000_000)
        assert reader.read(11) == content[2_000_000:2_000_011]


@pytest.mark.parametrize("method", ["list", "read"])
def test_an_os_error_is_retried_within_the_budget(memory, method: str) -> None:
    memory.FAILURES.extend([(method, ConnectionError("reset")), (method, TimeoutError("slow"))])
    (file,) = list_files(uri(memory, "b/c/two.txt"), ())
    with open_range(file) as reader:
        assert reader.read() == b"two"
    assert memory.FAILURES == []


@pytest.mark.parametrize(
    ("failure", "message"),
    [(KeyError("mine"), "KeyError"), (b"", "0 bytes instead of 3"), (b"too much", "8 bytes instead of 3")],
)
def test_a_defect_of_the_store_is_named_and_not_retried(memory, failure: object, message: str) -> None:
    (file,) = list_files(uri(memory, "b/c/two.txt"), ())
    memory.FAILURES.append(("read", failure))
    with pytest.raises(DataError, match=message) as caught, open_range(file) as reader:
        reader.read()
    assert caught.value.where == uri(memory, "b/c/two.txt")


def test_a_replaced_object_is_refused(memory) -> None:
    (file,) = list_files(uri(memory, "b/c/two.txt"), ())
    memory.CONTENT["b/c/two.txt"] = b"2wo"
    with pytest.raises(DataError, match="changed after it was listed"), open_range(file) as reader:
        reader.read()


def test_a_store_that_cannot_be_imported_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="no_such_module") as caught:
        list_files("no_such_module:store://b/*.txt", ())
    assert caught.value.where == "data.sources.*.paths"


def test_credentials_in_the_uri_are_refused() -> None:
    with pytest.raises(ConfigError, match="credentials"):
        scheme_of("mine:store://me:hunter2hunter2@b/a.txt")
