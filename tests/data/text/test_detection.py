"""What public data sets look like, and what is read from them: by their columns, as their readers yield the records."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from servers import s3_server
from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, Message, Record
from vorox.data.text.format_detection import DetectedSource, detect_source
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import read_units
from vorox.data.text.unit_splitter import split_into_units

PROSE = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def records_of(found: DetectedSource) -> list[Record]:
    source = list_source(SourceConfig.model_validate(found.source))
    units = split_into_units(source, "train", source.holdout, 1 << 20)
    return list(read_units(source, units, "train", source.holdout))


def detect(rows: Sequence[Mapping[str, Any]], name: str = "a.jsonl", **given: Any) -> DetectedSource:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return detect_source([name], given)


def chat(*turns: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]


SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
USER, ASSISTANT = Message("user", "q"), Message("assistant", "a")
UNDERSTOOD: list[tuple[str, dict[str, Any], dict[str, Any], Any]] = [
    ("openai", {"messages": chat("q", "a")}, {"chat_fields": ["messages"]}, (USER, ASSISTANT)),
    ("ultrachat", {"prompt": "q", "prompt_id": "7", "messages": chat("q", "a")}, {"chat_fields": ["messages"]},
     (USER, ASSISTANT)),
    ("metadata", {"metadata": {"content": PROSE}, "messages": chat("q", "a")}, {"chat_fields": ["messages"]},
     (USER, ASSISTANT)),
    ("other name", {"dialog": chat("q", "a"), "id": 1}, {"chat_fields": ["dialog"]}, (USER, ASSISTANT)),
    ("developer", {"messages": [{"role": "developer", "content": "s"}, *chat("q", "a")]}, {"chat_fields": ["messages"]},
     (Message("system", "s"), USER, ASSISTANT)),
    ("parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, chat("", "a")[1]]},
     {"chat_fields": ["messages"]}, (USER, ASSISTANT)),
    ("messages as text", {"messages": json.dumps(chat("q", "a"))}, {"chat_fields": ["messages"]}, (USER, ASSISTANT)),
    ("sharegpt", {"conversations": SHAREGPT, "system": "s", "tools": json.dumps(TOOLS)},
     {"chat_fields": ["conversations"], "system_field": "system", "tools_field": "tools"},
     (Message("system", "s"), USER, ASSISTANT)),
    ("repeated system", {"system": "s", "messages": [{"role": "system", "content": "s"}, *chat("q", "a")]},
     {"chat_fields": ["messages"], "system_field": "system"}, (Message("system", "s"), USER, ASSISTANT)),
    ("alpaca", {"instruction": "q", "input": "", "output": "a"}, {"chat_fields": ["instruction", "input", "output"]},
     (USER, ASSISTANT)),
    ("tatsu-lab", {"instruction": "q", "input": "", "output": "a", "text": "Instruction: q Response: a"},
     {"chat_fields": ["instruction", "input", "output"]}, (USER, ASSISTANT)),
    ("llama-factory", {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["q", "a"]]},
     {"chat_fields": ["instruction", "input", "output"], "system_field": "system", "history_field": "history"},
     (Message("system", "s"), USER, ASSISTANT, Message("user", "q\n\ni"), ASSISTANT)),
    ("dolly", {"instruction": "q", "context": PROSE, "response": "a", "category": "open question answering"},
     {"chat_fields": ["instruction", "context", "response"]}, (Message("user", f"q\n\n{PROSE}"), ASSISTANT)),
    ("squad", {"id": "1", "title": "t", "context": PROSE, "question": "q", "answers": {"text": ["a", "b"],
     "answer_start": [1, 2]}}, {"chat_fields": ["question", "context", "answers"]},
     (Message("user", f"q\n\n{PROSE}"), ASSISTANT)),
    ("openorca", {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
     {"chat_fields": ["question", "response"], "system_field": "system_prompt"},
     (Message("system", "s"), USER, ASSISTANT)),
    ("gsm8k", {"question": "q", "answer": "a"}, {"chat_fields": ["question", "answer"]}, (USER, ASSISTANT)),
    ("capitals", {"Question": "q", "Answer": "a"}, {"chat_fields": ["Question", "Answer"]}, (USER, ASSISTANT)),
    ("input output", {"input": "q", "output": "a"}, {"chat_fields": ["input", "output"]}, (USER, ASSISTANT)),
    ("prompt completion", {"prompt": "q", "completion": "a"}, {"chat_fields": ["prompt", "completion"]},
     (USER, ASSISTANT)),
    ("trl lists", {"prompt": chat("q"), "completion": [{"role": "assistant", "content": "a"}]},
     {"chat_fields": ["prompt", "completion"]}, (USER, ASSISTANT)),
    ("answer beside", {"messages": chat("q", "a", "q"), "response": "b", "id": "1"},
     {"chat_fields": ["messages", "response"]}, (USER, ASSISTANT, USER, Message("assistant", "b"))),
    ("nemotron", {"input": chat("q", "a", "q"), "output": "b", "category": "math", "system_prompt": "s"},
     {"chat_fields": ["input", "output"], "system_field": "system_prompt"},
     (Message("system", "s"), USER, ASSISTANT, USER, Message("assistant", "b"))),
    ("two lists, one an answer", {"input": chat("q"), "output": chat("", "a")[1:]},
     {"chat_fields": ["input", "output"]}, (USER, ASSISTANT)),
    ("result of a tool", {"messages": [*chat("q", "a"), {"role": "tool", "content": "r"}], "response": "b"},
     {"chat_fields": ["messages", "response"]}, (USER, ASSISTANT, Message("tool", "r"), Message("assistant", "b"))),
    ("prompt within", {"messages": chat("q", "a", PROSE), "prompt": PROSE, "output": "a words and more"},
     {"chat_fields": ["messages", "output"]},
     (USER, ASSISTANT, Message("user", PROSE), Message("assistant", "a words and more"))),
    ("right answers", {"problem": "q", "solution": "a", "is_correct": True}, {"chat_fields": ["problem", "solution"]},
     (USER, ASSISTANT)),
    ("number of the answer", {"question": "q", "answer": "a", "correct": 3}, {"chat_fields": ["question", "answer"]},
     (USER, ASSISTANT)),
    ("nothing beside", {"messages": chat("q", "a", "q"), "prompt": "q", "score": 3}, {"chat_fields": ["messages"]},
     (USER, ASSISTANT, USER)),
    ("repeated prompt", {"prompt": chat("q"), "completion": chat("q", "a")}, {"chat_fields": ["completion"]},
     (USER, ASSISTANT)),
    ("openr1", {"problem": PROSE, "solution": PROSE, "answer": "3", "generations": [PROSE], "messages": chat("q", "a")},
     {"chat_fields": ["messages"]}, (USER, ASSISTANT)),
    ("left out", {"messages": chat("q", "a"), "id": 3, "tools": None}, {"chat_fields": ["messages"]},
     (USER, ASSISTANT)),
    ("web text", {"id": "x", "url": "https://x.y", "title": "A b c", "text": PROSE}, {"text_field": "text"}, PROSE),
    ("code", {"path": "a.py", "content": PROSE, "license": "mit"}, {"text_field": "content"}, PROSE),
    ("one column", {"review": PROSE, "stars": 5}, {"text_field": "review"}, PROSE),
    ("sums", {"text": "1+1=2"}, {"text_field": "text"}, "1+1=2"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "settings", "content"), [case[1:] for case in UNDERSTOOD],
                         ids=[case[0] for case in UNDERSTOOD])  # fmt: skip
def test_public_shapes_are_understood(row: dict[str, Any], settings: dict[str, Any], content: Any) -> None:
    found = detect([row, row])
    assert {key: value for key, value in found.source.items() if key not in {"name", "format", "paths"}} == settings
    first = records_of(found)[0]
    assert isinstance(first, Document)
    assert (first.messages or first.text) == content
    unread = row.keys() - set(settings.get("chat_fields", ())) - set(map(str, settings.values()))
    assert all(repr(name) in found.summary for name in unread), found.summary
    if "tools_field" in settings:
        assert first.tools == tuple(TOOLS)


def test_an_implicit_prompt_and_the_system_message_of_pairs() -> None:
    both = {"chosen": chat("q", "good"), "rejected": chat("q", "bad")}
    found = detect([{"prompt": "q", "prompt_id": "1", **both, "messages": chat("q", "good"), "score_chosen": 8.0}])
    assert found.source["chat_fields"] == ["chosen", "rejected"]
    twice = [{"prompt": "q", "question": "q", **both}, {"prompt": "q", "question": "", **both}]  # ORPO's mixture
    assert detect(twice).source["chat_fields"] == ["chosen", "rejected"]
    assert found.source["preference_pairs"]
    found = detect(
        [{"system": "s", "prompt": chat("q"), "chosen": chat("q", "good")[1:], "rejected": chat("", "b")[1:]}]
    )
    (pair,) = records_of(found)
    assert pair.messages.prompt == (Message("system", "s"), USER)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="Column 'system' may change"):
        detect([{"system": "s", "question": "q", "chosen": "good", "rejected": "bad"}])


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("kto", {"prompt": "q", "completion": "a", "label": True}, "'label' marks good and bad", "label_field=label"),
    ("kto lists", {"prompt": chat("q"), "completion": chat("", "a")[1:], "label": False}, "'label' marks", "label"),
    ("kto numbers", {"prompt": "q", "response": "a", "label": 0}, "'label' marks", "label_field=label"),
    ("llama-factory kto", {"messages": chat("q", "a"), "label": False}, "'label' marks", "label_field=label"),
    ("weights", {"messages": chat("q", "a"), "weight": 0.5}, "Column 'weight' may change", "chat_fields=[messages]"),
    ("passage", {"question": "q", "passage": "x", "background": PROSE, "answer": "a"}, "Column 'background' may",
     "chat_fields=[question,passage,answer]"),
    ("evidence", {"question": "q", "evidence": PROSE, "answer": "a"}, "Column 'evidence' may change",
     "chat_fields=[question,evidence,answer] to read it as context"),
    ("reasoning", {"Question": "q", "Complex_CoT": PROSE, "Response": "a"}, "Column 'Complex_CoT'", "chat_fields="),
    ("turns", {"instruction": "q", "output": "a", "history": ["only", "texts"]}, "Column 'history'", "chat_fields="),
    ("odd tools", {"messages": chat("q", "a"), "tools": "use a calculator"}, "Column 'tools' may", "chat_fields"),
    ("images", {"messages": chat("<image> q", "a"), "images": ["a.png"]}, "Column 'images' may change",
     "images_field=images"),
    ("captions", {"text": "<image> a cat", "image": "a.png"}, "Column 'image' may change", "images_field=image"),
    ("two texts", {"title": "A", "abstract": "B"}, "The text column is ambiguous", "text_field=title"),
    ("summaries", {"document": PROSE, "summary": PROSE}, "ambiguous: document, summary", "text_field=document"),
    ("text and messages", {"text": PROSE, "messages": chat("q", "a")}, "'text' holds text, and 'messages'",
     "chat_fields=[messages]"),
    ("two answers", {"question": "q", "answer": "a", "response": "b"}, "'question', 'response', 'answer'", "chat_"),
    ("two lists", {"messages": chat("q", "a"), "conversations": SHAREGPT}, "Several columns hold", "chat_fields"),
    ("nested", {"data": {"text": PROSE}}, "No column holds text", "text_field=data.text"),
    ("numbers", {"a": 1, "b": [2]}, "No column holds text; the records have 'a' (numbers)", "text_field=COLUMN"),
    ("mbpp", {"task_id": 1, "text": PROSE, "code": "def f(x): return x", "test_list": ["assert f(1) == 1"]},
     "Column 'code' may change", "chat_fields=[text,code]"),
    ("mmlu", {"question": PROSE, "subject": "algebra", "choices": ["0", "4"], "answer": "B"}, "Column 'choices' may",
     "chat_fields=[question,answer]"),
    ("mmlu csv", {"question": PROSE, "A": "0", "B": "4", "answer": "B"}, "Column 'A' may change",
     "chat_fields=[question,answer]"),
    ("medmcqa", {"question": PROSE, "opa": "x", "opb": "y", "answer": "a"}, "Column 'opa'", "chat_fields="),
    ("billsum", {"text": PROSE, "summary": "another few words", "title": "A title of words"}, "Column 'summary' may",
     "chat_fields=[text,summary]"),
    ("labelled tokens", {"text": PROSE, "input_ids": [1, 2], "labels": [-100, 2]}, "Column 'labels' may change",
     "ignored_fields=[labels]"),
    ("spans", {"text": PROSE, "loss_mask": [[0, 4]]}, "Column 'loss_mask' may change", "ignored_fields=[loss_mask]"),
    ("smoltalk2", {"messages": chat("q", "a"), "chat_template_kwargs": {"enable_thinking": True}},
     "Column 'chat_template_kwargs' may change", "chat_fields=[messages]"),
    ("step-dpo", {"prompt": "q", "initial_reason_steps": PROSE, "chosen": "good", "rejected": "bad"},
     "Column 'initial_reason_steps' may change", "chat_fields=[prompt,chosen,rejected]"),
    ("capybara", {"source": "Airoboros", "conversation": [{"input": "q", "output": "a"}]},
     "'source' holds text, beside 'conversation' (a list)", "text_field=source to train on 'source' alone"),
    ("dialogues", {"topic": "the daily life", "dialog": ["hello there", "hi"], "act": [1, 2]},
     "beside 'dialog' (a list), 'act' (a list)", "text_field=topic"),
    ("openmathinstruct", {"question": "q", "answer": "a", "is_correct": False}, "'is_correct' marks good and bad",
     "label_field=is_correct to train on the good ones only"),
    ("accepted", {"messages": chat("q", "a"), "accepted": 0}, "'accepted' marks good", "ignored_fields=[accepted]"),
    ("prompts alone", {"prompt": PROSE, "id": 1}, "'prompt' holds questions, without answers", "text_field=prompt"),
    ("answer with another name", {"dialogue": chat("q", "a", "q"), "next_utterance": PROSE},
     "may be in 'next_utterance'", "chat_fields=[dialogue,next_utterance] to train on it"),
    ("helpsteer3", {"domain": "general", "context": chat("q", "a", "q"), "response1": PROSE, "response2": PROSE},
     "may be in 'response1', 'response2'", "chat_fields=[context] to train on the answers within"),
    ("two answers to messages", {"messages": chat("q"), "answer": "7", "response": PROSE},
     "may be in 'response', 'answer'", "chat_fields=[messages,response] to train on it"),
    ("logged answer", {"messages": chat("q"), "response": {"choices": [{"message": chat("", "a")[1]}]}},
     "may be in 'response'", "the answer to the end of 'messages' in the data"),
    ("nemotron's reasoning", {"input": chat("q"), "output": "a", "reasoning": "off", "system_prompt": "s"},
     "'reasoning' may", "chat_fields=[input,output] data.sources.0.system_field=system_prompt to leave it out"),
    ("lima", {"conversations": ["q", "a"]}, "No column holds text", "chat_fields"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "what", "remedy"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_not_understood_is_refused_by_name(row: dict[str, Any], what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect([row, row])
    assert what in caught.value.what
    assert f"data.sources.0.{remedy}" in caught.value.hint or remedy in caught.value.hint


def test_an_answer_beside_some_of_the_messages_is_refused() -> None:
    rows = [{"messages": chat("q", "a"), "response": None}, {"messages": chat("q", "a", "q"), "response": "b"}]
    with pytest.raises(
        ConfigError, match="'messages' ends with the user, and the answer may be in 'response'"
    ) as caught:
        detect(rows)
    assert "chat_fields=[messages,response]" not in caught.value.hint, "the first record has no such answer"
    assert detect([{**row, "response": None} for row in rows]).source["chat_fields"] == ["messages"]


@pytest.mark.parametrize("write", [str, json.dumps, lambda value: str(value).replace("}, {", "}\n {")])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("q", "a")},
        {"conversation": chat("q", "a"), "id": 1},
        {"prompt": chat("q"), "completion": "a"},
        {"prompt": chat("q"), "chosen": chat("", "good")[1:], "rejected": chat("", "bad")[1:]},
        {"chosen": chat("q", "good"), "rejected": chat("q", "bad")},
        {"text": {"messages": chat("q", "a")}},
    ],
)
def test_messages_written_as_texts_are_read_as_messages_or_refused(write: Any, row: dict[str, Any]) -> None:
    """pandas' to_csv writes lists as Python prints them, that of datasets as numpy does."""
    texts = {key: value if isinstance(value, str | int) else write(value) for key, value in row.items()}
    whole = row.get("messages") or row.get("conversation")
    if whole and write is json.dumps:
        assert records_of(detect([texts, texts]))[0].messages == (USER, ASSISTANT)  # type: ignore[union-attr]
        return
    if "text" in row and write is not json.dumps:
        return  # a printed object says less than its key
    with pytest.raises(ConfigError, match="holds messages written as texts") as caught:
        detect([texts, texts])
    assert "to_json(orient='records', lines=True)" in caught.value.hint


