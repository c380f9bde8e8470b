"""``data``: sources, packing, data order, caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from vorox.core.schema.section import ImportPath, Section


class TransformConfig(Section):
    """One transform of documents between reading and packing."""

    name: str = Field(
        description="length, token_length, repetition, exact_duplicates, near_duplicates, fill_in_the_middle, "
        "token_dropout, local_model, or a user function as my_package.my_module:function or path/to/file.py:function.",
    )
    args: Mapping[str, Any] = Field(default_factory=dict, description="Keyword arguments of the transform.")
    splits: tuple[Literal["train", "validation"], ...] = Field(
        default=("train",),
        min_length=1,
        description="Splits that it applies to; validation text is unchanged by default.",
    )


class SourceConfig(Section):
    """One named corpus."""

    name: str = Field(description="Name of the source in logs and provenance queries.", pattern=r"^[\w.-]+$")
    preset: str | None = Field(
        default=None,
        description="Named source such as fineweb-edu, c4 or stdlib, which fills in format, paths and fields; "
        "explicit keys take precedence.",
    )
    format: Literal["python_stdlib", "txt", "jsonl", "csv", "parquet", "arrow", "mds", "bin"] | ImportPath = Field(
        description="python_stdlib: the source code of Python's standard library, without tests and generated tables; "
        "txt: one document per file; jsonl, csv, parquet: one document per line or row; arrow: folders of "
        "datasets.save_to_disk, one document per row; mds: folders of mosaicml-streaming, one document per sample; "
        "bin: token shards, documents separated by the end-of-text token. All but bin may be compressed (.gz, .zst). "
        "Or a user function: f(content) yields the texts in the bytes of a file."
    )
    paths: tuple[str, ...] = Field(
        default=(),
        description="Files, folders (searched recursively), globs, URLs of object stores, or hf://OWNER/NAME for a "
        "dataset of the Hugging Face Hub; or a user function, package.module:function, that returns a list of them; or "
        "package.module:store://... for a store of your own. Files are read in sorted order.",
    )
    fallback: tuple[str, ...] = Field(
        default=(),
        description="Used, with a message, if the paths do not exist or cannot be reached: other paths of the same "
        "format, or one named source.",
    )
    hf_config: str | None = Field(
        default=None, description="Configuration (subset) of a Hub dataset. None: its default."
    )
    hf_split: str | None = Field(default=None, description="Split of a Hub dataset. None: train.")
    revision: str | None = Field(default=None, description="Commit, tag or branch of a Hub dataset. None: the newest.")
    text_field: str = Field(
        default="text", description="Key or column of the text; a.b is the key b inside a, unless a key is named a.b."
    )
    chat_fields: tuple[str, ...] = Field(
        default=(),
        max_length=3,
        description="Columns of a conversation, instead of text_field: [messages], [prompt, answer] or [instruction, "
        "input, output]. Only answers are trained on.",
    )
    preference_pairs: bool = Field(
        default=False,
        description="chat_fields are [prompt, chosen, rejected] or [chosen, rejected], for loss dpo.",
    )
    tokens_field: str | None = Field(
        default=None,
        description="Column of an mds folder with token ids to read instead of text. None: read text_field.",
    )
    images_field: str | None = Field(
        default=None,
        description="Key or column with the images of a record: a path, bytes, a data: URI, {bytes, path}, or a list "
        "of them. The text has <image> where each one belongs; without any, they come first. None: no images.",
    )
    metadata_fields: tuple[str, ...] = Field(
        default=(), description="Further keys or columns returned with a document when it is inspected or streamed."
    )
    delimiter: str = Field(default=",", pattern=r'^[^"\r\n\x80-\uffff]$', description="Column separator of csv files.")
    tokenizer: str | None = Field(
        default=None,
        description="Tokenizer that the token shards were written with: its tokenizer.path or fingerprint, which must "
        "match this run's tokenizer.",
    )
    end_of_text_id: int | None = Field(
        default=None, ge=0, description="End-of-text id in token shards. None: the tokenizer's."
    )
    ids_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = Field(
        default=None,
        description="Type of the token ids where files do not record it: token shards without a header (unsigned), or "
        "an mds column of bytes.",
    )
    max_record_bytes: int = Field(
        default=128 << 20,
        ge=1,
        description="Maximum size of a line or row; larger ones are quarantined unread. txt files are split at "
        "cache.unit_bytes.",
    )
    max_decompressed_bytes: int = Field(
        default=1 << 40, ge=1, description="Refuse compressed files that decompress to more than this."
    )
    max_decompression_ratio: float = Field(
        default=1000.0,
        ge=1,
        description="Refuse compressed files with a higher compression ratio, from 256 MiB on.",
    )
    weight: float | str = Field(
        default=1.0,
        description="Fraction of rows sampled from this source, relative to the other weights; exact: a decimal "
        "number or a fraction such as '1/3'.",
    )
    max_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of epochs over this source (see on_exhausted). None: unlimited.",
    )
    on_exhausted: Literal["error", "drop", "repeat"] = Field(
        default="error",
        description="After max_epochs: error refuses the run; drop continues without the source, as a recorded event "
        "that gives its share to the others; repeat starts another epoch.",
    )
    split_by: Literal["tokens_per_document", "bytes_per_token"] | None = Field(
        default=None,
        description="Divide the source into difficulty buckets by this statistic of its chunks, for a curriculum: "
        "data.stages weights them as NAME.BUCKET. bytes_per_token is measured per unit.",
    )
    split_quantiles: tuple[float, ...] = Field(
        default=(0.5,), description="Boundaries of the buckets, as fractions of the rows present when the run starts."
    )
    split_names: tuple[str, ...] = Field(
        default=("easy", "hard"), description="Names of the buckets, in ascending order of the statistic."
    )
    max_bytes: int | None = Field(
        default=None, ge=1, description="Use only the first files, up to this many bytes of text. None: all files."
    )
    transforms: tuple[TransformConfig, ...] | None = Field(
        default=None, description="Transforms of this source, instead of data.transforms. None: data.transforms."
    )
    bad_record_fraction: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="Fraction of unreadable records that may be quarantined before the build stops.",
    )
    damaged_files: Literal["stop", "keep_readable"] = Field(
        default="stop",
        description="What to do with a gzip or zstd file that is damaged or truncated: stop the build and name the "
        "file; or keep the complete records before the damage and quarantine the rest, with a message.",
    )
    max_retries_per_unit: int = Field(
        default=60,
        ge=0,
        description="Retries of requests to a store (S3, GCS, Azure, Hub, web) per unit before the build stops; 60 "
        "cover an outage of about 13 minutes.",
    )
    stall_seconds: float = Field(
        default=20.0, gt=0, description="Timeout without a byte from a store; retries continue after the last byte."
    )

    @property
    def has_tokens(self) -> bool:
        """Whether its documents are token ids instead of text."""
        return self.format == "bin" or self.tokens_field is not None


class ValidationConfig(Section):
    """The validation split. Membership of a text depends only on its position in the source."""

    split: Literal["auto", "named", "file", "document", "tail"] = Field(
        default="auto",
        description="What is held out. file, document: a fraction of the files or documents; tail: the end of every "
        "file; named: files with val or validation in their name or folder. auto: the first that fits the source: "
        "named for token shards and folders with splits, file for many files, document for records, else tail; the "
        "choice is printed.",
    )
    held_out_fraction: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Fraction of the files, documents or bytes to hold out, in whole records; 0: no validation split.",
    )
    sources: tuple[SourceConfig, ...] = Field(
        default=(),
        description="Sources to validate on, instead of a held-out fraction of data.sources; their files are excluded "
        "from training.",
    )


class CacheConfig(Section):
    """The token cache: tokenized, packed rows on disk."""

    directory: str | None = Field(
        default=None,
        description="Root directory of all caches, shared by runs. None: $VOROX_CACHE, else ~/.cache/vorox.",
    )
    codec: Literal["lz4", "lz4hc", "zstd", "raw"] = Field(default="lz4", description="Compression of the packed rows.")
    unit_bytes: int = Field(
        default=64 << 20, ge=1, description="Text per unit; a unit is built, leased and rebuilt as a whole."
    )
    chunk_rows: int = Field(default=4096, ge=1, description="Rows per chunk file.")
    block_rows: int | None = Field(
        default=None,
        ge=1,
        description="Rows compressed together. None: 1 for rows of 1,024 tokens or more, more for shorter rows.",
    )
    grow: bool = Field(
        default=False,
        description="Add new files to the existing cache instead of building another one. All files that it was built "
        "from must still exist, unchanged.",
    )


class PipelineConfig(Section):
    """The stages of a cache build. Nothing here changes a row."""

    staged: bool = Field(
        default=True,
        description="Run the stages concurrently, in threads of their own; off: in sequence, in the build thread.",
    )
    fetch_threads: int = Field(default=2, ge=1, le=64, description="Units of remote text fetched concurrently.")
    filter_threads: int = Field(default=1, ge=1, le=64, description="Threads that apply transforms to text.")
    tokenize_threads: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Batches tokenized concurrently; the library uses threads of its own within a batch.",
    )
    augment_threads: int = Field(default=1, ge=1, le=64, description="Threads that apply transforms to tokens.")
    pack_threads: int = Field(default=1, ge=1, le=64, description="Units packed and compressed concurrently.")
    queue_bytes: int = Field(default=64 << 20, ge=1, description="Maximum number of bytes queued between two stages.")


class LoaderConfig(Section):
    """Prefetching of batches. Nothing here changes a batch."""

    num_threads: int = Field(default=1, ge=0, le=64, description="Reader threads; 0: read in the training thread.")
    prefetch_batches: int = Field(default=4, ge=1, description="Batches prefetched by the reader threads.")


class StreamingConfig(Section):
    """Disk budget and prefetching of a streamed corpus. Nothing here changes a training row."""

    retention_bytes: int = Field(
        default=8 << 30,
        ge=1,
        description="Disk budget of the chunk files of all streamed sources. It must hold the segments that are read "
        "concurrently: the current and the next one of every source.",
    )
    prefetch_segments: int = Field(default=1, ge=0, le=64, description="Segments built ahead of the current one.")
    validation_bytes: int = Field(
        default=64 << 20,
        ge=1,
        description="Leading bytes of each source that are searched for held-out records, more only if they contain "
        "none. They are read before the first step.",
    )


class GrowthConfig(Section):
    """Training while the caches are being built."""

    mode: Literal["complete", "strict", "elastic"] = Field(
        default="complete",
        description="complete: build the caches before step 1. strict: train on segments of units that are fixed in "
        "advance and waited for, so the order does not depend on build speed. elastic: train on the rows that are "
        "ready, and record which.",
    )
    first_segment_units: int = Field(default=1, ge=1, description="strict: units in the first segment of a source.")
    max_segment_units: int = Field(
        default=64, ge=1, description="strict: each segment has twice the units of the previous one, up to this many."
    )
    later_passes: Literal["whole", "segments"] = Field(
        default="whole",
        description="strict: order of epochs after the first: a permutation of the whole source, or of segments as in "
        "the first epoch, which data.mode=streaming requires.",
    )
    horizon_steps: int = Field(
        default=64, ge=1, description="Number of steps for which rows are scheduled ahead, as far as they are ready."
    )
    on_starve: Literal["wait", "repeat", "stop"] = Field(
        default="wait",
        description="When the next rows are not ready: wait for them; repeat: train on the ready rows again (elastic "
        "only); stop: save a checkpoint and exit, to be resumed.",
    )
    build: bool = Field(
        default=True, description="Build the caches in the background of the run; off: a separate process builds them."
    )


class StageConfig(Section):
    """One stage of a curriculum."""

    start_tokens: int = Field(
        ge=0, description="Tokens trained on before this stage starts, rounded up to whole steps."
    )
    weights: Mapping[str, float | str] = Field(
        default_factory=dict,
        description="Weight of each source, or of a difficulty bucket as NAME.BUCKET, exact; sources that are not "
        "listed are not sampled. Empty: the weights of the sources.",
    )
    sequence_length_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Split rows into sequences of this length, a divisor of data.sequence_length_tokens; a batch has "
        "the same number of tokens in more rows. None: the full length.",
    )


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = Field(description="Sources of text, mixed by weight.", min_length=1)
    mode: Literal["cached", "streaming"] = Field(
        default="cached",
        description="cached: chunks stay on disk. streaming: chunks are built while the run trains, evicted after use "
        "and rebuilt when needed again. Rows and order equal those of a growing cache (data.growth.mode=strict).",
    )
    sequence_length_tokens: int = Field(default=256, ge=2, description="Tokens per packed row.")
    packing: Literal["best_fit", "concat"] = Field(
        default="best_fit",
        description="best_fit keeps documents whole where they fit; concat splits the concatenated documents.",
    )
    document_mask: bool = Field(
        default=True, description="Restrict attention to the document and restart positions at every document of a row."
    )
    shuffle: bool = Field(
        default=True, description="Permute all rows in every epoch, keyed by the seed; off: stored order."
    )
    validation: ValidationConfig = Field(default_factory=ValidationConfig, description="The validation split.")
    transforms: tuple[TransformConfig, ...] = Field(
        default=(), description="Transforms that filter, deduplicate or change documents before packing."
    )
    transform_seed: int = Field(
        default=0,
        ge=0,
        description="Seed of the transforms, separate from run.seed, so that runs with other seeds share a cache.",
    )
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="Stages of a cache build.")
    cache: CacheConfig = Field(default_factory=CacheConfig, description="The token cache.")
    streaming: StreamingConfig = Field(
        default_factory=StreamingConfig, description="Disk budget and prefetching of data.mode=streaming."
    )
    loader: LoaderConfig = Field(default_factory=LoaderConfig, description="Prefetching of batches.")
    stages: tuple[StageConfig, ...] = Field(
        default=(),
        description="Curriculum: mixtures and row lengths by tokens; before the first stage, the weights of the "
        "sources apply.",
    )
    growth: GrowthConfig = Field(default_factory=GrowthConfig, description="Training while caches are being built.")
