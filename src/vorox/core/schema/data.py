"""``data`` and ``tokenizer``: which text, cut into which tokens, packed and ordered how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from vorox.core.schema.section import ImportPath, Section


class TransformConfig(Section):
    """One function between reading and packing."""

    name: str = Field(
        description="length, token_length, repetition, exact_duplicates, near_duplicates, fill_in_the_middle, "
        "token_dropout, local_model, or a function of your own as my_package.my_module:function or "
        "path/to/file.py:function.",
    )
    args: Mapping[str, Any] = Field(default_factory=dict, description="Its arguments by name.")
    splits: tuple[Literal["train", "validation"], ...] = Field(
        default=("train",),
        min_length=1,
        description="Which text it is applied to; held-out text stays as it is unless asked.",
    )


class SourceConfig(Section):
    """One named corpus."""

    name: str = Field(description="Name of the source in logs and provenance.", pattern=r"^[\w.-]+$")
    preset: str | None = Field(
        default=None,
        description="A named source, such as fineweb-edu, c4 or stdlib: fills in format, paths and fields where this "
        "entry does not say them itself.",
    )
    format: Literal["python_stdlib", "txt", "jsonl", "csv", "parquet", "arrow", "mds", "bin"] | ImportPath = Field(
        description="python_stdlib: the sources of this Python's standard library, without tests and generated tables; "
        "txt: a file is a document; "
        "jsonl, csv, parquet: a line or row is a document; arrow: folders of datasets.save_to_disk, a row is "
        "a document; mds: folders of mosaicml-streaming, a sample is a document; bin: token shards, a document "
        "up to each end of text. All but bin may also be .gz or .zst. Or a function of your own: f(content) yields the "
        "texts in the bytes of a file."
    )
    paths: tuple[str, ...] = Field(
        default=(),
        description="Files, folders (searched recursively), globs, or hf://OWNER/NAME for a dataset of the Hugging "
        "Face Hub. A function of your own, package.module:function, returns a list of them. Order is sorted.",
    )
    fallback: tuple[str, ...] = Field(
        default=(),
        description="Used, and said aloud, when the paths do not exist or cannot be reached: other paths of the same "
        "format, or the name of one named source.",
    )
    hf_config: str | None = Field(
        default=None, description="Configuration (subset) of a dataset of the hub. None: its default one."
    )
    hf_split: str | None = Field(default=None, description="Split of a dataset of the hub. None: train.")
    revision: str | None = Field(
        default=None, description="Commit, tag or branch of a dataset of the hub. None: the newest."
    )
    text_field: str = Field(
        default="text", description="Key or column of the text; a.b is the key b inside of a, unless a key is a.b."
    )
    tokens_field: str | None = Field(
        default=None, description="Column of an mds folder with token ids, read in place of text. None: text_field is."
    )
    metadata_fields: tuple[str, ...] = Field(
        default=(), description="Other keys or columns that travel with a document when it is looked at or streamed."
    )
    delimiter: str = Field(
        default=",", pattern=r'^[^"\r\n\x80-\uffff]$', description="What separates the columns of a csv."
    )
    tokenizer: str | None = Field(
        default=None,
        description="What the token shards were written with: the tokenizer.path or the fingerprint of this run's "
        "tokenizer, with which it must agree.",
    )
    end_of_text_id: int | None = Field(
        default=None, ge=0, description="Id that ends a document in token shards. None: that of the tokenizer."
    )
    ids_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = Field(
        default=None,
        description="What the ids are where the files do not say it: token shards without a header (unsigned), or an "
        "mds column of bytes.",
    )
    max_record_bytes: int = Field(
        default=128 << 20,
        ge=1,
        description="A larger line or row is put aside without being loaded; a txt file is cut at cache.unit_bytes.",
    )
    max_decompressed_bytes: int = Field(
        default=1 << 40, ge=1, description="Refuse a compressed file that comes to more than this."
    )
    max_decompression_ratio: float = Field(
        default=1000.0,
        ge=1,
        description="Refuse a compressed file that comes to so many times its size, from 256 MiB on.",
    )
    weight: float | str = Field(
        default=1.0,
        description="Share of rows drawn from this source, exact: a decimal number or a fraction such as '1/3'.",
    )
    max_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Pass over this source no more often than this (see on_exhausted). None: as often as needed.",
    )
    on_exhausted: Literal["error", "drop", "repeat"] = Field(
        default="error",
        description="When max_epochs are used up: error refuses the run; drop goes on without the source, its share "
        "going to the others, as a recorded event; repeat passes over it again.",
    )
    split_by: Literal["tokens_per_document", "bytes_per_token"] | None = Field(
        default=None,
        description="Divide the source into parts by this statistic of its chunks, to be weighed in data.stages as "
        "NAME.PART: a curriculum by difficulty. bytes_per_token is that of the chunk's unit.",
    )
    split_quantiles: tuple[float, ...] = Field(
        default=(0.5,), description="Where the parts meet, as shares of the rows that are there when the run begins."
    )
    split_names: tuple[str, ...] = Field(
        default=("easy", "hard"), description="Names of the parts, from the lowest statistic up."
    )
    max_bytes: int | None = Field(
        default=None, ge=1, description="Use only the first files up to this many bytes of text. None: everything."
    )
    transforms: tuple[TransformConfig, ...] | None = Field(
        default=None, description="Functions for this source instead of data.transforms. None: those."
    )
    bad_record_fraction: float = Field(
        default=0.001, ge=0, le=1, description="Unreadable records that are put aside before the build stops."
    )
    damaged_files: Literal["stop", "keep_readable"] = Field(
        default="stop",
        description="A gzip or zstd file that is damaged or ends early: stop the build with its name; or keep the "
        "records that lie whole before the damage, put the rest of the file aside, and say so.",
    )
    max_retries_per_unit: int = Field(
        default=60,
        ge=0,
        description="Failed tries at a store (S3, GCS, hub, web) that one unit of work may have before building "
        "stops; 60 are some 13 minutes of an outage.",
    )
    stall_seconds: float = Field(
        default=20.0,
        gt=0,
        description="Without a byte from a store until a try is given up; the next goes on behind the last byte.",
    )

    @property
    def has_tokens(self) -> bool:
        """Whether its documents are token ids, not text."""
        return self.format == "bin" or self.tokens_field is not None


class ValidationConfig(Section):
    """The held-out split. Which text belongs to it never depends on anything but the text's place."""

    split: Literal["auto", "named", "file", "document", "tail"] = Field(
        default="auto",
        description="What is held out whole. file, document: a share of them; tail: the end of every file; named: the "
        "files with val or validation in their names or in those of their folders. auto: the first that fits a source: "
        "named for token shards and folders with splits, file where there are many files, document where records are, "
        "else tail; what was chosen is shown.",
    )
    held_out_fraction: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share of the files, documents or bytes that is held out; 0 holds out nothing.",
    )
    sources: tuple[SourceConfig, ...] = Field(
        default=(),
        description="Text to validate on, in place of a held-out share of data.sources; its files are left out of "
        "training.",
    )