def test_what_the_user_says_decides() -> None:
    kto = [{"prompt": "q", "completion": answer, "label": answer == "good"} for answer in ("good", "bad")]
    (kept,) = records_of(detect(kto, label_field="label"))
    assert kept.messages[1].content == "good"  # type: ignore[union-attr,index]
    evidence = {"question": "q", "evidence": PROSE, "answer": "a"}
    (record,) = records_of(detect([evidence], chat_fields="[question, evidence, answer]"))
    assert record.messages[0].content == f"q\n\n{PROSE}"  # type: ignore[union-attr,index]
    assert detect([{"text": "<image> a", "image": "a.png"}], images_field="image").source["text_field"] == "text"


# Files


def test_an_array_and_lines_are_told_apart_by_their_content() -> None:
    rows = [{"instruction": f"q{n} \u2028", "input": 'x]},{[\\"', "output": 'a"}]'} for n in range(60)]
    texts = {
        "array.json": json.dumps(rows),
        "pretty.json": json.dumps(rows, indent=2, ensure_ascii=False),
        "lines.json": "".join(json.dumps(row) + "\n" for row in rows),
        "array.jsonl": json.dumps(rows),
        "unknown": "".join(json.dumps(row) + "\n" for row in rows),
    }
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
        found = detect_source([name])
        assert found.source["format"] == ("jsonl" if name in {"lines.json", "unknown"} else "json")
        messages = [record.messages for record in records_of(found)]  # type: ignore[union-attr]
        assert [one[0].content for one in messages] == [f"{row['instruction']}\n\n{row['input']}" for row in rows]  # type: ignore[union-attr]
    Path("many").mkdir()
    for number in range(2):
        Path(f"many/{number}.json").write_text(texts["lines.json"].replace("q", f"q{number}"))
    assert len(records_of(detect_source(["many"]))) == 120


