"""Special tokens that the texts of a source spell: they are encoded as text, which is seldom what is meant.

A source and special tokens go in; a message comes out, counted in the first documents of some files. Rendered chats in
a text column and documents that ``<|endoftext|>`` separates have them. Conversations refuse them, and token shards have
no text, so neither is read. Nothing is refused; what cannot be read is left to the build.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from vorox.core.errors import VoroxError
from vorox.data.storage import scheme_of
from vorox.data.text.file_content import limits_of, open_content
from vorox.data.text.formats import has_fields, is_built_in
from vorox.data.text.record_sample import QUICK_BYTES, first_records, further_files
from vorox.data.text.sources import Source

_TEXT_BYTES = 1 << 20
_SHOWN = 3


def may_spell_tokens(source: Source) -> bool:
    """Whether a source has text that may spell special tokens, in a format of which a sample is cheap."""
    config = source.config
    return not config.chat_fields and not config.has_tokens and is_built_in(config)


def spelled_tokens(source: Source, special_tokens: Sequence[str], end_of_text: str) -> str | None:
    """Return the message about a text source whose first documents spell special tokens; ``None`` if none does."""
    config = source.config
    if not may_spell_tokens(source) or not special_tokens:
        return None
    pattern = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))
    counts: dict[str, int] = {}
    total = spelling = 0
    with contextlib.suppress(VoroxError, OSError):
        for text in _first_texts(source):
            found = dict.fromkeys(pattern.findall(text))
            counts.update((token, counts.get(token, 0) + 1) for token in found)
            total, spelling = total + 1, spelling + bool(found)
    if not spelling:
        return None
    tokens = sorted(counts, key=lambda token: -counts[token])
    named = ", ".join(tokens[:_SHOWN]) + (f" and {len(tokens) - _SHOWN:,} more" if len(tokens) > _SHOWN else "")
    verb = "spells" if spelling == 1 else "spell"
    whose = "the first document" if total == 1 else f"{spelling:,} of the first {total:,} documents"
    remedy = f"one document per record, each of which then ends with {end_of_text}"
    if tokens != [end_of_text]:
        remedy = f"conversations as messages, with {source.key}.chat_fields=[messages], or {remedy}"
    return (
        f"{whose} of {config.name} {verb} special tokens of the tokenizer: {named}; they are read as text, not as "
        f"these tokens; give {remedy}"
    )


def _first_texts(source: Source) -> Iterator[str]:
    """Yield the first texts of some files at even distances; of a store the first bytes, which the listing reads."""
    config, filled = source.config, [file for file in source.stored if file.size_bytes]
    is_remote = bool(filled) and scheme_of(filled[0].uri) is not None
    for file in filled[:1] if is_remote else further_files(filled):
        if has_fields(config):
            rows, _ = first_records(config, file, QUICK_BYTES if is_remote else None)
            yield from (value for row in rows if isinstance(value := _field(row, config.text_field), str))
        else:
            with open_content(file, 0, QUICK_BYTES if is_remote else _TEXT_BYTES, limits_of(config)) as reader:
                yield reader.read(_TEXT_BYTES).decode("utf-8", "ignore")


def _field(row: Mapping[str, object], name: str) -> object:
    """Return the value of a column, or of a field inside objects, which is named by its path."""
    if name in row:
        return row[name]
    first, _, rest = name.partition(".")
    inside = row.get(first)
    return _field(cast("Mapping[str, object]", inside), rest) if rest and isinstance(inside, dict) else None
