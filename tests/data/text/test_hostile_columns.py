"""Arrow and Parquet files that contradict themselves or expand: data errors, in bounded memory, and no other bytes."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import list_files
from vorox.data.text.formats import measure, read_records, split_blocks
from vorox.data.text.formats.columnar import validate

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SECRET = "hf_thisIsSecretProcessMemory"
READ = """
import json, sys
from pathlib import Path
from vorox.core.errors import DataError
sys.path.insert(0, {tests!r})
from test_hostile_columns import SECRET, read_all
keep = [bytearray(SECRET.encode() * 40) for _ in range(2000)]
for path, chat in json.loads(Path({cases!r}).read_text()):
    print(path, flush=True)
    try:
        texts = read_all(path, ("messages",) if chat else ())
    except DataError as error:
        assert path in error.where, error
        continue
    except UnicodeDecodeError:
        continue
    assert not any(SECRET in text for text in texts), "the text of a document holds other memory"
print("done")
"""


def source_of(path: Path | str, chat_fields: tuple[str, ...], **settings: Any) -> SourceConfig:
    kind: Any = Path(path).suffix[1:]
    return SourceConfig(
        name="s", format=kind, paths=(str(path),), chat_fields=chat_fields, max_record_bytes=1 << 30, **settings
    )


def records(path: Path | str, chat_fields: tuple[str, ...] = (), **settings: Any) -> list[Document | BadRecord]:
    source = source_of(path, chat_fields, **settings)
    (file,) = list_files(str(path), ())
    found: list[Any] = []
    for block in split_blocks(source, file, 0, None, 1 << 20):
        span = UnitSpan(0, block.start_byte, block.end_byte, block.first_ordinal)
        found += read_records(source, file, span, lambda _: True)
    return found


def read_all(path: str, chat_fields: tuple[str, ...]) -> list[str]:
    return [record.text for record in records(path, chat_fields) if isinstance(record, Document)]


def stream(table: Any, max_chunksize: int | None = None) -> bytes:
    sink = io.BytesIO()
    with arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max_chunksize)
    return sink.getvalue()


def tables() -> list[tuple[Any, bool]]:
    words = [f"document {number} " + "x" * number for number in range(40)]
    chats = [[{"role": "user", "content": word}, {"role": "assistant", "content": word}] for word in words]
    text = arrow.array(words)
    return [
        (arrow.table({"text": text}), False),
        (arrow.table({"text": text.cast(arrow.large_string())}), False),
        (arrow.table({"text": text.cast(arrow.string_view())}), False),
        (arrow.table({"text": text.dictionary_encode(), "n": list(range(40))}), False),
        (arrow.table({"messages": chats}), True),
        (arrow.table({"text": text, "tags": [[word, "a"] for word in words]}), False),
    ]


def test_altered_offsets_neither_end_the_process_nor_show_its_memory(tmp_path: Path) -> None:
    """A child reads 240 streams of which some integers were changed: only data errors may come of it."""
    chooser = random.Random(random.randrange(1 << 30))
    cases: list[tuple[str, bool]] = []
    for number, (table, is_chat) in enumerate(tables()):
        data = stream(table)
        assert len(read_all(str(write(tmp_path / f"good{number}.arrow", data)), ("messages",) if is_chat else ())) == 40
        for variant in range(40):
            changed = bytearray(data)
            for _ in range(chooser.randint(1, 3)):
                at = chooser.randrange(len(data) // 8, len(data) - 16) // 4 * 4
                value = chooser.choice([chooser.randrange(1 << 31), 1 << 30, 300_000, 0xFFFFFFFF, 0x7FFFFFFF, 5])
                changed[at : at + 4] = value.to_bytes(4, "little")
            cases.append((str(write(tmp_path / f"{number}-{variant}.arrow", bytes(changed))), is_chat))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = READ.format(tests=str(Path(__file__).parent), cases=str(tmp_path / "cases.json"))
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert child.returncode == 0, (child.returncode, child.stdout.splitlines()[-1:], child.stderr[-2000:])
    assert child.stdout.splitlines()[-1] == "done"


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_an_offset_beyond_the_text_is_a_data_error_with_the_file(tmp_path: Path) -> None:
    words = ["ABCDEFGH"] * 50
    data = bytearray(stream(arrow.table({"messages": [[{"role": "assistant", "content": word}] for word in words]})))
    last = b"".join(int(8 * n).to_bytes(4, "little") for n in range(47, 51))
    at = data.find(last)
    assert at > 0
    data[at + 12 : at + 16] = (400 + 300_000).to_bytes(4, "little")
    path = write(tmp_path / "leak.arrow", bytes(data))
    with pytest.raises(DataError, match="record batch contradicts itself") as caught:
        records(path, ("messages",))
    assert str(path) in caught.value.where


def test_a_batch_of_parquet_is_checked_too() -> None:
    offsets = arrow.py_buffer(b"".join(value.to_bytes(4, "little") for value in (0, 900_000, 6)))
    bad = arrow.Array.from_buffers(arrow.string(), 2, [None, offsets, arrow.py_buffer(b"abcdef")])
    batch = arrow.record_batch({"text": bad})
    (file,) = list_files(__file__, ())
    with pytest.raises(DataError, match="contradicts itself"):
        validate(batch, file)
    letters = arrow.Array.from_buffers(
        arrow.string(), 1, [None, arrow.py_buffer(bytes(4) + (2).to_bytes(4, "little")), arrow.py_buffer(b"\xff\xfe")]
    )
    validate(arrow.record_batch({"text": letters}), file)  # the record is unreadable, not the file


def test_invalid_text_is_a_bad_record_in_every_layout(tmp_path: Path) -> None:
    raw = arrow.array([b"good", b"\xff\xfe", b"fine"])
    large = raw.cast(arrow.large_binary()).view(arrow.large_string())
    for number, text in enumerate((raw.view(arrow.string()), large)):
        table = arrow.table({"text": text})
        parquet.write_table(table, tmp_path / f"{number}.parquet")
        write(tmp_path / f"{number}.arrow", stream(table))
        for name in (f"{number}.parquet", f"{number}.arrow"):
            found = records(tmp_path / name)
            assert [type(record).__name__ for record in found] == ["Document", "BadRecord", "Document"]
            assert "invalid UTF-8 at byte 0" in found[1].reason  # type: ignore[union-attr]


def test_dictionary_encoded_text_is_read_as_its_values(tmp_path: Path) -> None:
    words = [None if number % 7 == 6 else f"word {number % 5}" for number in range(50)]
    plain = arrow.array(words)
    for number, column in enumerate(
        [plain.dictionary_encode(), plain.cast(arrow.large_string()), plain.cast(arrow.string_view()),
         arrow.DictionaryArray.from_arrays(plain.dictionary_encode().indices.cast(arrow.int8()),
                                           plain.dictionary_encode().dictionary.cast(arrow.large_string()))]
    ):  # fmt: skip
        table = arrow.table({"text": column})
        write(tmp_path / f"{number}.arrow", stream(table, 11))
        if not arrow.types.is_string_view(column.type):
            parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=13)
        for path in tmp_path.glob(f"{number}.*"):
            found = [record.text if isinstance(record, Document) else None for record in records(path)]
            assert found == words, path.name


def test_dictionaries_that_grow_between_batches_are_read_as_written(tmp_path: Path) -> None:
    sink = io.BytesIO()
    schema = arrow.schema({"text": arrow.dictionary(arrow.int32(), arrow.string())})
    batches = [[f"a{n}" for n in range(3)], [f"b{n}" for n in range(4)], ["a1", "c"]]
    with arrow.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(arrow.record_batch({"text": arrow.array(batch).dictionary_encode()}))
    path = write(tmp_path / "d.arrow", sink.getvalue())
    assert read_all(str(path), ()) == [word for batch in batches for word in batch]
    source = source_of(path, ())
    (file,) = list_files(str(path), ())
    blocks = list(split_blocks(source, file, 0, None, 1))
    assert len(blocks) == 3
    last = blocks[-1]
    span = UnitSpan(0, last.start_byte, last.end_byte, last.first_ordinal)
    assert [record.text for record in read_records(source, file, span, lambda _: True)] == ["a1", "c"]  # type: ignore[union-attr]


def bomb(path: Path, rows: int, value_bytes: int, *, chat: bool = False) -> Path:
    """Write a small file of ``rows`` equal texts."""
    value = arrow.array(["x" * value_bytes])
    text = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, arrow.int32()), value)
    if chat:
        role = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, arrow.int32()), arrow.array(["assistant"]))
        message = arrow.StructArray.from_arrays([role, text], ["role", "content"])
        column: Any = arrow.ListArray.from_arrays(arrow.array(range(rows + 1), arrow.int32()), message)
    else:
        column = text
    parquet.write_table(arrow.table({"messages" if chat else "text": column}), path, compression="zstd")
    return path


@pytest.mark.parametrize("chat", [False, True])
def test_a_row_group_is_sized_by_its_decoded_text(chat: bool, tmp_path: Path) -> None:
    path = bomb(tmp_path / "a.parquet", 500, 100_000, chat=chat)
    assert path.stat().st_size < 50_000
    source = source_of(path, ("messages",) if chat else ())
    (file,) = list_files(str(path), ())
    assert 50_000_000 <= measure(source, file) < 50_100_000


@pytest.mark.parametrize("chat", [False, True])
def test_a_small_file_does_not_fill_the_memory(chat: bool, tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.parquet", 6000, 1 << 20, chat=chat)
    assert path.stat().st_size < 100_000
    before = peak_bytes()
    with pytest.raises(DataError, match="decompression bomb") as caught:
        records(path, ("messages",) if chat else ())
    assert "max_decompression_ratio" in caught.value.hint
    assert peak_bytes() - before < 300 << 20
    if not chat:  # trusted: every text is one of the same, and takes no memory of its own
        source = source_of(path, (), max_decompression_ratio=1e9)
        (file,) = list_files(str(path), ())
        block = next(split_blocks(source, file, 0, None, 1 << 20))
        count = 0
        for record in read_records(source, file, UnitSpan(0, block.start_byte, block.end_byte, 0), lambda _: True):
            assert isinstance(record, Document)
            count += 1
        assert count == 6000
        assert peak_bytes() - before < 300 << 20


def peak_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