@pytest.mark.parametrize("seed", range(6))
def test_elements_of_an_array_have_their_own_bytes(seed: int) -> None:
    chooser = random.Random(seed)
    alphabet = ['"', "\\", "[", "]", "{", "}", ",", " ", "\n", "é", "\u2028", "a", "\\u0041"]
    rows = [{"text": "x" + "".join(chooser.choices(alphabet, k=chooser.randint(0, 30))), "n": [{"a": []}]}
            for _ in range(chooser.randint(1, 80))]  # fmt: skip
    spaces = [chooser.choice(["", " ", "\n", "\r\n\t"]) for _ in range(2 * len(rows) + 2)]
    parts = [json.dumps(row, ensure_ascii=chooser.random() < 0.5) for row in rows]
    body = ",".join(f"{spaces[2 * n]}{part}{spaces[2 * n + 1]}" for n, part in enumerate(parts))
    content = f"{spaces[-2]}[{body}]{spaces[-1]}".encode()
    Path("a.json").write_bytes(content)
    config = SourceConfig(name="a", format="json", paths=("a.json",))
    source = list_source(config)
    for unit_bytes in (1, 100, 1 << 20):
        units = split_into_units(source, "train", source.holdout, unit_bytes)
        found = list(read_units(source, units, "train", source.holdout))
        assert [record.text for record in found] == [row["text"] for row in rows]  # type: ignore[union-attr]
        assert [record.ordinal for record in found] == list(range(len(rows)))
        for record, part in zip(found, parts, strict=True):
            assert content[record.byte_offset : record.byte_offset + record.byte_length].decode() == part


