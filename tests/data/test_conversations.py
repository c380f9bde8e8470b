"""Conversations from records to labels. The oracle for ids and masks is ``apply_chat_template`` of transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
from vorox.core.batch import IGNORED_LABEL, DataCursor
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema import RunConfig
from vorox.core.schema.data import SourceConfig
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.format import DOCUMENT, ChunkContent, ChunkOrigin, content_digest, encode_chunk
from vorox.data.cache.units.document_tokens import encode
from vorox.data.chat.conversations import read_conversation
from vorox.data.chat.template import BUILT_IN, ChatTemplate, rendered
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.documents import BadRecord, Document, Message
from vorox.data.provenance import inspection
from vorox.data.rows import RowBlock, assemble, interleave, row_digests
from vorox.data.text.format_detection import detect_source
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import read_units
from vorox.data.text.unit_splitter import split_into_units
from vorox.data.tokenizers.loading import load
from vorox.data.transfer.token_export import export_tokens
from vorox.training.inference.text_generation import answer_stop_strings


def document(chat: list[dict[str, str]]) -> Document:
    return Document(0, 0, 0, 0, "", messages=tuple(Message(message["role"], message["content"]) for message in chat))


def mask_of(found: Document, length: int) -> np.ndarray:
    mask = np.zeros(length, np.bool_)
    for start, end in found.target_tokens:
        mask[start:end] = True
    return mask


@pytest.mark.parametrize("kind", ["bpe", "byte"])
@pytest.mark.parametrize("template", [chats.MARKED, chats.TRIMMED], ids=["chatml", "trimmed"])
def test_ids_and_mask_are_those_of_transformers(kind: str, template: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = chats.tokenizer(kind)
    oracle = chats.Oracle(tmp_path, tokenizer, template)
    variants = [template, chats.unmarked(template), *([BUILT_IN["chatml"]] if template == chats.MARKED else [])]
    for chat in chats.conversations(60, seed=random.randrange(1 << 30)):
        ids, mask = oracle(chat)
        assert 0 < mask.sum() < len(mask)
        for source in variants:
            found = rendered(document(chat), tokenizer.with_chat_template(source).chat_template)
            assert isinstance(found, Document), found
            (encoded,), (tokens,) = encode([found], (), tokenizer)
            assert tokens.tolist() == ids
            assert isinstance(encoded, Document)
            np.testing.assert_array_equal(mask_of(encoded, len(ids)), mask, err_msg=str(chat))


def test_a_token_that_ends_the_conversation_takes_none_from_its_turns() -> None:
    """As in Phi-3, whose template ends turns with one token and conversations with another one."""
    tokenizer = chats.tokenizer("bpe")
    source = chats.unmarked(chats.MARKED)
    ended = source + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    for chat in chats.conversations(40, seed=random.randrange(1 << 30)):
        masks: list[np.ndarray] = []
        for template in (source, ended):
            found = rendered(document(chat), tokenizer.with_chat_template(template).chat_template)
            assert isinstance(found, Document), found
            (encoded,), (tokens,) = encode([found], (), tokenizer)
            assert isinstance(encoded, Document)
            masks.append(mask_of(encoded, len(tokens)))
        turns, whole = masks
        assert len(whole) == len(turns) + 1
        np.testing.assert_array_equal(whole[: len(turns) - 1], turns[:-1], err_msg=str(chat))
        assert whole[-1] == (chat[-1]["role"] == "assistant")


def test_a_plain_template_trains_on_answers_and_the_end_of_the_text() -> None:
    tokenizer = chats.tokenizer().with_chat_template(BUILT_IN["plain"])
    template = tokenizer.chat_template
    assert template is not None
    messages = (Message("system", "be kind"), Message("user", "2+2?"), Message("assistant", "4"))
    text, answers = template.render_answers(messages)
    assert text == "System: be kind\nUser: 2+2?\nAssistant: 4<|endoftext|>\n"
    assert [text[start:end] for start, end in answers] == ["4<|endoftext|>"]
    assert template.render(messages[:2], add_generation_prompt=True) == "System: be kind\nUser: 2+2?\nAssistant:"
    found = rendered(Document(0, 0, 0, 0, "", messages=messages[1:]), template)
    (encoded,), (ids,) = encode([found], (), tokenizer)  # type: ignore[list-item]
    assert isinstance(encoded, Document)
    trained = ids[mask_of(encoded, len(ids))]
    assert tokenizer.decode(trained) in {"4<|endoftext|>", " 4<|endoftext|>"}


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ONE, TWO, THREE = ("messages",), ("prompt", "completion"), ("instruction", "input", "output")
MISTAKES: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (ONE, {"text": "x"}, "no field 'messages'; the record has 'text': set the source's chat_fields"),
    (ONE, {"messages": "x"}, "field 'messages' is not a list of messages but a string"),
    (ONE, {"messages": [USER]}, "no message has the role assistant"),
    (ONE, {"messages": []}, "no message has the role assistant"),
    (ONE, {"messages": [USER, {"role": "assistant", "content": " \n"}]}, "the answer in message 2 is empty"),
    (ONE, {"messages": [USER, {"role": "narrator", "content": "x"}]}, "message 2 has the unknown role 'narrator'"),
    (ONE, {"messages": [USER, {"role": "assistant", "content": None}]}, "'content of message 2' is not a string but"),
    (ONE, {"messages": [USER, {"text": "x"}]}, "message 2 has neither 'role' and 'content' nor 'from' and 'value'"),
    (ONE, {"messages": [USER, {**ANSWER, "tool_calls": [{}]}]}, "a tool call of message 2 names no function"),
    (ONE, {"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "half a surrogate pair at character 0"),
    (TWO, {"prompt": "q"}, "no field 'completion'"),
    (TWO, {"prompt": "q", "completion": ""}, "the answer in message 2 is empty"),
    (THREE, {"instruction": "q", "input": 3, "output": "a"}, "field 'input' is not a string but a number"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "record", "reason"), MISTAKES, ids=[reason for _, _, reason in MISTAKES])
def test_unreadable_conversations_say_why(
    fields: tuple[str, ...], record: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    (found,) = records(file, fields)
    assert isinstance(found, BadRecord)
    assert reason in found.reason


def records(file: Path, fields: tuple[str, ...]) -> list[Any]:
    kind = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}[file.suffix]
    config = SourceConfig(name="chats", format=kind, paths=(str(file),), chat_fields=fields)  # type: ignore[arg-type]
    source = list_source(config)
    units = split_into_units(source, "train", source.holdout, 1 << 20)
    return list(read_units(source, units, "train", source.holdout))


TEMPLATE = ChatTemplate(BUILT_IN["chatml"], "", "<end>", ("<end>", "<|im_end|>"))


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        (TEMPLATE, "say <|im_end|>", "message 2 spells the special token '<|im_end|>'"),
        (TEMPLATE, "say \ufdd0", "message 2 has a noncharacter of Unicode"),
        (ChatTemplate("{{ raise_exception('no system') }}", "", ""), "a", "the chat template refuses the conversation"),
        (ChatTemplate("{{ messages[1].content | length }}", "", ""), "a", "changes an answer"),
        (ChatTemplate("{{ messages[0].content }}", "", ""), "a", "changes an answer"),
        (
            ChatTemplate(
                "{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ messages[0].content }}", "", ""
            ),
            "a",
            "marks no answer",
        ),
        (ChatTemplate("{{ messages[1].content }}", "", ""), "a", "does not write all of message 1, of role 'user'"),
        (ChatTemplate("{{ strftime_now('%Y') }}", "", ""), "a", "'strftime_now' is undefined"),
        (ChatTemplate("{{ ''.__class__.__mro__ }}", "", ""), "a", "access to attribute '__class__'"),
    ],
)
def test_templates_that_lose_an_answer_are_noticed(template: ChatTemplate, answer: str, reason: str) -> None:
    found = rendered(document([USER, {"role": "assistant", "content": answer}]), template)
    assert isinstance(found, BadRecord)
    assert reason in found.reason


def test_a_template_must_be_jinja() -> None:
    with pytest.raises(ConfigError, match="error in line 2"):
        ChatTemplate("x\n{% if %}", "", "").check_syntax()


def test_every_format_and_layout_gives_the_same_messages(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chat = chats.conversations(20, seed=4)
    expected = [tuple(Message(message["role"], message["content"]) for message in one) for one in chat]
    chats.write_jsonl(tmp_path / "a.jsonl", chat)
    table = arrow.table({"messages": chat, "id": list(range(20))})
    parquet.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    with arrow.ipc.new_stream(tmp_path / "c.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=6)
    sharegpt = {"system": "system", "user": "human", "assistant": "gpt"}
    theirs = [[{"from": sharegpt[m["role"]], "value": m["content"]} for m in one] for one in chat]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"conversations": one}) + "\n" for one in theirs))
    for name, field in (("a.jsonl", "messages"), ("b.parquet", "messages"), ("c.arrow", "messages"),
                        ("d.jsonl", "conversations")):  # fmt: skip
        assert detect_source([str(tmp_path / name)]).source["chat_fields"] == [field]
        assert [record.messages for record in records(tmp_path / name, (field,))] == expected, name

    question = Message("user", "add\n\n2 and 2"), Message("assistant", "four")
    row = {"instruction": "add", "input": "2 and 2", "output": "four"}
    (tmp_path / "e.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "e.csv").write_text("instruction,input,output\nadd,2 and 2,four\n")
    for name in ("e.jsonl", "e.csv"):
        assert detect_source([str(tmp_path / name)]).source["chat_fields"] == list(THREE)
        assert [record.messages for record in records(tmp_path / name, THREE)] == [question]
    assert read_conversation({**row, "input": ""}, THREE, ())[0] == Message("user", "add")
    assert read_conversation({"prompt": [USER], "completion": "a"}, TWO, ()) == (
        Message("user", "q"),
        Message("assistant", "a"),
    )


def test_missing_columns_of_parquet_name_those_present(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"talk": [[USER, ANSWER]]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'messages'; it has 'talk'.*chat_fields"):
        records(tmp_path / "a.parquet", ONE)


# From a cache to labels


def configuration(directory: Path, *overrides: str) -> RunConfig:
    file = directory / "chats.yaml"
    settings = {
        "data": {
            "sources": [
                {"name": "chats", "format": "jsonl", "paths": [str(directory / "a.jsonl")], "chat_fields": ["messages"]}
            ],
            "sequence_length_tokens": 48,
            "cache": {"directory": str(directory / "cache"), "chunk_rows": 16, "unit_bytes": 4000},
            "validation": {"held_out_fraction": 0},
        },
        "tokenizer": {"kind": "byte", "special_tokens": ["<|im_start|>", "<|im_end|>"]},
        "train": {"num_steps": 1},
    }
    file.write_text(json.dumps(settings), encoding="utf-8")
    return load_config(file, overrides)


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_packed_rows_keep_every_target_once(packing: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    chat = chats.conversations(80, seed=random.randrange(1 << 30))
    chats.write_jsonl(tmp_path / "a.jsonl", chat)
    corpus = prepare(configuration(tmp_path, f"data.packing={packing}", f"data.document_mask={packing == 'best_fit'}"))
    oracle = chats.Oracle(tmp_path / "theirs", corpus.tokenizer, chats.MARKED)
    reader = corpus.train[0]
    block = reader.read_rows(np.arange(reader.num_rows))
    assert block.loss_mask_NC is not None
    trained: set[tuple[int, int]] = set()
    for row in range(reader.num_rows):
        at = trained_here = 0
        for span in reader.documents_of(row):
            ids, mask = oracle(chat[span.ordinal])
            part = slice(span.document_token_offset, span.document_token_offset + span.length)
            here = slice(at, at + span.length)
            assert block.tokens_NC[row, here].tolist() == ids[part]
            np.testing.assert_array_equal(block.loss_mask_NC[row, here], mask[part])
            new = {(span.ordinal, part.start + i) for i in range(1, span.length) if block.loss_mask_NC[row, at + i]}
            assert not new & trained
            trained |= new
            trained_here += len(new)
            at += span.length
        assert trained_here, "a row without targets is left out"
    assert trained == {(number, i) for number, one in enumerate(chat) for i in np.flatnonzero(oracle(one)[1]).tolist()}

    batch = assemble(block, document_mask=packing == "best_fit", step=0, cursor_after=DataCursor("", 0, 1, 1, 0))
    assert batch.num_target_tokens == len(trained) == int((batch.labels_ABT != IGNORED_LABEL).sum())
    expected = np.where(block.loss_mask_NC[:, 1:], block.tokens_NC[:, 1:].astype(np.int64), IGNORED_LABEL)
    kept = batch.labels_ABT[0] != IGNORED_LABEL
    np.testing.assert_array_equal(batch.labels_ABT[0][kept], expected[kept])
    inspection.verify(corpus)


def test_peek_marks_what_is_trained_on(tmp_path: Path) -> None:
    chats.write_jsonl(tmp_path / "a.jsonl", [[USER, ANSWER]])
    corpus = prepare(configuration(tmp_path))
    (row,) = inspection.peek(corpus, 1)
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n"
    assert row.segments[0].marked_text == text


def test_chatml_without_its_tokens_ends_answers_where_completions_stop(tmp_path: Path) -> None:
    chats.write_jsonl(tmp_path / "a.jsonl", [[USER, ANSWER]])
    corpus = prepare(configuration(tmp_path, "tokenizer.special_tokens=[]", "data.sequence_length_tokens=96"))
    (row,) = inspection.peek(corpus, 1)
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|endoftext|>\n"
    assert row.segments[0].marked_text == text.replace("a<|endoftext|>", "⟦a<|endoftext|>⟧")
    (note,) = [note.text for note in corpus.notes if note.kind == "conversations"]
    assert "answers end with <|endoftext|>" in note
    assert note.endswith("""'tokenizer.special_tokens=["<|im_start|>", "<|im_end|>"]'""")
    adapted = ("model.kind=huggingface", "model.name_or_path=base", "adapter.kind=lora", "backend=torch")
    under_adapter = prepare(configuration(tmp_path, "tokenizer.special_tokens=[]", *adapted)).notes
    (adapted_note,) = [one.text for one in under_adapter if one.kind == "conversations"]
    assert adapted_note == note.partition("; to add them")[0], "an adapter would not train them"
    tokenizer = corpus.tokenizer
    assert set(answer_stop_strings(tokenizer)) == {"<|endoftext|>"}
    assert tokenizer.stop_ids == (256,)
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert theirs.apply_chat_template([USER, ANSWER], tokenize=False) == text
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == 256


@pytest.mark.parametrize(("end", "warns"), [("{{ '\\n###\\n' }}", True), ("{{ eos_token }}", False), ("", True)])
def test_a_template_that_ends_answers_without_a_token_is_named(end: str, warns: bool, tmp_path: Path) -> None:
    chats.write_jsonl(tmp_path / "a.jsonl", [[USER, ANSWER]])
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}" + end + "{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    corpus = prepare(configuration(tmp_path, f"tokenizer.chat_template={tmp_path}/t.jinja"))
    found = [note.text for note in corpus.notes if note.kind == "turn_end"]
    assert len(found) == warns, found
    assert bool(corpus.tokenizer.turn_end_ids) != warns, "an export has no other token to stop at"


def test_too_many_bad_conversations_stop_the_build(tmp_path: Path) -> None:
    chats.write_jsonl(tmp_path / "a.jsonl", [[USER]] * 5)
    with pytest.raises(DataError, match="no message has the role assistant"):
        prepare(configuration(tmp_path))


def test_the_recipe_has_the_template_and_text_has_the_old_one(tmp_path: Path) -> None:
    chats.write_jsonl(tmp_path / "a.jsonl", [[USER, ANSWER]])

    def source(*overrides: str) -> dict[str, Any]:
        corpus: Corpus = prepare(configuration(tmp_path, *overrides))
        return dict(corpus.train[0].recipe.source)

    assert source()["chat_fields"] == "messages"
    assert source()["chat_template"] != source("tokenizer.chat_template=plain")["chat_template"]
    (tmp_path / "t.jinja").write_text(BUILT_IN["chatml"])
    assert source()["chat_template"] == source(f"tokenizer.chat_template={tmp_path}/t.jinja")["chat_template"]
    (tmp_path / "text.jsonl").write_text('{"text": "plain"}\n')
    text = f"data.sources=[{{name: a, format: jsonl, paths: [{tmp_path}/text.jsonl]}}]"
    assert source(text).keys() == {"format", "text_field", "unit_bytes"}
    with pytest.raises(ConfigError, match="neither a chat template"):
        source("tokenizer.chat_template=missing.jinja")


def test_augmentations_of_conversations_are_refused(tmp_path: Path) -> None:
    chats.write_jsonl(tmp_path / "a.jsonl", [[USER, ANSWER]])
    with pytest.raises(ConfigError, match="consists of conversations"):
        prepare(configuration(tmp_path, "data.transforms=[{name: token_dropout, args: {fraction: 0.5}}]"))
    (tmp_path / "own.py").write_text("def shout(text):\n    return text.upper()\n")
    with pytest.raises(DataError, match="changes a conversation"):
        prepare(configuration(tmp_path, f"data.transforms=[{{name: '{tmp_path}/own.py:shout'}}]"))


def test_formats_without_a_mask_are_refused(tmp_path: Path) -> None:
    chats.write_jsonl(tmp_path / "a.jsonl", [[USER, ANSWER]])
    with pytest.raises(ConfigError, match="'chats' has conversations, whose loss mask"):
        export_tokens(prepare(configuration(tmp_path)), to="bin", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_template_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = chats.tokenizer().with_chat_template(BUILT_IN["plain"])
    tokenizer.save(tmp_path)
    again = load(tmp_path)
    assert again.chat_template == tokenizer.chat_template
    assert again.fingerprint == tokenizer.fingerprint == chats.tokenizer().fingerprint


# The loss mask in chunks and blocks


def content(mask: bool, row_tokens: int = 21, num_rows: int = 10) -> ChunkContent:
    generator = np.random.default_rng(3)
    return ChunkContent(
        np.sort(generator.integers(0, 99, (num_rows, row_tokens))).astype(np.uint16),
        np.arange(num_rows + 1, dtype=np.uint32),
        np.array([[0, 0, row_tokens]] * num_rows, np.uint32),
        np.zeros(1, DOCUMENT),
        generator.random((num_rows, row_tokens)) < 0.3 if mask else None,
    )


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
def test_a_chunk_keeps_its_mask(codec: str, tmp_path: Path) -> None:
    written, origin = content(mask=True), ChunkOrigin(0, 1, bytes(32), bytes(32))
    data, record = encode_chunk(written, origin, codec=codec, block_rows=3)
    (tmp_path / "a.psc").write_bytes(data)
    read = Chunk.open(tmp_path / "a.psc").verify()
    assert written.loss_mask_RC is not None
    np.testing.assert_array_equal(read.tokens_RC, written.tokens_RC)
    np.testing.assert_array_equal(read.loss_mask_RC, written.loss_mask_RC)
    changed = content(mask=True)
    assert changed.loss_mask_RC is not None
    changed.loss_mask_RC[4, 5] ^= True
    digests = {content_digest(one, 0).hex() for one in (written, changed, content(mask=False))}
    assert len(digests) == 3
    assert record.content in digests


def block(mask: np.ndarray | None, tokens: np.ndarray) -> RowBlock:
    count, length = tokens.shape
    lengths = np.full(count, length, np.int32)
    return RowBlock(tokens, np.arange(count + 1), lengths, np.zeros_like(lengths), mask)


def test_a_row_without_masked_tokens_is_a_row_without_a_mask() -> None:
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, 99, (4, 9)).astype(np.uint16)
    mask = generator.random((4, 9)) < 0.5
    mask[2] = True
    plain, masked = block(None, tokens), block(mask, tokens)
    same = row_digests(plain) == row_digests(masked)
    assert same.tolist() == [False, False, True, False]
    mixed = interleave([plain, masked], [np.array([0, 3, 4, 7]), np.array([1, 2, 5, 6])])
    assert mixed.loss_mask_NC is not None
    assert mixed.loss_mask_NC[[0, 3, 4, 7]].all()
    np.testing.assert_array_equal(mixed.loss_mask_NC[[1, 2, 5, 6]], mask)
    assert row_digests(mixed)[[0, 3, 4, 7]].tolist() == row_digests(plain).tolist()


# How many tokens are trained on


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_the_tokens_trained_on_are_those_of_the_rows(packing: str, is_chat: bool, tmp_path: Path) -> None:
    """The oracle is the loss mask of every row, or every token but the first of a segment."""
    chats.write_jsonl(tmp_path / "a.jsonl", chats.conversations(60, seed=random.randrange(1 << 30)))
    overrides = [f"data.packing={packing}"]
    if not is_chat:
        lines = [json.dumps({"text": "word " * (n % 40)}) for n in range(60)]
        (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
        overrides.append(f"data.sources=[{{name: chats, format: jsonl, paths: ['{tmp_path}/a.jsonl']}}]")
    corpus = prepare(configuration(tmp_path, *overrides))
    reader, expected = corpus.train[0], 0
    block = reader.read_rows(np.arange(reader.num_rows))
    for row in range(reader.num_rows):
        at = 0
        for length in block.segment_lengths[block.row_ptr[row] : block.row_ptr[row + 1]].tolist():
            mask = (
                np.ones(length, np.bool_) if block.loss_mask_NC is None else block.loss_mask_NC[row, at : at + length]
            )
            expected += int(mask[1:].sum())
            at += length
    (report,) = corpus.reports.values()
    assert report.targets == expected > 0
    assert corpus.trained_tokens == f"chats {expected:,} of {report.tokens:,} ({expected / report.tokens:.0%})"


@pytest.mark.parametrize(
    "records",
    [
        [{"messages": [USER, {**ANSWER, "weight": 0}]}] * 5,
        [{"messages": [USER, ANSWER], "label": False}] * 5,
        [{"text": ""}] * 5,
    ],
    ids=["weights", "labels", "empty text"],
)
def test_a_source_that_trains_nothing_is_an_error(records: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = f"name: chats, format: jsonl, paths: ['{tmp_path}/a.jsonl']"
    if "messages" in records[0]:
        source += ", chat_fields: [messages]" + (", label_field: label" if "label" in records[0] else "")
    with pytest.raises(DataError, match=r"No token of the source is trained on|no record to train on"):
        prepare(configuration(tmp_path, f"data.sources=[{{{source}}}]"))