class CacheConfig(Section):
    """The packed token cache."""

    directory: str | None = Field(
        default=None, description="Root of all caches, shared by runs. None: $VOROX_CACHE, else ~/.cache/vorox."
    )
    codec: Literal["lz4", "lz4hc", "zstd", "raw"] = Field(default="lz4", description="Compression of the rows.")
    unit_bytes: int = Field(
        default=64 << 20, ge=1, description="Text per unit of work; a unit is built, lost and rebuilt as a whole."
    )
    chunk_rows: int = Field(default=4096, ge=1, description="Rows per chunk file.")
    block_rows: int | None = Field(
        default=None,
        ge=1,
        description="Rows compressed together. None: 1 from 1,024 tokens a row on, more for shorter rows.",
    )
    grow: bool = Field(
        default=False,
        description="Take up files that are new into the cache that was begun with the others, instead of building "
        "another one. Every file that it was built from must still be there unchanged.",
    )


class PipelineConfig(Section):
    """How a cache is built in stages that work at the same time. Nothing here changes a single row."""

    staged: bool = Field(
        default=True, description="Stages in threads of their own; off: one after the other in the building thread."
    )
    fetch_threads: int = Field(default=2, ge=1, le=64, description="Units of remote text fetched at once.")
    filter_threads: int = Field(default=1, ge=1, le=64, description="Threads that apply transforms to text.")
    tokenize_threads: int = Field(
        default=1, ge=1, le=64, description="Batches tokenised at once; the library has threads of its own inside one."
    )
    augment_threads: int = Field(default=1, ge=1, le=64, description="Threads that apply transforms to tokens.")
    pack_threads: int = Field(default=1, ge=1, le=64, description="Units packed and compressed at once.")
    queue_bytes: int = Field(default=64 << 20, ge=1, description="Bytes that may wait between two stages.")


class LoaderConfig(Section):
    """How batches are read ahead. Nothing here changes a single batch."""

    num_threads: int = Field(default=1, ge=0, le=64, description="Reader threads; 0 reads in the training thread.")
    prefetch_batches: int = Field(default=4, ge=1, description="Batches kept ready when there are reader threads.")


class StreamingConfig(Section):
    """How much of a streamed corpus is kept. Nothing here changes a single row of training."""

    retention_bytes: int = Field(
        default=8 << 30,
        ge=1,
        description="What the chunk files of all streamed sources may take on disk. It must hold the segments that are "
        "read at the same time: the current and the next one of every source.",
    )
    prefetch_segments: int = Field(
        default=1, ge=0, le=64, description="Segments built ahead of the one that is being read."
    )
    validation_bytes: int = Field(
        default=64 << 20,
        ge=1,
        description="Text of each source, from its beginning, in which held-out records are looked for; more of it "
        "only if there are none. It is read whole before the first step.",
    )