@pytest.mark.parametrize(("form", "name"), [("txt", "a.txt"), ("python_stdlib", "a.py")])
def test_a_format_without_fields_has_files_for_documents(form: str, name: str) -> None:
    Path(name).write_text("a = 1\n", encoding="utf-8")
    assert detect_source(["."], {"format": form}).summary.endswith(f"{form}, 1 file, 6 bytes, a file is a document")


def test_one_json_object_is_refused_with_a_command() -> None:
    for content in (
        {"version": "1.1", "data": [{"text": "a"}]}, {"text": {"0": "a", "1": "b"}},
        {"0": {"text": "a"}, "1": {"text": "b"}}, {"columns": ["text"], "index": [0], "data": [["a"]]},
    ):  # fmt: skip
        Path("a.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="one JSON object") as caught:
            detect_source(["a.json"])
        assert "jq -c" in caught.value.hint
        Path("a.json").write_text(json.dumps(content, indent=1))
        with pytest.raises(ConfigError, match="one JSON object"):
            detect_source(["a.json"])
    Path("a.json").write_text('{"text": "a"}')
    assert detect_source(["a.json"]).source["format"] == "jsonl"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a"},', "a comma follows the record; JSON Lines has no commas between records"),
        ('{"text": "a",}', "a comma before the closing }: remove it"),
        ("{'text': 'a'}", "a Python dictionary, not JSON"),
        ('{"text": "a"', "invalid JSON at column"),
    ],
)
def test_mistakes_in_json_are_named_with_their_place(line: str, reason: str) -> None:
    Path("a.jsonl").write_text(f"{line}\n" * 9)
    with pytest.raises(DataError) as caught:
        detect_source(["a.jsonl"])
    assert reason in caught.value.what
    assert caught.value.where.endswith("a.jsonl:1")


