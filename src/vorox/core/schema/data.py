"""``data``: sources, packing, data order, caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from vorox.core.schema.section import ImportPath, Section
from vorox.core.schema.setting import Implied, Need, setting
from vorox.core.schema.source_formats import FORMATS, formats_that

PackingMethod = Literal["best_fit", "concat"]
Split = Literal["train", "validation"]

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(FORMATS)]

TRANSFORMS = (
    "length", "token_length", "repetition", "exact_duplicates", "near_duplicates", "fill_in_the_middle",
    "token_dropout", "local_model",
)  # fmt: skip
"""The built-in transforms; ``data/transforms/registry.py: BUILT_IN`` has a row for each."""

_READS_FILES = Need("format", never=("python_stdlib",), remedy="a format other than python_stdlib")
_READS_THE_HUB = Need("paths", contains="hf://", remedy="a path hf://OWNER/NAME")
_HAS_FIELDS = Need("format", formats_that("has_fields"))
_IS_TEXT = Need("format", formats_that("is_text"))
_HAS_TOKENS = Need("format", formats_that("has_tokens"))
_HELD_OUT = Need("sources", ((),), remedy="data.validation.sources to be empty: they replace the held-out fraction")


class TransformConfig(Section):
    """One transform of documents between reading and packing."""

    name: str = setting(
        description=f"{', '.join(TRANSFORMS)}, or a user function as my_package.my_module:function or "
        "path/to/file.py:function.",
    )
    args: Mapping[str, Any] = setting(default_factory=dict, description="Keyword arguments of the transform.")
    splits: tuple[Split, ...] = setting(
        default=("train",),
        min_length=1,
        description="Splits that it applies to; validation text is unchanged by default.",
    )


class SourceConfig(Section):
    """One named corpus."""

    name: str = setting(description="Name of the source in logs and provenance queries.", pattern=r"^[\w.-]+$")
    preset: str | None = setting(
        default=None,
        description="Named source such as fineweb-edu, c4 or stdlib, which fills in format, paths and fields; "
        "explicit keys take precedence.",
        digest="none",
    )
    format: FormatName | ImportPath = setting(
        description=f"{'; '.join(f'{name}: {form.description}' for name, form in FORMATS.items())}. All but "
        f"{' and '.join(name for name, form in FORMATS.items() if not form.is_compressible)} may be "
        "compressed (.gz, .zst). Or a user function: f(content) yields the texts in the bytes of a file."
    )
    paths: tuple[str, ...] = setting(
        default=(),
        description="Files, folders (searched recursively), globs, URLs of object stores, or hf://OWNER/NAME for a "
        "dataset of the Hugging Face Hub; or a user function, package.module:function, that returns a list of them; or "
        "package.module:store://... for a store of your own. Files are read in sorted order.",
        needs=_READS_FILES,
    )
    fallback: tuple[str, ...] = setting(
        default=(),
        description="Used, with a message, if the paths do not exist or cannot be reached: other paths of the same "
        "format, or one named source.",
        needs=_READS_FILES,
    )
    hf_config: str | None = setting(
        default=None,
        description="Configuration (subset) of a Hub dataset. None: its default.",
        needs=(_READS_FILES, _READS_THE_HUB),
    )
    hf_split: str | None = setting(
        default=None, description="Split of a Hub dataset. None: train.", needs=(_READS_FILES, _READS_THE_HUB)
    )
    revision: str | None = setting(
        default=None,
        description="Commit, tag or branch of a Hub dataset. None: the newest.",
        needs=(_READS_FILES, _READS_THE_HUB),
    )
    text_field: str = setting(
        default="text",
        description="Key or column of the text; a.b is the key b inside a, unless a key is named a.b.",
        needs=_HAS_FIELDS,
    )
    chat_fields: tuple[str, ...] = setting(
        default=(),
        max_length=3,
        description="Columns of a conversation, instead of text_field: [messages], [prompt, answer] or [question, "
        "context, answer]. Only answers are trained on.",
        needs=_HAS_FIELDS,
    )
    system_field: str | None = setting(
        default=None,
        description="Column with the system message of a conversation. None: there is none.",
        needs=Need("chat_fields", remedy="chat_fields, the columns of a conversation"),
    )
    history_field: str | None = setting(
        default=None,
        description="Column with the earlier turns of a conversation, a list of [question, answer]; these answers are "
        "trained on as well. None: there is none.",
        needs=Need("chat_fields", remedy="chat_fields, the columns of a conversation"),
    )
    tools_field: str | None = setting(
        default=None,
        description="Column with the tools that a conversation may call, a list of JSON schemas or its JSON text, for "
        "the chat template. None: there is none.",
        needs=Need("chat_fields", remedy="chat_fields, the columns of a conversation"),
    )
    label_field: str | None = setting(
        default=None,
        description="Column that marks good answers (KTO's label): records in which it is false are left out. None: "
        "all are trained on.",
        needs=Need("chat_fields", remedy="chat_fields, the columns of a conversation"),
    )
    ignored_fields: tuple[str, ...] = setting(
        default=(),
        description="Columns that are left out although they may change what a record means. A record with a value in "
        "such a column (label, weight, system, tools, images ...) that no setting reads or ignores is unreadable.",
        needs=_HAS_FIELDS,
    )
    preference_pairs: bool = setting(
        default=False,
        description="chat_fields are [prompt, chosen, rejected] or [chosen, rejected], for loss dpo.",
        needs=Need("chat_fields", remedy="chat_fields [prompt, chosen, rejected] or [chosen, rejected]"),
    )
    tokens_field: str | None = setting(
        default=None,
        description="Column of an mds folder with token ids to read instead of text. None: read text_field.",
        needs=Need("format", ("mds",)),
    )
    images_field: str | None = setting(
        default=None,
        description="Key or column with the images of a record: a path, bytes, a data: URI, {bytes, path}, or a list "
        "of them. The text has <image> where each one belongs; without any, they come first. None: no images.",
        needs=Need("format", formats_that("has_images")),
    )
    metadata_fields: tuple[str, ...] = setting(
        default=(),
        description="Further keys or columns returned with a document when it is inspected or streamed.",
        digest="none",
        resume="allowed",
        needs=_HAS_FIELDS,
    )
    encoding: str = setting(
        default="utf-8",
        description="Encoding of the files of txt, jsonl, json and csv, a name that Python knows: latin-1, cp1252, "
        "utf-16, shift_jis. Byte positions are then those of the text as UTF-8.",
        needs=_IS_TEXT,
    )
    delimiter: str = setting(
        default=",",
        pattern=r'^[^"\r\n\x80-\uffff]$',
        description="Column separator of csv files.",
        needs=Need("format", ("csv",)),
    )
    tokenizer: str | None = setting(
        default=None,
        description="Tokenizer that the token shards were written with: its tokenizer.path or fingerprint, which must "
        "match this run's tokenizer.",
        needs=_HAS_TOKENS,
    )
    end_of_text_id: int | None = setting(
        default=None,
        ge=0,
        description="End-of-text id in token shards. None: the tokenizer's.",
        needs=_HAS_TOKENS,
    )
    ids_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = setting(
        default=None,
        description="Type of the token ids where files do not record it: token shards without a header (unsigned), or "
        "an mds column of bytes.",
        needs=_HAS_TOKENS,
    )
    max_record_bytes: int = setting(
        default=128 << 20,
        ge=1,
        description="Maximum size of a line or row; larger ones are quarantined unread. txt files are split at "
        "cache.unit_bytes.",
    )
    max_decompressed_bytes: int = setting(
        default=1 << 40,
        ge=1,
        description="Refuse compressed files that decompress to more than this.",
        digest="none",
        resume="allowed",
    )
    max_decompression_ratio: float = setting(
        default=1000.0,
        ge=1,
        description="Refuse compressed files with a higher compression ratio, from 256 MiB on.",
        digest="none",
        resume="allowed",
    )
    weight: float | str = setting(
        default=1.0,
        description="Fraction of rows sampled from this source, relative to the other weights; exact: a decimal "
        "number or a fraction such as '1/3'.",
        resume="mixture",
    )
    max_epochs: int | None = setting(
        default=None,
        ge=1,
        description="Maximum number of epochs over this source (see on_exhausted). None: unlimited.",
        resume="mixture",
    )
    on_exhausted: Literal["error", "drop", "repeat"] = setting(
        default="error",
        description="After max_epochs: error refuses the run; drop continues without the source, as a recorded event "
        "that gives its share to the others; repeat starts another epoch.",
        resume="mixture",
        needs=Need("max_epochs"),
    )
    split_by: Literal["tokens_per_document", "bytes_per_token"] | None = setting(
        default=None,
        description="Divide the source into difficulty buckets by this statistic of its chunks, for a curriculum: "
        "data.stages weights them as NAME.BUCKET. bytes_per_token is measured per unit.",
    )
    split_quantiles: tuple[float, ...] = setting(
        default=(0.5,),
        description="Boundaries of the buckets, as fractions of the rows present when the run starts.",
        needs=Need("split_by"),
    )
    split_names: tuple[str, ...] = setting(
        default=("easy", "hard"),
        description="Names of the buckets, in ascending order of the statistic.",
        needs=Need("split_by"),
    )
    max_bytes: int | None = setting(
        default=None, ge=1, description="Use only the first files, up to this many bytes of text. None: all files."
    )
    transforms: tuple[TransformConfig, ...] | None = setting(
        default=None, description="Transforms of this source, instead of data.transforms. None: data.transforms."
    )
    bad_record_fraction: float = setting(
        default=0.001,
        ge=0,
        le=1,
        description="Fraction of unreadable records that may be quarantined before the build stops.",
    )
    damaged_files: Literal["stop", "keep_readable"] = setting(
        default="stop",
        description="What to do with a gzip or zstd file that is damaged or truncated: stop the build and name the "
        "file; or keep the complete records before the damage and quarantine the rest, with a message.",
        needs=Need("format", formats_that("is_text"), remedy="a format of text, in gzip and zstd files"),
    )
    max_retries_per_unit: int = setting(
        default=60,
        ge=0,
        description="Retries of requests to a store (S3, GCS, Azure, Hub, web) per unit before the build stops; 60 "
        "cover an outage of about 13 minutes.",
        digest="none",
        resume="allowed",
    )
    stall_seconds: float = setting(
        default=20.0,
        gt=0,
        description="Timeout without a byte from a store; retries continue after the last byte.",
        digest="none",
        resume="allowed",
    )

    @field_validator("delimiter", mode="before")
    @classmethod
    def _read_escape(cls, value: Any) -> Any:
        r"""Accept ``\t`` in two characters, as it is written on a command line."""
        return "\t" if value == r"\t" else value

    @property
    def has_tokens(self) -> bool:
        """Whether its documents are token ids instead of text."""
        return self.format == "bin" or self.tokens_field is not None


class ValidationConfig(Section):
    """The validation split. Membership of a text depends only on its position in the source."""

    split: Literal["auto", "named", "file", "document", "span"] = setting(
        default="auto",
        description="What is held out. file, document: a fraction of the files or documents; span: seeded spans of "
        "every file; named: files with val, valid, validation or dev in their name or folder. auto: the first that "
        "fits the source: named for token shards and folders with splits, file for many files, document for records, "
        "else span; the choice is printed.",
        needs=_HELD_OUT,
    )
    held_out_fraction: float = setting(
        default=0.01,
        ge=0,
        lt=1,
        description="Fraction of the files, documents or bytes to hold out, in whole records; 0: no validation split.",
        needs=(_HELD_OUT, Need("split", never=("named",), remedy="data.validation.split other than named")),
    )
    sources: tuple[SourceConfig, ...] = setting(
        default=(),
        description="Sources to validate on, instead of a held-out fraction of data.sources; their files are excluded "
        "from training.",
    )


class CacheConfig(Section):
    """The token cache: tokenized, packed rows on disk."""

    directory: str | None = setting(
        default=None,
        description="Root directory of all caches, shared by runs. None: $VOROX_CACHE, else ~/.cache/vorox.",
        digest="none",
        resume="allowed",
    )
    codec: Literal["lz4", "lz4hc", "zstd", "raw"] = setting(
        default="lz4", description="Compression of the packed rows.", digest="none", resume="allowed"
    )
    unit_bytes: int = setting(
        default=64 << 20, ge=1, description="Text per unit; a unit is built, leased and rebuilt as a whole."
    )
    chunk_rows: int = setting(default=4096, ge=1, description="Rows per chunk file.")
    block_rows: int | None = setting(
        default=None,
        ge=1,
        description="Rows compressed together. None: 1 for rows of 1,024 tokens or more, more for shorter rows.",
        digest="none",
        resume="allowed",
    )
    grow: bool = setting(
        default=False,
        description="Add new files to the existing cache instead of building another one. All files that it was built "
        "from must still exist, unchanged.",
        digest="none",
        resume="allowed",
        needs=Need("data.mode", ("cached",), is_feature=True),
    )


class BuildPipelineConfig(Section):
    """The stages of a cache build. Nothing here changes a row."""

    staged: bool = setting(
        default=True,
        description="Run the stages concurrently, in threads of their own; off: in sequence, in the build thread.",
    )
    fetch_threads: int = setting(
        default=2, ge=1, le=64, description="Units of remote text fetched concurrently.", needs=Need("staged", (True,))
    )
    filter_threads: int = setting(
        default=1, ge=1, le=64, description="Threads that apply transforms to text.", needs=Need("staged", (True,))
    )
    tokenize_threads: int = setting(
        default=1,
        ge=1,
        le=64,
        description="Batches tokenized concurrently; the library uses threads of its own within a batch.",
        needs=Need("staged", (True,)),
    )
    augment_threads: int = setting(
        default=1, ge=1, le=64, description="Threads that apply transforms to tokens.", needs=Need("staged", (True,))
    )
    pack_threads: int = setting(
        default=1, ge=1, le=64, description="Units packed and compressed concurrently.", needs=Need("staged", (True,))
    )
    queue_bytes: int = setting(
        default=64 << 20,
        ge=1,
        description="Maximum number of bytes queued between two stages.",
        needs=Need("staged", (True,)),
    )


class LoaderConfig(Section):
    """Prefetching of batches. Nothing here changes a batch."""

    num_threads: int = setting(default=1, ge=0, le=64, description="Reader threads; 0: read in the training thread.")
    prefetch_batches: int = setting(
        default=4,
        ge=1,
        description="Batches prefetched by the reader threads.",
        needs=Need("num_threads", never=(0,), remedy="at least one thread"),
    )


class StreamingConfig(Section):
    """Disk budget and prefetching of a streamed corpus. Nothing here changes a training row."""

    retention_bytes: int = setting(
        default=8 << 30,
        ge=1,
        description="Disk budget of the chunk files of all streamed sources. It must hold the segments that are read "
        "concurrently: the current and the next one of every source.",
        needs=Need("data.mode", ("streaming",)),
    )
    prefetch_segments: int = setting(
        default=1,
        ge=0,
        le=64,
        description="Segments built ahead of the current one.",
        needs=Need("data.mode", ("streaming",)),
    )
    validation_bytes: int = setting(
        default=64 << 20,
        ge=1,
        description="Leading bytes of each source that are searched for held-out records, more only if they contain "
        "none. They are read before the first step.",
        needs=Need("data.mode", ("streaming",)),
    )


class GrowthConfig(Section):
    """Training while the caches are being built."""

    mode: Literal["complete", "strict", "elastic"] = setting(
        default="complete",
        description="complete: build the caches before step 1. strict: train on segments of units that are fixed in "
        "advance and waited for, so the order does not depend on build speed. elastic: train on the rows that are "
        "ready, and record which.",
        implied=Implied("strict", "data.mode", "streaming"),
    )
    first_segment_units: int = setting(
        default=1, ge=1, description="strict: units in the first segment of a source.", needs=Need("mode", ("strict",))
    )
    max_segment_units: int = setting(
        default=64,
        ge=1,
        description="strict: each segment has twice the units of the previous one, up to this many.",
        needs=Need("mode", ("strict",)),
    )
    later_passes: Literal["whole", "segments"] = setting(
        default="whole",
        description="strict: order of epochs after the first: a permutation of the whole source, or of segments as in "
        "the first epoch, which data.mode=streaming requires.",
        needs=Need("mode", ("strict",)),
        implied=Implied("segments", "data.mode", "streaming"),
    )
    horizon_steps: int = setting(
        default=64,
        ge=1,
        description="Number of steps for which rows are scheduled ahead, as far as they are ready.",
        resume="allowed",
        needs=Need("mode", ("strict", "elastic")),
    )
    on_starve: Literal["wait", "repeat", "stop"] = setting(
        default="wait",
        description="When the next rows are not ready: wait for them; repeat: train on the ready rows again (elastic "
        "only); stop: save a checkpoint and exit, to be resumed.",
        resume="allowed",
        needs=Need("mode", ("strict", "elastic")),
    )
    build: bool = setting(
        default=True,
        description="Build the caches in the background of the run; off: a separate process builds them.",
        digest="none",
        resume="allowed",
        needs=Need("mode", ("strict", "elastic")),
    )


class MixtureStageConfig(Section):
    """One stage of a curriculum."""

    start_tokens: int = setting(
        ge=0, description="Tokens trained on before this stage starts, rounded up to whole steps."
    )
    weights: Mapping[str, float | str] = setting(
        default_factory=dict,
        description="Weight of each source, or of a difficulty bucket as NAME.BUCKET, exact; sources that are not "
        "listed are not sampled. Empty: the weights of the sources.",
    )
    sequence_length_tokens: int | None = setting(
        default=None,
        ge=1,
        description="Split rows into sequences of this length, a divisor of data.sequence_length_tokens; a batch has "
        "the same number of tokens in more rows. None: the full length.",
    )


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = setting(
        description="Sources of text, mixed by weight.", min_length=1, resume="recorded", synonyms=("data_dir",)
    )
    mode: Literal["cached", "streaming"] = setting(
        default="cached",
        description="cached: chunks stay on disk. streaming: chunks are built while the run trains, evicted after use "
        "and rebuilt when needed again. Rows and order equal those of a growing cache (data.growth.mode=strict).",
        digest="none",
        resume="allowed",
    )
    sequence_length_tokens: int = setting(
        default=256,
        ge=2,
        description="Tokens per packed row.",
        synonyms=("seq_len", "seq_length", "sequence_length", "block_size", "context_length"),
    )
    packing: PackingMethod = setting(
        default="best_fit",
        description="best_fit keeps documents whole where they fit; concat splits the concatenated documents.",
    )
    document_mask: bool = setting(
        default=True, description="Restrict attention to the document and restart positions at every document of a row."
    )
    shuffle: bool = setting(
        default=True, description="Permute all rows in every epoch, keyed by the seed; off: stored order."
    )
    validation: ValidationConfig = setting(default_factory=ValidationConfig, description="The validation split.")
    transforms: tuple[TransformConfig, ...] = setting(
        default=(), description="Transforms that filter, deduplicate or change documents before packing."
    )
    transform_seed: int = setting(
        default=0,
        ge=0,
        description="Seed of the transforms, separate from run.seed, so that runs with other seeds share a cache.",
    )
    pipeline: BuildPipelineConfig = setting(
        default_factory=BuildPipelineConfig, description="Stages of a cache build.", digest="none", resume="allowed"
    )
    cache: CacheConfig = setting(default_factory=CacheConfig, description="The token cache.")
    streaming: StreamingConfig = setting(
        default_factory=StreamingConfig,
        description="Disk budget and prefetching of data.mode=streaming.",
        digest="none",
        resume="allowed",
    )
    loader: LoaderConfig = setting(
        default_factory=LoaderConfig, description="Prefetching of batches.", digest="none", resume="allowed"
    )
    stages: tuple[MixtureStageConfig, ...] = setting(
        default=(),
        description="Curriculum: mixtures and row lengths by tokens; before the first stage, the weights of the "
        "sources apply.",
        resume="mixture",
    )
    growth: GrowthConfig = setting(default_factory=GrowthConfig, description="Training while caches are being built.")
