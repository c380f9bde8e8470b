"""Measure the text of a configuration before it is complete: tokens, and the longest conversation.

The sources and the tokenizer of a tree go in; sizes come out, from which the defaults of fine-tuning follow (row
length, rows of a step). Only local files are read, and only a sample of their conversations. What cannot be measured is
``None``, with a note where a file cannot be read: the run that reads it reports the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from vorox.core.config.layers.presets import source_presets
from vorox.core.config.layers.tree import ConfigTree
from vorox.core.errors import VoroxError
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data import storage
from vorox.data.corpus.sampled_lengths import row_length_for, sample_lengths
from vorox.data.storage import StoredFile, scheme_of
from vorox.data.text.formats import is_built_in, suffixes
from vorox.data.tokenizers.store import configured_untrained, with_chat_template
from vorox.data.tokenizers.tokenizer import Tokenizer

_LONGEST_TEXT_ROW: Final = 2048
_SHORTEST_TEXT_ROW: Final = 256
_ROWS_OF_A_TEXT: Final = 64
"""Rows that a small text still fills, so that an epoch has steps and a part of it can be held out."""
_BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class MeasuredText:
    """Sizes of a text.

    Attributes:
        train_tokens: Tokens of all sources, as estimated; ``None`` if one is not measured.
        longest_conversation_tokens: Of the sampled ones; ``None`` if there are none, or they are not measured.
        has_conversations: Whether a source has conversations.
        notes: What could not be measured, and why.
    """

    train_tokens: int | None
    longest_conversation_tokens: int | None
    has_conversations: bool
    notes: tuple[str, ...] = ()


def row_length(text: MeasuredText, max_positions_tokens: int | None) -> int | None:
    """Return the row length for a text on trained weights; ``None`` for conversations that were not measured."""
    if text.has_conversations:
        longest = text.longest_conversation_tokens
        return None if longest is None else row_length_for(longest, max_positions_tokens)
    length = _LONGEST_TEXT_ROW
    while (
        text.train_tokens is not None and length > _SHORTEST_TEXT_ROW and text.train_tokens < _ROWS_OF_A_TEXT * length
    ):
        length //= 2
    return min(length, max_positions_tokens or length)


def measure_text(tree: ConfigTree) -> MeasuredText:
    """Measure the sources of a tree, after its tokenizer is known."""
    sources = list(_sources(tree))
    has_conversations = any(source.chat_fields for source in sources)
    total: int | None = 0
    longest: list[int] = []
    notes: list[str] = []
    tokenizer = _tokenizer(tree) if has_conversations else None
    for source in sources:
        files = _files(source)
        if files is None:
            total = None
            continue
        if source.chat_fields and tokenizer is not None and not source.images_field:
            try:
                lengths = sample_lengths(source, files, tokenizer)
            except (VoroxError, OSError) as error:
                notes.append(_unmeasured(source, str(error)))
                total = None
                continue
            if not lengths.tokens:
                why = f" ({lengths.unreadable})" if lengths.unreadable else ""
                notes.append(_unmeasured(source, f"no record at the start of its files can be read{why}"))
                total = None
                continue
            longest += lengths.tokens
            total = None if total is None else total + lengths.estimated_tokens
        elif total is not None:
            total += sum(file.size_bytes for file in files) // _BYTES_PER_TOKEN
    return MeasuredText(total or None, max(longest, default=None), has_conversations, tuple(notes))


def _unmeasured(source: SourceConfig, reason: str) -> str:
    return f"The conversations of {source.name} are not measured: {reason}. The row length does not follow from them"


def _sources(tree: ConfigTree) -> Iterator[SourceConfig]:
    entries = tree.get("data.sources")
    for entry in entries if isinstance(entries, list) else []:
        values: dict[str, Any] = entry if isinstance(entry, dict) else {}
        try:
            yield SourceConfig.model_validate({**source_presets().get(str(values.get("preset")), {}), **values})
        except ValidationError:
            continue


def _files(source: SourceConfig) -> list[StoredFile] | None:
    """Return the files of a source on this machine; ``None`` if it is elsewhere, or cannot be listed."""
    is_local = all(scheme_of(path) is None for path in source.paths)
    if not is_built_in(source) or source.has_tokens or not source.paths or not is_local:
        return None
    try:
        return [file for path in source.paths for file in storage.list_files(path, suffixes(source))]
    except (VoroxError, OSError):
        return None


def _tokenizer(tree: ConfigTree) -> Tokenizer | None:
    values = tree.get("tokenizer")
    try:
        section = TokenizerConfig.model_validate(values if isinstance(values, dict) else {})
        tokenizer = configured_untrained(section)
        return None if tokenizer is None else with_chat_template(tokenizer, section)
    except (VoroxError, OSError, ValidationError):
        return None