def test_a_comma_before_the_end_of_an_array_is_a_bad_record() -> None:
    Path("a.json").write_text('[{"text": "a"},\n {"text": "b"},\n]\n')
    found = records_of(detect_source(["a.json"]))
    assert [type(record).__name__ for record in found] == ["Document", "Document", "BadRecord"]
    assert "a comma without an element after it" in found[2].reason  # type: ignore[union-attr]


def test_line_separators_of_unicode_are_text() -> None:
    rows = [{"text": f"a\u2028b\u0085c{n}"} for n in range(9)]
    Path("a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert [record.text for record in records_of(detect_source(["a.jsonl"]))] == [row["text"] for row in rows]  # type: ignore[union-attr]


def test_csv_of_every_kind() -> None:
    long = "word " * 60_000
    rows = [[str(n), f'a, "b"\n{n}', long if n == 3 else "short text"] for n in range(20)]
    for end in ("\n", "\r\n", "\r"):
        for delimiter in ",;\t|":
            buffer = io.StringIO(newline="")
            writer = csv.writer(buffer, delimiter=delimiter, lineterminator=end)
            writer.writerow(["", "note, with a comma", "text"])
            writer.writerows(rows)
            Path("a.csv").write_text(buffer.getvalue(), encoding="utf-8", newline="")
            found = detect_source(["a.csv"])
            assert (found.source["delimiter"], found.source["text_field"]) == (delimiter, "text")
            assert [record.text for record in records_of(found)] == [row[2] for row in rows]  # type: ignore[union-attr]
            assert "'Unnamed: 0'" in found.summary
    Path("b.csv").write_text(",name,rate\n0,model,0.5\n1,other,0.25\n")
    assert detect_source(["b.csv"], {"text_field": "name"}).source["text_field"] == "name"
    Path("c.csv").write_text(",rate\nmodel a,0.5\nmodel b,0.25\n")
    with pytest.raises(ConfigError, match="No column holds text; the records have 'Unnamed: 0'") as caught:
        detect_source(["c.csv"])
    assert "text_field=COLUMN" in caught.value.hint
    named = detect_source(["c.csv"], {"text_field": "Unnamed: 0"})
    assert [record.text for record in records_of(named)] == ["model a", "model b"]  # type: ignore[union-attr]


# Names that look like patterns


def corpus(root: Path, suffix: str) -> Path:
    folder = root / "corpus [v2]*?" / "deep"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder.parent if number % 2 else folder).joinpath(f"n[{number}]{suffix}").write_text(f"text {number} ok")
    (root / "corpus v").mkdir()
    (root / "corpus v" / f"other{suffix}").write_text("not this one")
    return folder.parent


