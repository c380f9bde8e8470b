"""Preference pairs from records to the rows of a batch, and settings that contradict them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.config import load_config
from vorox.core.config.config_for_text import config_for_text
from vorox.core.errors import ConfigError
from vorox.core.preference_pairs import count_pairs, find_pairs
from vorox.data.cache.units.packing import pack, split_pairs
from vorox.data.chat.conversations import read_pair
from vorox.data.documents import Message, PreferencePair, UnreadableRecord
from vorox.data.text.format_detection import detect_source
from vorox.training.origin.origin_checks import check_origin

THREE, TWO = ("prompt", "chosen", "rejected"), ("chosen", "rejected")


def talk(*contents: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def messages(*contents: str) -> tuple[Message, ...]:
    return tuple(Message(**message) for message in talk(*contents))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "p", "chosen": " a", "rejected": " b"}, ("p", " a", " b")),
        ({"chosen": "p a", "rejected": "p b"}, ("p", " a", " b")),
        ({"chosen": "pa", "rejected": "pb c"}, ("p", "a", "b c")),
        ({"chosen": "ab", "rejected": "cd"}, ("", "ab", "cd")),
    ],
)
def test_texts_start_with_their_prompt_as_in_trl(record: dict[str, str], expected: tuple[str, str, str]) -> None:
    pair = read_pair(record, tuple(record))
    found = (pair.prompt[0].content, pair.chosen[0].content, pair.rejected[0].content)
    assert found == expected
    assert pair.is_text


def extract_anthropic_prompt(text: str) -> str:
    """As in the DPO example of TRL for HH-RLHF."""
    return text[: text.rfind("\n\nAssistant:") + len("\n\nAssistant:")]


@pytest.mark.parametrize("answers", [(" Yes.", " Yes. And more."), (" Yes. And more.", " Yes."), (" Yes.", " No.")])
def test_dialogues_are_split_at_the_turn_of_the_answer_as_in_trl(answers: tuple[str, str]) -> None:
    before = "\n\nHuman: Is it?\n\nAssistant: It is.\n\nHuman: Sure?\n\nAssistant:"
    pair = read_pair({name: before + answer for name, answer in zip(TWO, answers, strict=True)}, TWO)
    assert pair.prompt[0].content == extract_anthropic_prompt(before + answers[0])
    assert (pair.chosen[0].content, pair.rejected[0].content) == answers


def test_conversations_start_with_their_prompt() -> None:
    whole = {"chosen": talk("q", "a", "r", "good"), "rejected": talk("q", "a", "r", "bad")}
    named = {"prompt": talk("q", "a", "r"), "chosen": talk("", "good")[1:], "rejected": talk("", "bad")[1:]}
    expected = PreferencePair(messages("q", "a", "r"), messages("", "good")[1:], messages("", "bad")[1:])
    assert read_pair(whole, TWO) == read_pair(named, THREE) == expected


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "q", "chosen": talk("q", "a"), "rejected": talk("q", "b")}, "texts or of lists of messages"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is null"),
        ({"chosen": "p a", "rejected": "p a b"}, "write the prompt as a column of its own"),
        ({"chosen": "p a", "rejected": "p a"}, "are equal"),
        ({name: json.dumps(talk("q", name)) for name in TWO}, "'chosen' and 'rejected' hold messages written as texts"),
        ({name: str(talk("q", name)) for name in TWO}, "hold messages written as texts"),
        ({"chosen": talk("q", "a"), "rejected": talk("q")}, "no message has the role assistant"),
    ],
)
def test_pairs_that_cannot_be_compared_are_bad_records(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableRecord, match=reason):
        read_pair(record, tuple(record))


def test_both_answers_are_segments_of_one_row() -> None:
    chooser = np.random.default_rng()
    halves_D2 = chooser.integers(2, 24, (200, 2))
    packing = split_pairs(pack(halves_D2.sum(1), 50), halves_D2[:, 0])
    places = {int(d): [] for d in range(200)}
    for row in range(packing.num_rows):
        part = slice(packing.row_ptr[row], packing.row_ptr[row + 1])
        documents, offsets = packing.documents[part], packing.token_offsets[part]
        assert packing.lengths[part].sum() <= 50
        np.testing.assert_array_equal(documents[::2], documents[1::2])
        assert (offsets[::2] == 0).all()
        np.testing.assert_array_equal(offsets[1::2], halves_D2[documents[1::2], 0])
        np.testing.assert_array_equal(packing.lengths[part].reshape(-1, 2), halves_D2[documents[::2]])
        for document in documents[::2].tolist():
            places[document].append(row)
    assert all(len(rows) == 1 for rows in places.values())


def test_the_targets_of_a_batch_are_found() -> None:
    chooser = np.random.default_rng()
    segments_BT, labels_BT = np.zeros((3, 60), np.int32), chooser.integers(0, 9, (3, 60), np.int32)
    segments_BT[0, :54] = np.repeat(np.arange(1, 7), 9)
    segments_BT[2, :52] = np.repeat(np.arange(1, 5), 13)  # the second row is padding
    labels_BT[chooser.random((3, 60)) < 0.6] = IGNORED_LABEL
    labels_BT[segments_BT == 0] = IGNORED_LABEL
    labels_BT[0, 9:18] = IGNORED_LABEL  # the rejected answer of the first pair
    batch = batch_of(segments_BT, labels_BT)
    found = find_pairs(batch, 0)
    expected: list[list[int]] = []
    for row, pair in ((row, pair) for row in range(3) for pair in range(3)):
        halves = [np.flatnonzero((segments_BT[row] == s) & (labels_BT[row] >= 0)) for s in (2 * pair + 1, 2 * pair + 2)]
        if all(len(half) for half in halves):
            expected += [(60 * row + half).tolist() for half in halves]
    assert len(found.target_HL) == len(expected)
    padded = np.append(found.position_K, -1)
    assert [[p for p in padded[row].tolist() if p >= 0] for row in found.target_HL] == expected
    np.testing.assert_array_equal(found.label_K, labels_BT.reshape(-1)[found.position_K])
    assert (found.masked_P, count_pairs(batch)) == (None, len(expected) // 2)

    row, pair = divmod(int(chooser.integers(5)), 3)  # the third row has two pairs
    chosen_BT = np.isin(segments_BT, (2 * pair + 1, 2 * pair + 2)) & (np.arange(3)[:, None] == 2 * row)
    is_masked_BT = chosen_BT & (labels_BT != IGNORED_LABEL)
    filled_BT = np.where(is_masked_BT, IGNORED_LABEL, labels_BT)
    masked_batch = batch_of(segments_BT, filled_BT, is_masked_BT)
    masked = find_pairs(masked_batch, 0)
    assert count_pairs(masked_batch) == len(expected) // 2, "the divisor stays"
    np.testing.assert_array_equal(masked.position_K, found.position_K)
    is_masked_K = is_masked_BT.reshape(-1)[found.position_K]
    np.testing.assert_array_equal(masked.label_K, np.where(is_masked_K, 0, found.label_K))
    kept_H = [not is_masked_BT.reshape(-1)[half].any() for half in expected]
    for here, before, is_kept in zip(masked.target_HL, found.target_HL, kept_H, strict=True):
        np.testing.assert_array_equal(here, before if is_kept else len(found.position_K))
    masked_P = [False] * (len(expected) // 2) if masked.masked_P is None else masked.masked_P.tolist()
    assert masked_P == [not is_kept for is_kept in kept_H[::2]]


def batch_of(segments_BT: np.ndarray, labels_BT: np.ndarray, is_masked_BT: np.ndarray | None = None) -> Batch:
    return Batch(
        0, labels_BT[None], labels_BT[None], segments_BT[None], None, np.zeros((1, 3), np.uint64), 0,
        DataCursor("", 0, 0, 0, 0), masked_targets_ABT=None if is_masked_BT is None else is_masked_BT[None],
    )  # fmt: skip


def test_data_detects_pairs_and_sets_the_loss(tmp_path: Path) -> None:
    for name, record, fields in (
        ("texts", {"prompt": "q", "chosen": "a", "rejected": "b"}, [*THREE]),
        ("talks", {"prompt": "q", "messages": talk("q", "a"), **dict.fromkeys(TWO, talk("q", "a"))}, [*TWO]),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps(record) + "\n")
        found = detect_source([str(file)])
        assert (found.source["chat_fields"], found.source["preference_pairs"]) == (fields, True)
        assert "is a preference pair in" in found.summary
        values = config_for_text(name, found.source, text_bytes=100, repeated_words=1, opening="").values
        assert values["loss"] == {"name": "dpo"}
        assert values["model"]["dropout_fraction"] == 0


GOOD, BAD = talk("", "good")[1:], talk("", "bad")[1:]
WHOLE = {"chosen": talk("q", "good"), "rejected": talk("q", "bad")}
TEXTS = {"chosen": "good", "rejected": "bad"}


def read_detected(tmp_path: Path, record: dict[str, Any]) -> PreferencePair:
    file = tmp_path / "pairs.jsonl"
    file.write_text(f"{json.dumps(record)}\n" * 3)
    found = detect_source([str(file)]).source
    assert found["preference_pairs"]
    return read_pair(record, found["chat_fields"])


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": talk("q"), "chosen": GOOD, "rejected": BAD},  # LLaMA-Factory
        {"context": talk("q"), "chosen": GOOD, "rejected": BAD},
        {"prompt": talk("q"), **WHOLE},
        {"prompt": talk("q"), "messages": talk("q", "good"), "chosen": GOOD, "rejected": BAD},
        {"messages": talk("q"), **WHOLE},
        {"messages": talk("q", "good"), **WHOLE},  # ultrafeedback_binarized
    ],
)
def test_the_prompt_of_a_pair_is_read_once(tmp_path: Path, record: dict[str, Any]) -> None:
    expected = PreferencePair(messages("q"), messages("", "good")[1:], messages("", "bad")[1:])
    assert read_detected(tmp_path, record) == expected


def test_the_prompt_of_a_pair_of_texts_is_read_beside_messages_that_repeat_it(tmp_path: Path) -> None:
    pair = read_detected(tmp_path, {"prompt": "q", "messages": talk("q", "good"), **TEXTS})
    assert [one.content for one in (*pair.prompt, *pair.chosen, *pair.rejected)] == ["q", "good", "bad"]


@pytest.mark.parametrize(
    ("record", "what", "remedy"),
    [
        ({"messages": talk("q", "a", "r"), **TEXTS}, "'messages' may", "'messages' is their prompt"),
        ({"context": talk("q", "a", "r"), **TEXTS}, "'context' may", "'context' is their prompt"),
        ({"prompt": talk("q"), **TEXTS}, "'prompt' may", "'prompt' is their prompt"),
        ({"messages": talk("r", "a", "q"), **WHOLE}, "'messages' may", "chat_fields=[chosen,rejected] to leave it out"),
        ({"messages": talk("q", "other"), "chosen": GOOD, "rejected": BAD}, "'messages' may", "to leave it out"),
        ({"prompt": "q", "messages": talk("r", "good"), **TEXTS}, "'messages' may", "[prompt,chosen,rejected]"),
        ({"prompt": talk("r"), **WHOLE}, "may repeat the prompt 'prompt'", "chat_fields=[chosen,rejected] to read it"),
        ({"prompt": talk("q"), "chosen": talk("q", "good"), "rejected": BAD}, "may repeat", "[chosen,rejected]"),
        ({"prompt": "q", "chosen": "q good", "rejected": "q bad"}, "may repeat the prompt",
         "chat_fields=[prompt,chosen,rejected] to write it before both"),
    ],
)  # fmt: skip
def test_a_prompt_is_neither_lost_nor_written_twice(
    tmp_path: Path, record: dict[str, Any], what: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_detected(tmp_path, record)
    assert what in caught.value.what
    assert remedy in caught.value.hint


def test_settings_that_contradict_pairs_are_refused(tmp_path: Path) -> None:
    tiny_runs.configuration(tmp_path)
    file = tmp_path / "tiny.yaml"
    fields = ["data.sources.0.chat_fields=[prompt,chosen,rejected]", "data.sources.0.preference_pairs=true"]
    dpo = [*fields, "loss.name=dpo", "backend=torch"]
    with pytest.raises(ConfigError, match="trained weights to start from"):
        check_origin(load_config(file, dpo))
    stage = '[{"start_tokens": 0, "sequence_length_tokens": 8}]'
    for overrides, words in (
        (fields, "set loss.name=dpo"),
        (["loss.name=dpo", "backend=torch"], "trains on preference pairs"),
        ([*dpo, "data.sources.0.chat_fields=[chosen]"], "is one column"),
        ([*dpo, "data.packing=concat"], "set data.packing=best_fit"),
        ([*dpo, "data.document_mask=false"], "set data.document_mask=true"),
        ([*dpo, f"data.stages={stage}"], "both answers of a pair stay in one row"),
        ([*dpo, "parallel.fsdp_size=2", "train.micro_batch_sequences=2"], "is not supported with parallel.fsdp_size=2"),
        (["loss.dpo_beta=0.2"], "it needs loss.name=dpo"),
        ([*dpo, "loss.label_smoothing_fraction=0.1"], "it needs loss.name=cross_entropy"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(file, overrides)
