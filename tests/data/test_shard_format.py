"""Token shards: readable by llm.c's own reader, and refused if the header does not match the file."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import BadRecord, TokenDocument
from vorox.data.text.shard_format import read_header, read_shard, write_shard
from vorox.data.text.sources import list_source, with_tokenizer
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units

KINDS = [(20240520, 1, "<u2"), (20240801, 7, "<u4")]


def shard(
    magic: int, version: int, dtype: str, tokens: list[int], *, short: bool = False, said: int | None = None
) -> bytes:
    """By the book: 256 int32 (or three) and the ids."""
    count = len(tokens) if said is None else said
    header = struct.pack("<3i", magic, version, count)
    return (header if short else header.ljust(1024, b"\0")) + np.array(tokens, dtype).tobytes()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 65535), max_size=40), kind=st.sampled_from(KINDS))
def test_what_is_written_is_what_the_book_says(tmp_path: Path, tokens: list[int], kind: tuple[int, int, str]) -> None:
    write_shard(tmp_path / "a.bin", np.array(tokens, kind[2]))
    assert (tmp_path / "a.bin").read_bytes() == shard(*kind, tokens)
    assert read_shard(tmp_path / "a.bin").tolist() == tokens


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_headers_are_read_the_length_decides(tmp_path: Path, kind: tuple[int, int, str], short: bool) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(shard(*kind, [1, 2, 65535], short=short))
    assert read_shard(path).tolist() == [1, 2, 65535]
    assert read_shard(path).dtype == kind[2]
    assert read_header(path).header_bytes == (12 if short else 1024)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes is too small for a token shard"),
        (b"12345678901", "11 bytes is too small for a token shard"),
        (shard(20240521, 1, "<u2", [1]), "magic 20240521, version 1"),
        (shard(20240520, 2, "<u2", [1]), "magic 20240520, version 2"),
        (shard(20240520, 7, "<u4", [1]), "magic 20240520, version 7"),
        (
            shard(20240520, 1, "<u2", [1, 2, 3])[:-1],
            "states 3 tokens of 2 bytes, but the file of 1,029 bytes holds 2.5",
        ),
        (shard(20240520, 1, "<u2", [1, 2, 3], said=4), "states 4 tokens"),
        (shard(20240520, 1, "<u2", [1, 2, 3], said=2), "states 2 tokens"),
        (shard(20240520, 1, "<u2", [1, 2, 3], said=-1), "states 4,294,967,295 tokens"),
        (shard(20240801, 7, "<u2", [1, 2, 3]), "states 3 tokens of 4 bytes"),
        (b"PAR1 and so on, which is no shard", "Not a token shard"),
    ],
)
def test_every_lie_of_a_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_shard(path)
    assert message in caught.value.what
    assert caught.value.where == str(path)
    assert caught.value.hint
    if content:
        config = SourceConfig(name="s", format="bin", paths=(str(path),), end_of_text_id=0)
        with pytest.raises(DataError) as again:
            split_into_units(list_source(config), "train", ValidationConfig(held_out_fraction=0), 100)
        assert again.value.what == caught.value.what


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not int32"):
        write_shard(tmp_path / "a.bin", np.zeros(3, np.int32))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


class TestSource:
    FINGERPRINT = "0123456789abcdef" * 4

    def config(self, folder: Path, tokenizer: str = "t.json", **options: object) -> SourceConfig:
        return SourceConfig.model_validate(
            {"name": "s", "format": "bin", "paths": [str(folder)], "tokenizer": tokenizer, **options}
        )

    def test_the_end_of_text_is_that_of_the_tokenizer_unless_the_source_says_its_own(self, tmp_path: Path) -> None:
        write_shard(tmp_path / "a.bin", np.array([5, 6, 9, 7, 8, 9], np.uint16))
        everything = ValidationConfig(held_out_fraction=0)
        for said, expected in ((None, [[5, 6], [7, 8]]), (8, [[5, 6, 9, 7], [9]])):
            listed = list_source(self.config(tmp_path, end_of_text_id=said))
            bound = with_tokenizer(listed, self.FINGERPRINT, 9, ["t.json"])
            units = split_into_units(bound, "train", everything, 1 << 20)
            records = [record for unit in units for record in UnitReader(bound, "train", everything)(unit)]
            assert [r.tokens.tolist() for r in records if isinstance(r, TokenDocument)] == expected
        assert len({bound.definition["end_of_text_id"], "9"}) == 2, "another end of text is another recipe"

    @pytest.mark.parametrize("declared", ["t.json", FINGERPRINT, FINGERPRINT[:8]])
    def test_the_tokenizer_must_be_the_runs_own(self, tmp_path: Path, declared: str) -> None:
        write_shard(tmp_path / "a.bin", np.array([5, 9], np.uint16))
        listed = list_source(self.config(tmp_path, declared))
        assert with_tokenizer(listed, self.FINGERPRINT, 9, ["t.json"]).config.end_of_text_id == 9
        with pytest.raises(ConfigError, match="written with tokenizer") as caught:
            with_tokenizer(listed, "f" * 64, 9, ["other.json"])
        assert caught.value.where == "data.sources.tokenizer"

    def test_shards_without_their_end_of_text_are_put_aside_not_loaded(self, tmp_path: Path) -> None:
        write_shard(tmp_path / "a.bin", np.arange(100_000, dtype=np.uint32) % 1000)
        listed = list_source(self.config(tmp_path, end_of_text_id=5_000, max_record_bytes=1 << 16))
        everything = ValidationConfig(held_out_fraction=0)
        (unit,) = split_into_units(listed, "train", everything, 1 << 20)
        (record,) = UnitReader(listed, "train", everything)(unit)
        assert isinstance(record, BadRecord)
        assert (record.byte_offset, record.byte_length) == (1024, 400_000)
        assert "is 5000 the end of text?" in record.reason
