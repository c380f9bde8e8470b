"""Lengths of conversations in tokens, from a sample; the oracle is ``apply_chat_template`` of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import chats
from vorox.core.schema.data import SourceConfig
from vorox.data import storage
from vorox.data.corpus.sampled_lengths import SampledLengths, cut_conversations, row_length_for, sample_lengths


def source(folder: Path) -> SourceConfig:
    return SourceConfig.model_validate(
        {"name": "chats", "format": "jsonl", "paths": [str(folder)], "chat_fields": ["messages"]}
    )


def test_lengths_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = chats.tokenizer().with_chat_template(chats.MARKED)
    oracle = chats.Oracle(tmp_path / "tokenizer", tokenizer, chats.MARKED)
    folder = tmp_path / "chats"
    folder.mkdir()
    written = chats.conversations(30, seed=random.randrange(1 << 30))
    chats.write_jsonl(folder / "a.jsonl", written[:10])
    chats.write_jsonl(folder / "b.jsonl", written[10:])
    found = sample_lengths(source(folder), storage.list_files(str(folder), (".jsonl",)), tokenizer)
    assert found.is_complete
    assert all(0 < ours - len(oracle(chat)[0]) <= 2 for ours, chat in zip(found.tokens, written, strict=True)), (
        "its end"
    )
    assert found.estimated_tokens == sum(found.tokens)
    longest = max(len(oracle(chat)[0]) for chat in written)
    assert row_length_for(max(found.tokens), None) >= longest


def test_a_large_source_is_sampled_and_always_equally(tmp_path: Path) -> None:
    tokenizer = chats.tokenizer().with_chat_template(chats.MARKED)
    folder = tmp_path / "chats"
    folder.mkdir()
    for number in range(40):
        chats.write_jsonl(folder / f"{number:02}.jsonl", chats.conversations(200, seed=number))
    files = storage.list_files(str(folder), (".jsonl",))
    found = sample_lengths(source(folder), files, tokenizer)
    assert not found.is_complete
    assert len(found.tokens) == 16 * 128
    assert found == sample_lengths(source(folder), files, tokenizer)
    assert found.estimated_tokens > sum(found.tokens)


@pytest.mark.parametrize(
    ("longest", "positions", "expected"),
    [(20, None, 256), (257, None, 512), (700, 2048, 1024), (700, 512, 512), (1024, None, 1024), (9000, 131072, 4096)],
)
def test_rows_hold_the_longest_conversation_within_the_positions(
    longest: int, positions: int | None, expected: int
) -> None:
    assert row_length_for(longest, positions) == expected


def test_cut_conversations_are_counted_with_the_setting_to_type() -> None:
    lengths = SampledLengths((100, 257, 258, 700), 9_000, is_complete=True)
    text = cut_conversations("chats", lengths, 256, are_pairs=False)
    assert text is not None
    assert text.startswith("2 of 4 conversations of chats are longer than a row of 256 tokens and are cut")
    assert "data.sequence_length_tokens=1024" in text
    assert cut_conversations("chats", lengths, 700, are_pairs=False) is None
    sampled = SampledLengths((100, 300), 9_000, is_complete=False)
    about = cut_conversations("pairs", sampled, 256, are_pairs=True)
    assert about is not None
    assert about.startswith("about 50% of the preference pairs of pairs")
    assert "left out" in about