@pytest.mark.parametrize("suffix", [".txt", ".md"])
def test_folders_and_files_may_have_names_like_patterns(suffix: str, tmp_path: Path) -> None:
    folder = corpus(tmp_path, suffix)
    texts = [str(record.text) for record in records_of(detect_source([str(folder)]))]  # type: ignore[union-attr]
    assert sorted(texts) == [f"text {number} ok" for number in range(4)]
    (record,) = records_of(detect_source([str(folder / f"n[1]{suffix}")]))
    assert record.text == "text 1 ok"  # type: ignore[union-attr]
    config = SourceConfig(name="a", format="csv", paths=(str(folder),))
    with pytest.raises(DataError) as caught:
        list_source(config)
    pattern = caught.value.hint.rpartition(" such as ")[2]
    again = SourceConfig(name="a", format="txt", paths=(pattern,))
    assert len(list_source(again).files) == 4, "the hinted pattern matches"


@pytest.mark.parametrize("suffix", [".txt", ".md"])
def test_keys_of_a_store_may_look_like_patterns(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    folder = corpus(tmp_path, suffix)
    objects = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob(f"*{suffix}")}
    with s3_server() as server:
        server.bucket("bucket")
        for name, content in objects.items():
            server.put("bucket", name, content)
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        root = f"s3://bucket/{folder.name}"
        texts = [str(record.text) for record in records_of(detect_source([root]))]  # type: ignore[union-attr]
        assert sorted(texts) == [f"text {number} ok" for number in range(4)]
        (record,) = records_of(detect_source([f"{root}/n[1]{suffix}"]))
        assert record.text == "text 1 ok"  # type: ignore[union-attr]
        assert len(records_of(detect_source([f"s3://bucket/*/*{suffix}"]))) == 3, "patterns still match"


