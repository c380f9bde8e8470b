"""Lazy splitting yields the units of the whole source from any starting point, with each record once."""

from __future__ import annotations

import csv as csv_reader
import gzip
import io
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servers.recorded import Handler, Request, serving
from servers.web import WebServer
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import Document
from vorox.data.text.sources import Source, list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import UnitSplitter, split_into_units

EVERYTHING = ValidationConfig(held_out_fraction=0)
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
TEXTS = st.lists(st.text(st.sampled_from('ab é€😀,"\n\r'), min_size=1, max_size=40), min_size=1, max_size=30)
PROFILE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def jsonl(texts: list[str], end: str, chooser: Any) -> bytes:
    """Lines with a byte order mark, blank lines and a last line without an end, now and then."""
    lines = [json.dumps({"text": text}, ensure_ascii=chooser.random() < 0.5) + end for text in texts]
    lines = [line if chooser.random() < 0.8 else line + end * 2 for line in lines]
    body = "".join(lines)
    return ("\ufeff" if chooser.random() < 0.3 else "").encode() + (
        body.encode() if chooser.random() < 0.5 else body.encode().rstrip(b"\r\n")
    )


def csv(texts: list[str], end: str, chooser: Any) -> bytes:
    buffer = io.StringIO()
    writer = csv_reader.writer(buffer, lineterminator=end, quoting=csv_reader.QUOTE_ALL)
    writer.writerows([["n", "text"], *([str(n), text] for n, text in enumerate(texts))])
    body = buffer.getvalue()
    return (body if chooser.random() < 0.5 else body.removesuffix(end)).encode()


def txt(texts: list[str], end: str, chooser: Any) -> bytes:
    del chooser
    return end.join(texts).encode()


FORMS = {"jsonl": jsonl, "csv": csv, "txt": txt}


def expected(form: str, content: bytes) -> list[str]:
    """What one gets who reads a whole file with other tools; of a txt, all of it."""
    if form == "jsonl":
        lines = content.removeprefix("\ufeff".encode()).split(b"\n")
        return [json.loads(line)["text"] for line in lines if line.strip()]
    if form == "csv":
        return [row[1] for row in csv_reader.reader(io.StringIO(content.decode(), newline=""))][1:]
    return [content.decode()]


def listed(folder: Path, form: str, contents: list[bytes], ending: str) -> Source:
    for old in folder.iterdir():
        old.unlink()
    for number, content in enumerate(contents):
        (folder / f"{number}.{form}{ending}").write_bytes(COMPRESS[ending](content))
    return list_source(SourceConfig.model_validate({"name": "s", "format": form, "paths": [str(folder)]}))


@PROFILE
@given(
    files=st.lists(TEXTS, min_size=1, max_size=3), form=st.sampled_from(list(FORMS)),
    ending=st.sampled_from(list(COMPRESS)), line_end=st.sampled_from(["\n", "\r\n"]), unit_bytes=st.integers(1, 300),
    stops=st.sets(st.integers(1, 40)), chooser=st.randoms(use_true_random=False),
)  # fmt: skip
def test_whoever_goes_on_cuts_what_the_first_would_have_cut(
    tmp_path: Path, files: list[list[str]], form: str, ending: str, line_end: str, unit_bytes: int, stops: set[int],
    chooser: Any,
) -> None:  # fmt: skip
    contents = list(dict.fromkeys(FORMS[form](texts, line_end, chooser) for texts in files))
    source = listed(tmp_path, form, contents, ending)
    units: list[Any] = []
    is_last = False
    splitter = UnitSplitter(source, "train", EVERYTHING, unit_bytes)
    while not is_last:
        found = splitter.units_after(units)
        for pair in found:
            unit, is_last = pair
            units.append(unit)
            if len(units) in stops:
                break
    assert list(splitter.units_after(units)) == []
    assert tuple(units) == split_into_units(source, "train", EVERYTHING, unit_bytes)
    records = [record for unit in units for record in UnitReader(source, "train", EVERYTHING)(unit)]
    assert all(isinstance(record, Document) for record in records)
    texts = [record.text for record in records if isinstance(record, Document)]
    wanted = [text for content in contents for text in expected(form, content)]
    assert "".join(texts) == "".join(wanted) if form == "txt" else texts == wanted
    places = [(record.file_index, record.ordinal) for record in records]
    assert places == sorted(set(places)), "each ordinal once, ascending"


