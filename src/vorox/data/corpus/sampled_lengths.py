"""Lengths of documents in tokens, from a sample of a source.

Files and a tokenizer go in; the lengths of the first documents of some of them come out. They decide how long the rows
of a run on conversations are, and report how many conversations are longer than a row. Invariant: the sample is a
function of the files, so that the same command finds the same lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vorox.core.schema.data import SourceConfig
from vorox.data.chat.template import rendered
from vorox.data.documents import BadRecord, Document, TokenDocument, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.formats import read_records, split_blocks
from vorox.data.tokenizers.tokenizer import Tokenizer

_FILES, _DOCUMENTS_PER_FILE, _BYTES_PER_FILE = 16, 128, 1 << 20
_BYTES_PER_TOKEN = 4
_ENDS = 2
"""End-of-text tokens of a conversation, or of both of a preference pair."""
_SHORTEST_ROW, _LONGEST_ROW = 256, 4096
"""Row lengths that are chosen; a longer one, which takes more memory, is for the user to set."""


@dataclass(frozen=True, slots=True)
class SampledLengths:
    """Lengths of some documents of a source.

    Attributes:
        tokens: Tokens of each sampled document, its end included.
        total_bytes: Bytes of all files.
        is_complete: Whether these are all documents.
        unreadable: Why the first sampled record that cannot be read could not be; empty if all could.
    """

    tokens: tuple[int, ...]
    total_bytes: int
    is_complete: bool
    unreadable: str = ""

    @property
    def estimated_tokens(self) -> int:
        """Tokens of all documents; an estimate by the bytes of the files, unless all were sampled."""
        return sum(self.tokens) if self.is_complete else max(sum(self.tokens), self.total_bytes // _BYTES_PER_TOKEN)

    def count_longer_than(self, num_tokens: int) -> int:
        """Return the number of sampled documents of more tokens."""
        return sum(length > num_tokens for length in self.tokens)


def sample_lengths(source: SourceConfig, files: Sequence[StoredFile], tokenizer: Tokenizer) -> SampledLengths:
    """Tokenize the first documents of evenly spaced files.

    Args:
        source: Its configuration.
        files: Its files.
        tokenizer: The tokenizer; conversations are rendered by its chat template.

    Raises:
        DataError: A file cannot be read, or is not in the source's format.
    """
    spaced: list[int] = np.unique(np.linspace(0, len(files) - 1, min(len(files), _FILES)).astype(int)).tolist()
    lengths: list[int] = []
    unreadable = ""
    is_complete = len(spaced) == len(files)
    for index in spaced:
        file = files[index]
        if not file.size_bytes:
            continue
        blocks = split_blocks(source, file, 0, None, _BYTES_PER_FILE)
        block = next(blocks, None)
        if block is None:
            continue
        span = UnitSpan(index, block.start_byte, block.end_byte, 0)
        records = read_records(source, file, span, lambda _: True)
        documents = [
            rendered(record, tokenizer.chat_template) if isinstance(record, Document) and record.messages else record
            for record in itertools.islice(records, _DOCUMENTS_PER_FILE)
        ]
        is_complete = is_complete and next(records, None) is None and next(blocks, None) is None
        lengths += _lengths(documents, tokenizer)
        reasons = (record.reason for record in documents if isinstance(record, BadRecord))
        unreadable = unreadable or next(reasons, "")
    return SampledLengths(tuple(lengths), sum(file.size_bytes for file in files), is_complete, unreadable)


def _lengths(records: Iterable[object], tokenizer: Tokenizer) -> list[int]:
    texts: list[str] = []
    chats: list[str] = []
    lengths: list[int] = []
    for record in records:
        if isinstance(record, TokenDocument):
            lengths.append(len(record.tokens))
            continue
        if isinstance(record, Document) and record.text:
            (chats if record.answers else texts).append(record.text)
    if chats:
        lengths += [len(ids) + _ENDS for ids, _ in tokenizer.encode_with_specials(chats)]
    if texts:
        lengths += [len(ids) + 1 for ids in tokenizer.encode_batch(texts)]
    return lengths


def row_length_for(longest_tokens: int, max_positions_tokens: int | None) -> int:
    """Return the row length that holds conversations of a length: a power of two, within the model's positions."""
    wanted = max(_SHORTEST_ROW, 1 << max(0, longest_tokens - 1).bit_length())
    return min(wanted, _LONGEST_ROW, max_positions_tokens or _LONGEST_ROW)


def cut_conversations(name: str, lengths: SampledLengths, row_tokens: int, *, are_pairs: bool) -> str | None:
    """Return the message about conversations that are longer than a row; ``None`` without any.

    Args:
        name: The source.
        lengths: Its sample.
        row_tokens: Row length.
        are_pairs: Whether the documents are preference pairs, which are left out instead of cut.
    """
    longer = lengths.count_longer_than(row_tokens + 1)  # a row has one token more than the model sees
    if not longer:
        return None
    total = len(lengths.tokens)
    share = f"{longer:,} of {total:,}" if lengths.is_complete else f"about {100 * longer / total:.0f}% of the"
    kind = "preference pairs" if are_pairs else "conversations"
    what = "are left out" if are_pairs else "are cut: their answers continue in rows without the question"
    needed = 1 << (max(lengths.tokens) - 1).bit_length()
    return (
        f"{share} {kind} of {name} are longer than a row of {row_tokens:,} tokens and {what}; set "
        f"data.sequence_length_tokens={needed}, if the model has so many positions, or drop long ones with the "
        "transform token_length"
    )
