"""Columns that change what a record means, wherever they first appear, and columns whose names are misspelt."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from dataset_folders import write_mds, write_saved_dataset
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.corpus.corpus import prepare
from vorox.data.documents import BadRecord, Document, Message, Record
from vorox.data.text.format_detection import detect_source
from vorox.data.text.record_sample import check_columns
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import read_units
from vorox.data.text.unit_splitter import split_into_units

Row = Mapping[str, Any]
SAMPLE = 1000
"""Records of a file that detection looks at."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))


def records_of(settings: Mapping[str, Any]) -> list[Record]:
    source = list_source(SourceConfig.model_validate(settings))
    units = split_into_units(source, "train", source.holdout, 1 << 20)
    return list(read_units(source, units, "train", source.holdout))


def write_jsonl(rows: Sequence[Row]) -> str:
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "a.jsonl"


def write_json(rows: Sequence[Row]) -> str:
    Path("a.json").write_text(json.dumps(rows))
    return "a.json"


def write_csv(rows: Sequence[Row]) -> str:
    with Path("a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(
            {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
            for row in rows
        )
    return "a.csv"


def write_parquet(rows: Sequence[Row]) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    parquet.write_table(arrow.Table.from_pydict({name: [row.get(name) for row in rows] for name in names}), "a.parquet")
    return "a.parquet"


def write_arrow(rows: Sequence[Row]) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    folder = f"saved{len(list(Path().iterdir()))}"
    write_saved_dataset(Path(folder), {name: [row.get(name) for row in rows] for name in names}, num_shards=1)
    return folder


def write_shards(rows: Sequence[Row]) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    full = [{name: row.get(name, "") for name in names} for row in rows]
    folder = f"shards{len(list(Path().iterdir()))}"
    write_mds(Path(folder), full, dict.fromkeys(names, "str"))
    return folder


def chat(*turns: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]


def answered(number: int) -> dict[str, Any]:
    return {"prompt": f"question {number}", "completion": f"answer {number}"}


def messages(number: int) -> dict[str, Any]:
    return {"messages": chat(f"question {number}", f"answer {number}")}


def text(number: int) -> dict[str, Any]:
    return {"text": f"A text with the number {number}."}


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"question {number}", "chosen": f"good {number}", "rejected": f"bad {number}"}


LATE: list[tuple[Callable[[int], dict[str, Any]], str, Any, str]] = [
    (answered, "system", "Be brief.", "data.sources.0.system_field=system"),
    (answered, "history", [["q", "a"]], "data.sources.0.history_field=history"),
    (answered, "label", False, "data.sources.0.label_field=label"),
    (answered, "kto_tag", False, "data.sources.0.label_field=kto_tag"),
    (answered, "context", "a passage", "data.sources.0.chat_fields=[prompt,context,completion] to read it as context"),
    (answered, "messages", chat("q", "a"), "data.sources.0.ignored_fields=[messages]"),
    (messages, "tools", [{"name": "f"}], "data.sources.0.tools_field=tools"),
    (messages, "weight", 0, "data.sources.0.ignored_fields=[weight]"),
    (messages, "sample_weight", 0, "data.sources.0.ignored_fields=[sample_weight]"),
    (messages, "images", ["a.png"], "data.sources.0.images_field=images"),
    (messages, "chosen", chat("q", "a"), "data.sources.0.ignored_fields=[chosen]"),
    (messages, "System", "Be brief.", "data.sources.0.system_field=System"),
    (text, "messages", chat("q", "a"), "data.sources.0.ignored_fields=[messages]"),
    (text, "image", "a.png", "data.sources.0.images_field=image"),
    (text, "role", "assistant", "data.sources.0.ignored_fields=[role]"),
    (text, "weight", 0.0, "data.sources.0.ignored_fields=[weight]"),
    (text, "code", "def f(x): return x", "data.sources.0.chat_fields=[text,code] to train on it as the answer"),
    (text, "labels", [-100, 3], "data.sources.0.ignored_fields=[labels]"),
    (
        messages,
        "chat_template_kwargs",
        {"enable_thinking": True},
        "data.sources.0.ignored_fields=[chat_template_kwargs]",
    ),
    (text, "response", ["one", "two"], "data.sources.0.ignored_fields=[response]"),
    (answered, "choices", ["0", "4"], "data.sources.0.ignored_fields=[choices]"),
    (answered, "chosen", False, "data.sources.0.ignored_fields=[chosen]"),
    (messages, "rejected", True, "data.sources.0.ignored_fields=[rejected]"),
    (answered, "A", "4", "data.sources.0.ignored_fields=[A]"),
    (pair, "system", "Be brief.", "data.sources.0.ignored_fields=[system]"),
    (pair, "weight", 0.5, "data.sources.0.ignored_fields=[weight]"),
]


