"""Locations: schemes, canonical uris, patterns; nothing here accesses disk or network."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.shelves import WRITABLE
from vorox.core.errors import ConfigError
from vorox.core.schema.train import OBJECT_STORES
from vorox.data.storage import canonical_uri, has_magic, list_files, relative_name, scheme_of
from vorox.data.storage.cloud_clients import CLOUDS
from vorox.data.storage.locations import matches_glob


@pytest.mark.parametrize(
    ("location", "scheme"),
    [
        ("s3://bucket/key", "s3"), ("gs://b", "gs"), ("az://c/x", "az"),
        ("HF://a/b", "hf"), ("https://host/x", "https"),
        ("http://127.0.0.1:80/x", "http"), ("/a/b.txt", None), ("a:b", None), ("stdlib:json", None), ("c:/x", None),
    ],
)  # fmt: skip
def test_schemes(location: str, scheme: str | None) -> None:
    assert scheme_of(location) == scheme


def test_every_store_that_can_be_written_to_has_a_client() -> None:
    assert list(CLOUDS) == list(OBJECT_STORES)
    assert {kind.partition("-")[0] for kind in WRITABLE} == set(OBJECT_STORES), "each is tested against a server"


@pytest.mark.parametrize("location", ["ftp://host/x", "azure://x/y", "file:///etc/passwd"])
def test_an_unknown_scheme_is_refused_with_a_list_of_known_ones(location: str) -> None:
    with pytest.raises(ConfigError, match="is not supported") as caught:
        list_files(location, (".txt",))
    assert "s3://, gs://, az://, hf://" in caught.value.hint


@pytest.mark.parametrize(
    "location",
    [
        "https://me:hunter2hunter2@host/x.txt", "s3://AKIAIOSFODNN7EXAMPLE:hunter2hunter2@bucket/x", "hf://hunter2@a/b",
        "https://host/x.txt?token=hunter2hunter2", "https://host/x?X-Amz-Signature=hunter2hunter2&a=b",
    ],
)  # fmt: skip
def test_credentials_in_a_uri_are_refused_and_redacted(location: str) -> None:
    with pytest.raises(ConfigError, match="contains credentials") as caught:
        list_files(location, (".txt",))
    assert "hunter2" not in str(caught.value)
    assert "environment" in caught.value.hint


def test_a_secret_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2hunter2")
    with pytest.raises(ConfigError, match="contains credentials") as caught:
        list_files("hf://a/b/hunter2hunter2.txt", (".txt",))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "location",
    [
        "hf://org/hf_coding2024", "s3://bucket/sk-SK2020dump/token=7/x.txt", "hf://datasets/o/n@v1.0/x", "gs://b/a@b/x",
        "https://host/x.txt?download=true", "https://host:8080/a@b.txt",
    ],
)  # fmt: skip
def test_names_that_look_like_secrets_are_accepted(location: str) -> None:
    assert scheme_of(location) is not None


def test_a_short_secret_of_a_local_store_may_occur_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")  # what LocalStack and moto accept
    assert scheme_of("s3://my-test-bucket/test.jsonl") == "s3"


def test_every_location_has_one_canonical_uri() -> None:
    assert canonical_uri("hf://HuggingFaceFW/fineweb-edu") == "hf://datasets/HuggingFaceFW/fineweb-edu"
    assert canonical_uri("hf://datasets/a/b/") == "hf://datasets/a/b"
    assert canonical_uri("hf://models/a/b") == "hf://models/a/b"
    assert canonical_uri("S3://bucket/folder/") == "s3://bucket/folder"
    assert canonical_uri("https://host/folder/") == "https://host/folder/"
    assert canonical_uri("x.txt") == str(Path.cwd() / "x.txt")


@pytest.mark.parametrize(
    ("location", "uri", "place"),
    [
        ("s3://b/text", "s3://b/text/a/x.txt", "a/x.txt"),
        ("s3://b/text/", "s3://b/text/x.txt", "x.txt"),
        ("s3://b/text", "s3://b/texts/x.txt", None),
        ("s3://b/text/**/*.txt", "s3://b/text/a/x.txt", "a/x.txt"),
        ("s3://b/te[xs]t/*.txt", "s3://b/test/x.txt", "test/x.txt"),
        ("gs://b", "gs://b/x.txt", "x.txt"),
        ("gs://b/a/x.txt", "gs://b/a/x.txt", "x.txt"),
        ("hf://o/n", "hf://datasets/o/n/data/x", "data/x"),
        ("hf://o/n@main", "hf://datasets/o/n@main/data/x", "data/x"),
        ("stdlib:", "stdlib:json/decoder.py", "json/decoder.py"),
        ("https://host/x?raw=1", "https://host/x?raw=1", "x?raw=1"),
    ],
)
def test_names_are_relative_to_the_location(location: str, uri: str, place: str | None) -> None:
    assert relative_name(location, uri) == place


def test_question_marks_are_no_wildcards_in_http_urls() -> None:
    assert not has_magic("https://host/x?raw=1")
    assert has_magic("https://host/*.txt")
    assert has_magic("s3://b/x?.txt")


NAMES = ["a.txt", "ab.txt", ".h.txt", "d/a.txt", "d/.h.txt", "d/e/a.txt", ".g/a.txt", "d/[x].txt", "d/b.md"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", ".h", "*", "**", "?", "[a-c]", "[!a]", "d", ".", ".txt", "/"]), max_size=7))
def test_patterns_match_as_glob_does(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    pattern = "".join(parts)
    if "//" in pattern or pattern.startswith("/") or any(part in {".", "..", ""} for part in pattern.split("/")):
        return
    root = tmp_path_factory.getbasetemp() / "glob"
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    found = glob.glob(pattern, root_dir=root, recursive=True)  # noqa: PTH207
    expected = {name for name in found if (root / name).is_file()}
    if "**" in pattern.split("/")[:-1] or pattern.split("/")[-1] == "**":
        expected = {os.path.normpath(name) for name in expected}
    assert {name for name in NAMES if matches_glob(name, pattern)} == expected