@pytest.mark.parametrize("rule", ["document", "file", "span"])
@pytest.mark.parametrize("form", ["jsonl", "txt", "csv"])
def test_held_out_text_changes_nothing_of_that(tmp_path: Path, form: str, rule: str) -> None:
    validation = ValidationConfig.model_validate({"split": rule, "held_out_fraction": 0.3})
    texts = [[f"text {number} of {file}, " * (number % 7 + 1) for number in range(60)] for file in range(6)]
    source = listed(tmp_path, form, [FORMS[form](some, "\n", NoChoice()) for some in texts], "")
    whole = split_into_units(source, "train", validation, 500)
    assert len(whole) > 8
    splitter = UnitSplitter(source, "train", validation, 500)
    for known in range(1, len(whole)):
        unit, is_last = next(splitter.units_after(whole[:known]))
        assert (unit, is_last) == (whole[known], known + 1 == len(whole))
    assert list(splitter.units_after(whole)) == []


class NoChoice:
    def random(self) -> float:
        return 0.4


def test_the_bytes_of_all_units_are_known_by_the_first(tmp_path: Path) -> None:
    texts = [f"text {number} " * (number % 9 + 1) for number in range(12_000)]
    for ending, tolerance in (("", 0.0), (".gz", 0.1), (".zst", 0.25)):
        contents = [jsonl(texts[:8000], "\n", NoChoice()), jsonl(texts[8000:], "\n", NoChoice())]
        source = listed(tmp_path, "jsonl", contents, ending)
        splitter = UnitSplitter(source, "train", EVERYTHING, 150_000)
        units = split_into_units(source, "train", EVERYTHING, 150_000)
        whole = sum(unit.size_bytes for unit in units)
        assert len(units) > 4
        for known in (2, len(units) - 1):
            assert abs(splitter.estimated_bytes(units[:known]) - whole) <= tolerance * whole, (ending, known)


@pytest.mark.parametrize("form", list(FORMS))
def test_the_rest_of_a_damaged_file_is_put_aside_once(tmp_path: Path, form: str) -> None:
    texts = [f"text {number} " * (number % 9 + 1) for number in range(2000)]
    whole = gzip.compress(FORMS[form](texts, "\n", NoChoice()))
    (tmp_path / f"a.{form}.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / f"b.{form}.gz").write_bytes(whole)
    config = {"name": "s", "format": form, "paths": [str(tmp_path)], "damaged_files": "keep_readable"}
    source = list_source(SourceConfig.model_validate(config))
    units = split_into_units(source, "train", EVERYTHING, 2_000)
    assert sum(span.start_byte == span.end_byte for unit in units for span in unit.spans) == 1
    splitter = UnitSplitter(source, "train", EVERYTHING, 2_000)
    for known in range(1, len(units), 3):
        assert next(splitter.units_after(units[:known]))[0] == units[known]
    assert list(splitter.units_after(units)) == []


def test_a_line_of_a_hundred_megabytes_is_one_unit_in_bounded_memory(tmp_path: Path) -> None:
    lines = [b'{"text": "first"}\n', b'{"text": "' + b"x" * 100_000_000 + b'"}\n', b'{"text": "last"}']
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    config = {"name": "s", "format": "jsonl", "paths": [str(tmp_path)], "max_record_bytes": 1_000_000}
    source = list_source(SourceConfig.model_validate(config))
    tracemalloc.start()
    units = [unit for unit, _ in UnitSplitter(source, "train", EVERYTHING, 1 << 20).units_after()]
    records = [record for unit in units for record in UnitReader(source, "train", EVERYTHING)(unit)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(record.ordinal, record.byte_length) for record in records] == [
        (number, len(line)) for number, line in enumerate(lines)
    ]
    assert [isinstance(record, Document) for record in records] == [True, False, True]
    assert peak < 20_000_000


def test_files_of_a_store_are_split_several_at_a_time(tmp_path: Path) -> None:
    """The server holds each read for up to 5 s, until three files are being read."""
    for number in range(6):
        lines = [json.dumps({"text": f"line {line} of file {number}"}) + "\n" for line in range(300)]
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
    server, changed, reading, most = WebServer(tmp_path), threading.Condition(), set[str](), 0

    def respond(handler: Handler, request: Request) -> None:
        nonlocal most
        if request.range in {None, (0, 1)}:  # an index page, or the description of a file
            server.respond(handler, request)
            return
        with changed:
            reading.add(request.path)
            most = max(most, len(reading))
            changed.notify_all()
            changed.wait_for(lambda: most >= 3, timeout=5)
        server.respond(handler, request)
        with changed:
            reading.discard(request.path)

    def units(location: str) -> Any:
        config = SourceConfig.model_validate({"name": "s", "format": "jsonl", "paths": [location]})
        return split_into_units(list_source(config), "train", EVERYTHING, 2_000)

    with serving(respond) as (url, _):
        found = units(f"{url}/")
    assert most >= 3
    assert found == units(str(tmp_path))
    assert len(found) > 6