def test_all_columns_of_a_record_are_named_at_once() -> None:
    pair = {"chosen": "a whole answer here", "rejected": "another whole answer here"}
    source = {"name": "a", "format": "jsonl", "paths": [write_jsonl([text(0) | pair])], "text_field": "text"}
    with pytest.raises(DataError, match=r"columns 'chosen', 'rejected' may change what the record means") as caught:
        prepare(configuration(source))
    assert "data.sources.0.ignored_fields=[chosen,rejected] to train without them" in caught.value.hint
    assert all(isinstance(record, Document) for record in records_of({**source, "ignored_fields": [*pair]}))


TREE = {"parent_id": None, "message_tree_id": "m", "role": "prompter", "deleted": False, "rank": None}


@pytest.mark.parametrize(
    ("row", "beside", "column"),
    [
        (text, TREE, "role"), (text, {"from": "human"}, "from"), (text, {"weight": 0.0}, "weight"),
        (text, {"sample_weight": "0.5"}, "sample_weight"), (text, {"weights": [1, 0]}, "weights"),
        (messages, {"rejected": chat("q", "bad")}, "rejected"),
        (text, {"code": "def f(x): return x"}, "code"), (text, {"output": "what to write here"}, "output"),
        (text, {"file_name": "0.png"}, "file_name"), (messages, {"image_path": "a/0.JPEG"}, "image_path"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("write", [write_jsonl, write_parquet], ids=["jsonl", "parquet"])
def test_detection_refuses_what_it_would_ignore(
    write: Callable[[Sequence[Row]], str], row: Callable[[int], dict[str, Any]], beside: dict[str, Any], column: str
) -> None:
    path = write([row(number) | beside for number in range(9)])
    with pytest.raises(ConfigError, match=f"Column '{column}' may change what a record means") as caught:
        detect_source([path])
    assert f"data.sources.0.ignored_fields=[{column}]" in str(caught.value.hint)
    assert detect_source([path], {"ignored_fields": [column]}).source["ignored_fields"] == [column]


@pytest.mark.parametrize(
    "beside",
    [
        {"label": 0}, {"score": 0.3}, {"language": "en", "language_score": 0.9}, {"url": "a.b", "timestamp": "2020"},
        {"weight": 1.0}, {"weight": "heavy"}, {"weight": None}, {"role": "engineer"}, {"from": "a@b.c"},
        {"labels": "news"}, {"summary": "short"},
        {"code": "en"}, {"output": "A text with the number"}, {"answer": 3}, {"choices": ["a", "b"]},
        {"parent_id": "t1"}, {"rejected": False}, {"file_name": "a.py"}, {"source": "web", "id": 3, "rank": 2},
    ],
)  # fmt: skip
def test_columns_that_describe_a_text_are_accepted(beside: dict[str, Any]) -> None:
    found = detect_source([write_jsonl([text(number) | beside for number in range(9)])])
    assert "ignored_fields" not in found.source
    assert [type(record) for record in records_of(found.source)] == [Document] * 9


@pytest.mark.parametrize(("row", "name", "value", "remedy"), LATE, ids=[f"{one[0].__name__}-{one[1]}" for one in LATE])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet], ids=["jsonl", "parquet"])
def test_a_column_after_the_sample_is_refused_by_name(
    write: Callable[[Sequence[Row]], str], row: Callable[[int], dict[str, Any]], name: str, value: Any, remedy: str
) -> None:
    rows = [row(number) | ({name: value} if number >= SAMPLE else {}) for number in range(SAMPLE + 120)]
    found = detect_source([write(rows)])
    if name == "context" and write is write_parquet:  # the file has it from the start, and it may be empty
        assert name in found.source["chat_fields"]
        return
    assert name not in {*found.source.get("ignored_fields", ()), *map(str, found.source.values())}
    read = records_of(found.source)
    assert [isinstance(record, BadRecord) for record in read] == [number >= SAMPLE for number in range(SAMPLE + 120)]
    bad = [record for record in read if isinstance(record, BadRecord)]
    assert f"column {name!r} may change what the record means" in bad[0].reason
    ignored = records_of({**found.source, "ignored_fields": [name]})
    assert all(isinstance(record, Document) for record in ignored)
    if write is write_parquet:
        return
    with pytest.raises(DataError) as caught:
        prepare(configuration(found.source))
    assert remedy in caught.value.hint
    assert f"data.sources.0.ignored_fields=[{name}] to train without it" in caught.value.hint
    assert "bad_record_fraction" not in caught.value.hint


@pytest.mark.parametrize("write", [write_json, write_csv, write_arrow, write_shards])
def test_every_format_guards_its_records(write: Callable[[Sequence[Row]], str]) -> None:
    rows = [answered(number) | ({"system": "Be brief."} if number >= SAMPLE else {}) for number in range(SAMPLE + 9)]
    path = write([row | ({} if "system" in row else {"system": ""}) for row in rows])
    found = detect_source([path])
    assert "system_field" not in found.source
    read = records_of(found.source)
    assert [isinstance(record, BadRecord) for record in read] == [number >= SAMPLE for number in range(SAMPLE + 9)]
    (first, *_, last) = records_of({**found.source, "system_field": "system"})
    assert isinstance(first, Document)
    assert isinstance(last, Document)
    assert first.messages == (Message("user", "question 0"), Message("assistant", "answer 0"))
    assert last.messages == (  # as written
        Message("system", "Be brief."), Message("user", f"question {SAMPLE + 8}"),
        Message("assistant", f"answer {SAMPLE + 8}"),
    )  # fmt: skip
    late = json.dumps(chat("q", "a"))
    texts = [text(number) | {"messages": late if number >= SAMPLE else ""} for number in range(SAMPLE + 9)]
    read = records_of(detect_source([write(texts)]).source)
    assert [isinstance(record, BadRecord) for record in read] == [number >= SAMPLE for number in range(SAMPLE + 9)]


def test_what_holds_no_value_or_changes_nothing_is_no_reason_to_refuse() -> None:
    quiet: dict[str, Any] = {"system": "", "tools": [], "images": None, "label": True, "chosen": 1, "score": 0.1}
    rows = [messages(number) | (quiet if number >= SAMPLE else {}) for number in range(SAMPLE + 50)]
    assert all(isinstance(record, Document) for record in records_of(detect_source([write_jsonl(rows)]).source))
    rows = [text(number) | ({"label": 0, "messages": 3} if number >= SAMPLE else {}) for number in range(SAMPLE + 50)]
    assert all(isinstance(record, Document) for record in records_of(detect_source([write_jsonl(rows)]).source))


def test_what_the_user_names_decides_on_the_columns_of_the_sample_only() -> None:
    rows = [messages(number) | {"weight": 0.5} | ({"tools": [{"name": "f"}]} if number >= SAMPLE else {})
            for number in range(SAMPLE + 5)]  # fmt: skip
    found = detect_source([write_jsonl(rows)], {"chat_fields": "[messages]"})
    assert found.source["ignored_fields"] == ["weight"]
    assert "not read: 'weight'" in found.summary
    assert sum(isinstance(record, BadRecord) for record in records_of(found.source)) == 5
    with pytest.raises(ConfigError, match="'label' marks good and bad"):
        detect_source([write_jsonl([answered(1) | {"label": True}])], {"chat_fields": "[prompt,completion]"})
    every = {"chat_fields": "[prompt,completion]", "ignored_fields": "[label]"}
    found = detect_source([write_jsonl([answered(1) | {"label": False}])], every)
    assert isinstance(records_of(found.source)[0], Document)


def test_a_system_column_that_repeats_the_first_message_is_compared_in_every_record() -> None:
    rows = [{"messages": [{"role": "system", "content": "s"}, *chat("q", "a")], "system": "s"} for _ in range(SAMPLE)]
    other = {**rows[0], "system": "another"}
    found = detect_source([write_jsonl([*rows, other])])
    read = records_of(found.source)
    assert isinstance(read[0], Document)
    assert [message.role for message in read[0].messages] == ["system", "user", "assistant"]  # type: ignore[union-attr]
    assert isinstance(read[-1], BadRecord)
    assert "hold different system messages" in read[-1].reason


# Misspelt names


def configuration(source: Mapping[str, Any], *overrides: str) -> Any:
    sections = {"tokenizer": {"kind": "byte"}, "train": {"num_steps": 1}}
    if source.get("preference_pairs"):
        sections["loss"] = {"name": "dpo"}
    Path("c.yaml").write_text(json.dumps({"data": {"sources": [dict(source)]}, **sections}))
    return load_config("c.yaml", overrides)


MISSPELT: list[tuple[Callable[[int], dict[str, Any]], dict[str, Any], str]] = [
    (messages, {"chat_fields": ["mesages"]}, "chat_fields=[messages]"),
    (answered, {"chat_fields": ["prompt", "completions"]}, "chat_fields=[prompt,completion]"),
    (pair, {"chat_fields": ["prompt", "chosen", "reject"], "preference_pairs": True},
     "chat_fields=[prompt,chosen,rejected]"),
    (text, {"text_field": "texts"}, "text_field=text"),
    (lambda n: messages(n) | {"system": "s"}, {"chat_fields": ["messages"], "system_field": "sytem"},
     "system_field=system"),
    (lambda n: messages(n) | {"tools": "[]"}, {"chat_fields": ["messages"], "tools_field": "tool"},
     "tools_field=tools"),
    (lambda n: answered(n) | {"label": True}, {"chat_fields": ["prompt", "completion"], "label_field": "lable"},
     "label_field=label"),
    (lambda n: text(n) | {"images": ["a.png"]}, {"images_field": "imgs"}, "images_field=images"),
    (lambda n: text(n) | {"url": "x"}, {"metadata_fields": ["urls"]}, "metadata_fields=[url]"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "settings", "remedy"), MISSPELT, ids=[one[2] for one in MISSPELT])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet], ids=["jsonl", "parquet"])
