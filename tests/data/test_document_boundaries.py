"""What a tokenizer adds to a text, in rows and prompts. The oracle for all ids is transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import base_models
import chats
import tiny_runs
from vorox.core.batch import IGNORED_LABEL, DataCursor
from vorox.core.config import load_config
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.rows import assemble, interleave
from vorox.data.tokenizers.huggingface import load_huggingface
from vorox.data.transfer.token_export import whole_documents
from vorox.training.inference.sampling import encode_prompts

pytestmark = pytest.mark.hf


def corpus_of(directory: Path, records: list[dict[str, Any]], *overrides: str) -> Corpus:
    (directory / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    source: dict[str, Any] = {"name": "a", "format": "jsonl", "paths": [str(directory / "a.jsonl")]}
    if "messages" in records[0]:
        source["chat_fields"] = ["messages"]
    if "chosen" in records[0]:
        source |= {"chat_fields": ["prompt", "chosen", "rejected"], "preference_pairs": True}
    settings = {
        "data": {
            "sources": [source], "sequence_length_tokens": 40 if "text" in records[0] else 400,
            "cache": {"directory": str(directory / "cache"), "unit_bytes": 3000},
            "validation": {"held_out_fraction": 0},
        },
        "tokenizer": {"kind": "huggingface", "path": str(directory / "base")},
        "train": {"num_steps": 1},
    }  # fmt: skip
    (directory / "c.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return prepare(load_config(directory / "c.yaml", overrides))


def random_texts(count: int = 40) -> list[str]:
    chooser = random.Random(random.randrange(1 << 30))
    words = [*tiny_runs.WORDS, "Größe", "日本", "🙂", "\n", "  x", "<s>", "</s>"]
    return [" ".join(chooser.choices(words, k=chooser.randint(1, 60))) for _ in range(count)]


def plain(theirs: Any, text: str) -> list[int]:
    """The ids of a text that spells special tokens as text, with what transformers adds."""
    return theirs(text, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("shape", base_models.SHAPES)
def test_documents_have_the_ids_of_transformers(shape: str, packing: str, tmp_path: Path) -> None:
    theirs = base_models.tokenizer(shape)
    theirs.save_pretrained(tmp_path / "base")
    texts = random_texts()
    corpus = corpus_of(tmp_path, [{"text": text} for text in texts], f"data.packing={packing}")
    reader = corpus.train[0]
    found = [document.tokens.tolist() for document in whole_documents(reader)]
    expected = [plain(theirs, text) for text in texts]
    assert found == [ids if ids[-1] == theirs.eos_token_id else [*ids, theirs.eos_token_id] for ids in expected]
    added = [] if theirs.bos_token_id is None or shape == "qwen" else [theirs.bos_token_id]
    assert list(reader.recipe.start_ids) == added

    block = reader.read_rows(np.arange(reader.num_rows))
    for mask in (True, False):
        batch = assemble(block, document_mask=mask, step=0, cursor_after=DataCursor("", 0, 1, 1, 0))
        targets = batch.labels_ABT[batch.labels_ABT != IGNORED_LABEL]
        assert not set(targets.tolist()) & set(added), "BOS is no target"
        assert batch.num_target_tokens == targets.size
        if mask:
            assert targets.size == sum(len(ids) - 1 for ids in found), "everything else is one, once"
    doubled = interleave([block, block], [np.arange(0, 2 * block.num_rows, 2), np.arange(1, 2 * block.num_rows, 2)])
    twice = assemble(doubled, document_mask=False, step=0, cursor_after=DataCursor("", 0, 1, 1, 0))
    assert twice.num_target_tokens == 2 * batch.num_target_tokens


@pytest.mark.parametrize("shape", base_models.SHAPES)
def test_prompts_have_the_ids_of_transformers(shape: str, tmp_path: Path) -> None:
    theirs = base_models.tokenizer(shape)
    theirs.save_pretrained(tmp_path)
    ours = load_huggingface(TokenizerConfig(kind="huggingface", path=str(tmp_path)))
    texts = random_texts()
    expected = [plain(theirs, text) for text in texts]
    if shape in {"t5", "both"}:  # a text that goes on does not end
        expected = [ids[:-1] for ids in expected]
    assert encode_prompts(ours, texts) == expected
    (empty,) = encode_prompts(ours, [""])
    assert empty == (expected[0][:1] if ours.start_ids else [theirs.eos_token_id])


@pytest.mark.parametrize("shape", ["llama3", "gemma", "mistral", "qwen"])
def test_conversations_are_what_their_template_writes(shape: str, tmp_path: Path) -> None:
    theirs = base_models.tokenizer(shape)
    theirs.save_pretrained(tmp_path / "base")
    chat = [
        [{"role": "user", "content": chats.text(random.Random(i))}, {"role": "assistant", "content": f"x {i}"}]
        for i in range(30)
    ]
    corpus = corpus_of(tmp_path, [{"messages": messages} for messages in chat])
    found = [document.tokens.tolist() for document in whole_documents(corpus.train[0])]
    assert found == [theirs.apply_chat_template(messages, return_dict=False) for messages in chat]
    assert all(ids.count(theirs.bos_token_id) <= 1 for ids in found)


@pytest.mark.parametrize("shape", ["llama3", "qwen"])
def test_a_built_in_template_begins_with_bos_where_texts_do(shape: str, tmp_path: Path) -> None:
    theirs = base_models.tokenizer(shape, chat=False)
    theirs.save_pretrained(tmp_path / "base")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    corpus = corpus_of(tmp_path, [{"messages": messages}])
    (document,) = whole_documents(corpus.train[0])
    assert (document.tokens[0] == theirs.bos_token_id) == (shape == "llama3")
    corpus.tokenizer.save(tmp_path / "saved")
    again = type(theirs).from_pretrained(tmp_path / "saved")
    assert again.apply_chat_template(messages, return_dict=False) == document.tokens.tolist()


def test_pairs_of_texts_begin_with_bos(tmp_path: Path) -> None:
    theirs = base_models.tokenizer("mistral")
    theirs.save_pretrained(tmp_path / "base")
    corpus = corpus_of(tmp_path, [{"prompt": "the step", "chosen": " of a run", "rejected": " of it"}], "loss.name=dpo")
    (document,) = whole_documents(corpus.train[0])
    expected = [*theirs("the step of a run")["input_ids"], theirs.eos_token_id]
    assert document.tokens.tolist() == [*expected, *theirs("the step of it")["input_ids"], theirs.eos_token_id]


def test_tokens_before_a_document_have_no_bytes(tmp_path: Path) -> None:
    base_models.tokenizer("llama3").save_pretrained(tmp_path)
    ours = load_huggingface(TokenizerConfig(kind="huggingface", path=str(tmp_path)))
    text = random_texts(1)[0]
    (ids,) = encode_prompts(ours, [text])
    assert ours.token_byte_lengths()[ids].sum() == len(text.encode())