def test_a_bad_first_record_does_not_hide_the_others() -> None:
    Path("a.jsonl").write_text("not json\n" + '{"text": "fine"}\n' * 9)
    found = records_of(detect_source(["a.jsonl"]))
    assert isinstance(found[0], BadRecord)
    assert len(found) == 10
    with pytest.raises(VoroxError):
        detect_source(["missing.jsonl"])


def numbered(number: int, **columns: object) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
    } | columns


def write_records(path: Path, records: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_column_of_later_records_or_of_other_files_counts(tmp_path: Path) -> None:
    write_records(
        tmp_path / "late.jsonl", [numbered(n) for n in range(55)] + [numbered(n, system="LATE") for n in range(5)]
    )
    write_records(tmp_path / "two" / "a.jsonl", [numbered(n) for n in range(30)])
    write_records(tmp_path / "two" / "b.jsonl", [numbered(n, system="LATE") for n in range(30)])
    for path in (tmp_path / "late.jsonl", tmp_path / "two"):
        assert detect_source([str(path)]).source["system_field"] == "system"
    write_records(
        tmp_path / "weights.jsonl", [numbered(n) for n in range(55)] + [numbered(n, weight=0) for n in range(5)]
    )
    with pytest.raises(ConfigError, match="'weight'"):
        detect_source([str(tmp_path / "weights.jsonl")])


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"},
                               {"from": "human", "value": "more"}],
             "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}},
            "'chosen', 'rejected'",
        ),
        (
            {"input": {"messages": [{"role": "user", "content": "q"}]},
             "preferred_output": [{"role": "assistant", "content": "good"}],
             "non_preferred_output": [{"role": "assistant", "content": "bad"}]},
            "'preferred_output', 'non_preferred_output'",
        ),
        ({"prompt": "a question", "responses": ["one answer", "another answer"]}, "'responses'"),
    ],
)  # fmt: skip
def test_answers_in_an_unknown_form_are_refused_by_name(tmp_path: Path, record: dict[str, object], named: str) -> None:
    write_records(tmp_path / "data.jsonl", [record] * 60)
    with pytest.raises(ConfigError, match=named):
        detect_source([str(tmp_path / "data.jsonl")])


@pytest.mark.parametrize(
    "content",
    ["id\ttext\n1 a few words\n2 some more\n", "# made by hand\nid,text\n1,a few words\n2,more\n",
     'id, text\n1, "a, b"\n2, "c, d"\n'],
    ids=["no tabs below", "a comment", "blanks before quotes"],
)  # fmt: skip
def test_a_header_that_does_not_divide_the_rows_is_refused(content: str) -> None:
    """Else each whole line is a text, with its number."""
    Path("a.csv").write_text(content)
    with pytest.raises(ConfigError, match="does not divide the rows into columns") as caught:
        detect_source(["a.csv"])
    assert "data.sources.0.delimiter" in caught.value.hint
    Path("a.csv").write_text("text\nhello, there you\nmore, words, again\n")
    assert detect_source(["a.csv"]).source["text_field"] == "text"


def test_a_tab_may_be_written_in_two_characters() -> None:
    Path("a.txt").write_text("id\ttext\n1\tsome words\n2\tmore words\n")
    found = detect_source(["a.txt"], {"format": "csv", "delimiter": r"\t"})
    assert [record.text for record in records_of(found)] == ["some words", "more words"]  # type: ignore[union-attr]


def test_a_path_that_is_given_twice_counts_once() -> None:
    Path("a.txt").write_text("some words of a text")
    assert detect_source(["a.txt", "a.txt"]).text_bytes == detect_source(["a.txt"]).text_bytes