def test_a_misspelt_column_is_found_before_the_build(
    write: Callable[[Sequence[Row]], str],
    row: Callable[[int], dict[str, Any]],
    settings: dict[str, Any],
    remedy: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write([row(number) for number in range(200)])
    format_name = path.partition(".")[2]
    source = {"name": "a", "format": format_name, "paths": [path], **settings}
    files = list_source(SourceConfig.model_validate(source)).stored
    with pytest.raises(ConfigError) as caught:
        check_columns(SourceConfig.model_validate(source), files, "data.sources.3")
    assert f"data.sources.3.{remedy}" in caught.value.hint
    given = [f"data.sources.0.{name}={json.dumps(value).replace(chr(34), '')}" for name, value in settings.items()]
    assert main(["train", "--data", path, "--dry-run", *given]) == 2
    assert f"data.sources.0.{remedy}" in capsys.readouterr().err
    if settings.keys() & {"preference_pairs", "images_field"}:
        return  # these need a model that is trained, or sees
    configuration(source)
    assert main(["train", "c.yaml", "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"data.sources.0.{remedy}" in said


def test_a_column_that_few_records_have_is_reported_and_read() -> None:
    rows = [messages(number) | ({"persona": "Be brief."} if number == SAMPLE else {}) for number in range(SAMPLE + 1)]
    source = SourceConfig(
        name="a", format="jsonl", paths=(write_jsonl(rows),), chat_fields=("messages",), system_field="persona"
    )
    (note,) = check_columns(source, list_source(source).stored, "data.sources.0")
    assert note == "none of the first 1,000 records of a has 'persona' (system_field)"
    inner = SourceConfig(name="a", format="jsonl", paths=("a.jsonl",), text_field="meta.body")
    write_jsonl([{"meta": {"body": "x"}}])
    assert check_columns(inner, list_source(inner).stored, "data.sources.0") == ()
    with pytest.raises(ConfigError, match=r"No record has 'meta\.boddy'") as caught:
        check_columns(
            inner.model_copy(update={"text_field": "meta.boddy"}), list_source(inner).stored, "data.sources.0"
        )
    assert caught.value.hint == "set data.sources.0.text_field=meta.body"


# Remedies


def test_tool_calls_that_a_template_does_not_write_are_no_exceptions_to_tolerate() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [
        {"messages": [*chat("q"), call, {"role": "tool", "content": "1"}, *chat("", "a")[1:]]}
        if number % 2 else messages(number)
        for number in range(400)
    ]  # fmt: skip
    with pytest.raises(DataError, match="has 'tool_calls', which the chat template does not write") as caught:
        prepare(configuration(detect_source([write_jsonl(rows)]).source))
    assert "set tokenizer.chat_template" in caught.value.hint
    assert "bad_record_fraction" not in caught.value.hint


def test_a_rare_reason_before_a_frequent_one_does_not_hide_it() -> None:
    rows: list[dict[str, Any]] = [messages(number) for number in range(400)]
    rows[0] = {"messages": "not a list"}
    for number in range(20, 400, 3):
        rows[number] = messages(number) | {"weight": 0}
    source = {"name": "a", "format": "jsonl", "paths": [write_jsonl(rows)], "chat_fields": ["messages"]}
    with pytest.raises(DataError, match="of them as this one: column 'weight' may change") as caught:
        prepare(configuration(source, "data.validation.held_out_fraction=0"))
    assert "data.sources.0.ignored_fields=[weight]" in caught.value.hint
