"""Configurations fitted to the size of a user's text (``--data``, ``presets/own_text.yaml``).

An entry of ``data.sources`` and measurements of its text go in; a ``GivenConfig`` comes out, which overrides may change
like any preset.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

from vorox.core.config.layers.presets import read_preset_file
from vorox.core.config.resolve import GivenConfig
from vorox.core.config.yaml.reader import Json
from vorox.core.schema.tokenizer import TokenizerConfig

_SMALLEST_BPE = 512
_NOT_MERGES = 257
"""Entries of every byte-level vocabulary: the bytes and the end-of-text token."""

_GPT2_IDS = {"kind": "none", "vocab_size": 50257, "end_of_text_id": 50256}
"""Default interpretation of token shards."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Special tokens of the default chat template, for a tokenizer that is trained on the text."""


def expected_ids(tokenizer: TokenizerConfig) -> str:
    """Describe the expected ids in token shards; empty for a run with a tokenizer."""
    if tokenizer.kind != "none":
        return ""
    section = {key: getattr(tokenizer, key) for key in _GPT2_IDS}
    suffix = " as in GPT-2" if section == _GPT2_IDS else ""
    end = tokenizer.end_of_text_id
    ends = "no end of text" if end is None else f"end of text {end:,}"
    return (
        f"Token ids: {tokenizer.vocab_size:,}{suffix}, {ends}. "
        "Otherwise set tokenizer.vocab_size and tokenizer.end_of_text_id"
    )


@functools.cache
def _table() -> dict[str, Json]:
    return read_preset_file("own_text.yaml")


def config_for_text(
    name: str, source: dict[str, Any], *, text_bytes: int, repeated_words: int, opening: str
) -> GivenConfig:
    """Return the configuration for a text.

    Args:
        name: For messages and the run's name.
        source: The entry of ``data.sources``.
        text_bytes: Its approximate size.
        repeated_words: Distinct words that occur at least twice at its beginning. A BPE merges each of them, so the
            text supports a vocabulary of that size; half of it leaves a margin for the holdout.
        opening: Prompt of the samples.
    """
    sizes = cast("list[dict[str, Any]]", _table()["sizes"])
    size = next(entry for entry in sizes if entry["up_to_bytes"] is None or text_bytes <= entry["up_to_bytes"])
    values: dict[str, Any] = copy.deepcopy(cast("dict[str, Any]", _table()["common"]))
    for section, entry in size.items():
        if isinstance(entry, dict):
            values[section] = values.get(section, {}) | entry
    values["data"]["sources"] = [source]
    has_tokens = source["format"] == "bin" or "tokens_field" in source
    tokenizer: dict[str, Any] = dict(_GPT2_IDS)
    if not has_tokens:
        supported = _NOT_MERGES + repeated_words // 2
        vocabulary = min(int(values["tokenizer"]["vocab_size"]), supported)
        tokenizer = {"kind": "byte"} if vocabulary < _SMALLEST_BPE else {
            "kind": "bpe", "vocab_size": vocabulary // 128 * 128,
        }  # fmt: skip
    if source.get("chat_fields"):
        tokenizer["special_tokens"] = list(CHATML_TOKENS)
    if source.get("preference_pairs"):
        values["loss"] = {"name": "dpo"}
        values["model"]["dropout_fraction"] = 0.0  # so that model and reference differ by training only
    values["tokenizer"] = tokenizer
    if opening and not has_tokens and not source.get("chat_fields"):
        values["eval"]["prompts"] = [opening]
    else:
        values["eval"] = {key: value for key, value in values["eval"].items() if not key.startswith("sample")}
    return GivenConfig(name, values)
