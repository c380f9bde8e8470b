"""Named sources resolve to files on a hub with today's layout; a gated one raises an error with a remedy."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from servers import HubServer, http_server, hub_server, pointed_at
from vorox.core.config import load_config
from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import Document
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units
from vorox.data.text.url_lists import addresses_in

NOTHING_HELD_OUT = ValidationConfig(held_out_fraction=0)


def parquet(column: str, *texts: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({column: list(texts)}), buffer)
    return buffer.getvalue()


def lines(*texts: str) -> bytes:
    return gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts), mtime=0)


def card(configurations: Mapping[str, Mapping[str, str]]) -> bytes:
    configs = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for name, splits in configurations.items()
    ]
    return f"---\nconfigs: {json.dumps(configs)}\n---\n".encode()


def named(preset: str, **more: Any) -> SourceConfig:
    """An entry of a configuration that says no more than the name."""
    values = {"preset": "quickstart", "data": {"sources": [{"name": "x", "preset": preset, **more}]}}
    (source,) = load_config(values).data.sources
    return source


def texts(config: SourceConfig) -> list[str]:
    listed = list_source(config)
    units = split_into_units(listed, "train", NOTHING_HELD_OUT, 1 << 20)
    records = [record for unit in units for record in UnitReader(listed, "train", NOTHING_HELD_OUT)(unit)]
    assert all(isinstance(record, Document) for record in records)
    return [record.text for record in records if isinstance(record, Document)]


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture
def hub(server: HubServer) -> Iterator[HubServer]:
    server.commits.clear()
    server.references.clear()
    yield server
    server.token = None


@pytest.mark.parametrize("preset", ["fineweb-edu", "fineweb"])
def test_fineweb_is_its_sample_unless_another_configuration_is_named(preset: str, hub: HubServer) -> None:
    hub.commit(f"HuggingFaceFW/{preset}", {
        "README.md": card({
            "default": {"train": "data/*/*"}, "sample-10BT": {"train": "sample/10BT/*"},
            "CC-MAIN-2013-20": {"train": "data/CC-MAIN-2013-20/*"},
        }),
        "data/CC-MAIN-2013-20/train-00000-of-00014.parquet": parquet("text", "all 1"),
        "data/CC-MAIN-2024-10/train-00000-of-00020.parquet": parquet("text", "all 2"),
        "sample/10BT/000_00000.parquet": parquet("text", "sample 1"),
        "sample/10BT/001_00000.parquet": parquet("text", "sample 2"),
    })  # fmt: skip
    assert texts(named(preset)) == ["sample 1", "sample 2"]
    assert texts(named(preset, hf_config="default")) == ["all 1", "all 2"]
    assert texts(named(preset, hf_config="CC-MAIN-2013-20")) == ["all 1"]


def test_c4_is_english_training_text(hub: HubServer) -> None:
    hub.commit("allenai/c4", {
        "README.md": card({
            "en": {"train": "en/c4-train.*.json.gz", "validation": "en/c4-validation.*.json.gz"},
            "realnewslike": {"train": "realnewslike/c4-train.*.json.gz"},
        }),
        "en/c4-train.00000-of-01024.json.gz": lines("one", "two"),
        "en/c4-train.00001-of-01024.json.gz": lines("three"),
        "en/c4-validation.00000-of-00008.json.gz": lines("held out"),
        "realnewslike/c4-train.00000-of-00512.json.gz": lines("news"),
    })  # fmt: skip
    assert texts(named("c4")) == ["one", "two", "three"]
    assert texts(named("c4", hf_split="validation")) == ["held out"]


def test_dolma_is_every_address_of_its_list(hub: HubServer, tmp_path: Path) -> None:
    for folder, text in (("c4-filtered", "web"), ("wiki", "encyclopedia")):
        (tmp_path / "dolma-v1_7" / folder).mkdir(parents=True)
        (tmp_path / "dolma-v1_7" / folder / f"{folder}-0000.json.gz").write_bytes(lines(text))
    with http_server(tmp_path) as web:
        urls = [f"{web.url}/dolma-v1_7/{name}/{name}-0000.json.gz" for name in ("c4-filtered", "wiki")]
        hub.commit(
            "allenai/dolma", {"urls/v1_7.txt": "\n".join(urls).encode() + b"\n\n", "urls/v1_6.txt": b"http://no"}
        )
        assert sorted(texts(named("dolma"))) == ["encyclopedia", "web"]
        assert [file.uri for file in list_source(named("dolma")).stored] == sorted(urls)
        assert texts(named("dolma", paths=[urls[1]])) == ["encyclopedia"]


def test_a_list_with_something_else_than_addresses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("# shards\nhttps://example.org/a.jsonl\n<html>\n")
    with pytest.raises(DataError, match=r"a line that is not a URL: '<html>'"):
        addresses_in(str(tmp_path / "urls.txt"))


@pytest.mark.parametrize("preset", ["the-stack", "the-stack-dedup", "the-stack-smol"])
def test_the_stack_is_gated_and_says_what_to_do(preset: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "the-stack": {f"data/{one}/train-00000-of-00206.parquet": parquet("content", one) for one in ("python", "c")},
        "the-stack-dedup": {
            f"data/{one}/data-00000-of-00144.parquet": parquet("content", one) for one in ("python", "c")
        },
        "the-stack-smol": {"data/python/data.json": b'{"content": "python"}\n', "data/c/data.json": b"{}"},
    }
    hub.commit(f"bigcode/{preset}", files[preset])
    hub.token = "a-token-with-access"
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(DataError) as refused:
        list_source(named(preset))
    assert "HF_TOKEN" in refused.value.hint
    assert "accept the repository's conditions" in refused.value.hint
    with pointed_at(hub.environment()):
        assert texts(named(preset)) == ["python"]