class GrowthConfig(Section):
    """Training while the caches are still being built."""

    mode: Literal["complete", "strict", "elastic"] = Field(
        default="complete",
        description="complete: caches are finished before step 1. strict: segments of units are fixed in advance and "
        "waited for, so the order does not depend on the builder's speed. elastic: whatever is there is taken up when "
        "it is needed, and recorded.",
    )
    first_segment_units: int = Field(default=1, ge=1, description="strict: units of a source's first segment.")
    max_segment_units: int = Field(
        default=64, ge=1, description="strict: each segment doubles the one before, up to this many units."
    )
    later_passes: Literal["whole", "segments"] = Field(
        default="whole",
        description="strict: permute all of a source together in its later passes, or in segments like the first, "
        "which data.mode=streaming needs.",
    )
    horizon_steps: int = Field(
        default=64, ge=1, description="Steps ahead for which rows are taken up, as far as they are there."
    )
    on_starve: Literal["wait", "repeat", "stop"] = Field(
        default="wait",
        description="When the next rows are not built yet: wait for them; repeat what is there (elastic only); or "
        "stop: save and leave, to be resumed.",
    )
    build: bool = Field(
        default=True, description="Build the caches in the background of the run; off: another process builds them."
    )


class StageConfig(Section):
    """One stage of a curriculum."""

    start_tokens: int = Field(ge=0, description="Tokens trained on before it begins, rounded up to whole steps.")
    weights: Mapping[str, float | str] = Field(
        default_factory=dict,
        description="Share of each source, or part of one as NAME.PART, by name, exact; sources that are not named "
        "rest. Empty: the weights of the sources.",
    )
    sequence_length_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Cut rows into pieces of this length, a divisor of data.sequence_length_tokens; a batch keeps its "
        "tokens and gets more rows. None: the whole length.",
    )


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = Field(description="The corpora, mixed by weight.", min_length=1)
    mode: Literal["cached", "streaming"] = Field(
        default="cached",
        description="cached: chunks stay on disk; streaming: they are made while training runs, removed when they were "
        "read and made again when they are needed again. The rows and their order are those of a growing cache.",
    )
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
    transforms: tuple[TransformConfig, ...] = Field(
        default=(), description="Functions that filter, deduplicate or change documents before they are packed."
    )
    transform_seed: int = Field(
        default=0,
        ge=0,
        description="Seed of the transforms' draws; not the run's, so that runs with other seeds share a cache.",
    )
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="Building in stages.")
    cache: CacheConfig = Field(default_factory=CacheConfig, description="The packed token cache.")
    streaming: StreamingConfig = Field(default_factory=StreamingConfig, description="Bounded retention.")
    loader: LoaderConfig = Field(default_factory=LoaderConfig, description="Reading ahead.")
    stages: tuple[StageConfig, ...] = Field(
        default=(), description="Mixtures and row lengths by tokens; before the first, the weights of the sources."
    )
    growth: GrowthConfig = Field(default_factory=GrowthConfig, description="Training while caches grow.")


class TokenizerConfig(Section):
    kind: Literal["bpe", "byte", "char", "file", "huggingface", "tiktoken", "none"] | ImportPath = Field(
        default="bpe",
        description="bpe: byte-level BPE trained on the sources; byte: 256 bytes; char: the characters that occur; "
        "file: a tokenizer.json; huggingface: a directory or repository with the tokenizer of a model; tiktoken: an "
        "encoding by name, or a file of ranks; none: token shards whose tokenizer nobody has. Or a function of your "
        "own: f(path) returns a tokenizers.Tokenizer.",
    )
    vocab_size: int = Field(
        default=4096,
        ge=1,
        description="Vocabulary of a trained bpe, with its special tokens, smaller where the text has fewer pairs "
        "of tokens; or the number of ids of kind none.",
    )
    train_bytes: int = Field(
        default=8 << 20, ge=1, description="Text that a bpe is trained on: evenly spread documents."
    )
    path: str | None = Field(
        default=None,
        description="For kind file: the tokenizer.json. For huggingface: a directory, or OWNER/NAME on the hub. For "
        "tiktoken: an encoding such as gpt2 or cl100k_base, a .tiktoken file or a vocab.bpe. For a "
        "function of your own: its argument.",
    )
    revision: str | None = Field(
        default=None, description="Commit, tag or branch of a repository of the hub. None: the newest."
    )
    pattern: str | None = Field(
        default=None, description="Regular expression that cuts words, for a .tiktoken file. None: that of GPT-2."
    )
    end_of_text: str | None = Field(
        default=None,
        description="Token after every document; added if it is not there. None: what a Hugging Face tokenizer calls "
        "the end of a sequence, else <|endoftext|>.",
    )
    end_of_text_id: int | None = Field(
        default=None,
        ge=0,
        description="For kind none: the id that ends a document. None: a further one behind the vocabulary.",
    )
    special_tokens: tuple[str, ...] = Field(
        default=(),
        description="Further special tokens, such as the sentinels of fill_in_the_middle; added behind all others "
        "where they are not there. Text that spells them stays text.",
    )
    fast_path: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: look words up where that gives equal ids, which is tested; off: always ask the library. "
        "The ids are the same.",
    )
