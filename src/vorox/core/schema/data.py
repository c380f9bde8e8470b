"""``data`` and ``tokenizer``: which text, cut into which tokens, packed and ordered how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import Section


class SourceConfig(Section):
    """One named corpus."""

    name: str = Field(description="Name of the source in logs and provenance.", pattern=r"^[\w.-]+$")
    format: Literal["python_stdlib", "txt", "jsonl"] = Field(
        description="python_stdlib: the sources of this Python's standard library; txt: a file is a document; "
        "jsonl: a line is a document."
    )
    paths: tuple[str, ...] = Field(
        default=(), description="Files, folders (searched recursively) or globs. Order is sorted."
    )
    text_field: str = Field(default="text", description="Key of the text in a jsonl record.")
    weight: float | str = Field(
        default=1.0,
        description="Share of rows drawn from this source, exact: a decimal number or a fraction such as '1/3'.",
    )
    max_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Refuse to pass over this source more often than this. None: as often as needed.",
    )
    max_bytes: int | None = Field(
        default=None, ge=1, description="Use only the first files up to this many bytes of text. None: everything."
    )
    bad_record_fraction: float = Field(
        default=0.001, ge=0, le=1, description="Unreadable records that are put aside before the build stops."
    )


class ValidationConfig(Section):
    """The held-out split. Which text belongs to it never depends on anything but the text's place."""

    split: Literal["file", "document", "tail"] = Field(
        default="document",
        description="What is held out whole: files, documents, or the tail of every file (character demos).",
    )
    held_out_fraction: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share of the files, documents or bytes that is held out; 0 holds out nothing.",
    )


class CacheConfig(Section):
    """The packed token cache."""

    directory: str | None = Field(
        default=None, description="Root of all caches, shared by runs. None: $VOROX_CACHE, else ~/.cache/vorox."
    )
    codec: Literal["lz4", "lz4hc", "raw"] = Field(default="lz4", description="Compression of the rows.")
    unit_bytes: int = Field(
        default=64 << 20, ge=1, description="Text per unit of work; a unit is built, lost and rebuilt as a whole."
    )
    chunk_rows: int = Field(default=4096, ge=1, description="Rows per chunk file.")
    block_rows: int | None = Field(
        default=None,
        ge=1,
        description="Rows compressed together. None: 1 from 1,024 tokens a row on, more for shorter rows.",
    )


class LoaderConfig(Section):
    """How batches are read ahead. Nothing here changes a single batch."""

    num_threads: int = Field(default=1, ge=0, le=64, description="Reader threads; 0 reads in the training thread.")
    prefetch_batches: int = Field(default=4, ge=1, description="Batches kept ready when there are reader threads.")


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = Field(description="The corpora, mixed by weight.", min_length=1)
    sequence_length_tokens: int = Field(default=256, ge=2, description="Positions of a training row.")
    packing: Literal["best_fit", "concat"] = Field(
        default="best_fit",
        description="best_fit keeps documents whole where they fit; concat cuts the stream of documents.",
    )
    document_mask: bool = Field(
        default=True, description="Documents of one row do not attend to each other and positions restart at each."
    )
    shuffle: bool = Field(default=True, description="Keyed permutation of all rows in every epoch; off: stored order.")
    validation: ValidationConfig = Field(default_factory=ValidationConfig, description="The held-out split.")
    cache: CacheConfig = Field(default_factory=CacheConfig, description="The packed token cache.")
    loader: LoaderConfig = Field(default_factory=LoaderConfig, description="Reading ahead.")


class TokenizerConfig(Section):
    kind: Literal["bpe", "byte", "char", "file"] = Field(
        default="bpe",
        description="bpe: byte-level BPE trained on the sources; byte: 256 bytes; char: the characters that occur; "
        "file: a tokenizer.json.",
    )
    vocab_size: int = Field(default=4096, ge=257, description="Vocabulary of a trained bpe, with its special tokens.")
    train_bytes: int = Field(
        default=8 << 20, ge=1, description="Text that a bpe is trained on: evenly spread documents."
    )
    path: str | None = Field(default=None, description="tokenizer.json, for kind: file.")
    end_of_text: str = Field(
        default="<|endoftext|>", description="Token after every document; added if it is not there."
    )
