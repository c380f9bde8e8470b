"""Export a checkpoint as a directory that transformers loads, atomically.

In: a run or checkpoint. Out: ``config.json``, ``generation_config.json``, ``model.safetensors``, tokenizer files and a
manifest. Repeating an export changes nothing; any other content at the target is refused, never overwritten. With an
engine, transformers loads the staged directory before it is committed, and its logits are compared with those of the
engine on the stored weights, so bf16 and fp16 are checked as strictly as fp32.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vorox.core import atomic, staged_directory
from vorox.core.atomic import MANIFEST_NAME
from vorox.core.batch import Int32Array
from vorox.core.disk_errors import room_text
from vorox.core.engine import Engine, NamedArray
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.installation import install_command
from vorox.core.staged_directory import StagedDirectory
from vorox.data.tokenizers import loading as tokenizers
from vorox.data.tokenizers.token_ids import IDS_NAME
from vorox.models.decoder_spec import DecoderSpec, decoder_spec
from vorox.models.engine_state import read_weights
from vorox.models.huggingface_config import CONFIG_NAME, GENERATION_CONFIG_NAME, spec_from_huggingface
from vorox.models.huggingface_families import require_family
from vorox.models.huggingface_weights import from_huggingface, huggingface_entries, to_huggingface
from vorox.models.weights_file import TensorEntry, WeightsFile, write_weights
from vorox.training.checkpoint_store import Checkpoint, latest_valid, verify

Dtype = Literal["fp32", "bf16", "fp16"]
FORMAT = "vorox-export/1"
WEIGHTS_NAME = "model.safetensors"
TOLERANCE = 1e-4
"""Largest allowed difference of fp32 logits up to 10; for larger logits it scales with them, as fp32 spacing does."""

_STORED: Mapping[Dtype, tuple[str, str]] = {
    "fp32": ("F32", "float32"),
    "bf16": ("BF16", "bfloat16"),
    "fp16": ("F16", "float16"),
}
_SAMPLE_TEXTS = (
    "The order of the data is arithmetic, and a resumed run is bit for bit the run it would have been.\n",
    "def total(values):\n    return sum(value for value in values if value > 0)\n",
    "Größe, naïveté, Ελλάδα, 日本語; 3.14159 < 2**10 — tabs\tand  double  spaces.\n",
)
_RANDOM_ROWS, _RANDOM_TOKENS, _REAL_TOKENS = 2, 64, 256


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of transformers and the engine on the same tokens.

    Attributes:
        max_difference: Largest difference of any logit, both with the stored weights in fp32.
        tolerance: Largest allowed difference.
        rounding_difference: Largest change of any logit by rounding to the stored type; 0 for fp32.
        num_tokens: Compared positions.
        num_texts: Texts for which both tokenizers return the same ids.
    """

    max_difference: float
    tolerance: float
    rounding_difference: float
    num_tokens: int
    num_texts: int


@dataclass(frozen=True, slots=True)
class Export:
    """A finished export.

    Attributes:
        existed: Whether the same export already existed.
        has_tokenizer: Whether it has a tokenizer for transformers; a run on token ids has none.
    """

    path: Path
    step: int
    dtype: Dtype
    num_parameters: int
    size_bytes: int
    existed: bool
    has_tokenizer: bool
    comparison: Comparison | None


def export(
    source: Path,
    target: Path,
    *,
    dtype: Dtype = "fp32",
    engine: Engine | None = None,
    texts: Sequence[str] = _SAMPLE_TEXTS,
) -> Export:
    """Write a checkpoint in Hugging Face format.

    Args:
        source: A checkpoint, or a run, whose latest valid checkpoint is exported.
        target: Directory to create. It may be empty or hold the same export.
        dtype: Type of the stored weights, rounded to nearest even.
        engine: An engine of the run's model that computes in fp32, with any optimizer, for the comparison; its weights
            are replaced. ``None`` skips the comparison.
        texts: Texts that the comparison encodes and scores, besides random tokens.

    Raises:
        ConfigError: transformers does not have the architecture, or the target has other content.
        CheckpointError: The checkpoint is corrupt, the export cannot be written, or the comparison fails.
    """
    checkpoint = _checkpoint(source)
    config = _config(checkpoint)
    spec = decoder_spec(spec_from_huggingface(config), tokenizer_vocab_size=1, sequence_length_tokens=1)
    metadata = _metadata(checkpoint, dtype)
    if target.parent.is_dir():
        atomic.sweep_temporary(target.parent)
    existed = _is_exported(target, metadata)
    comparison = None
    if existed:
        comparison = compare(target, checkpoint.path, spec, engine, texts) if engine else None
    else:
        try:
            with StagedDirectory(target) as directory:
                _write(directory, checkpoint.path, spec, config, dtype)
                comparison = compare(directory.path, checkpoint.path, spec, engine, texts) if engine else None
                directory.commit(metadata)
        except OSError as error:
            raise _write_failure(target, spec, dtype, error) from error
    size_bytes = sum(path.stat().st_size for path in sorted(target.iterdir()))
    has_tokenizer = not (target / IDS_NAME).exists()
    return Export(target, checkpoint.step, dtype, spec.num_parameters, size_bytes, existed, has_tokenizer, comparison)


def _checkpoint(source: Path) -> Checkpoint:
    if (source / MANIFEST_NAME).exists():
        return verify(source)
    checkpoint = latest_valid(source) if source.is_dir() else None
    if checkpoint is None:
        raise ConfigError("Source is neither a checkpoint nor a run with a checkpoint", where=str(source))
    return checkpoint


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the checkpoint's ``config.json``; without one, refuse and name the setting that transformers lacks."""
    path = checkpoint.path / CONFIG_NAME
    if not path.exists():
        spec = checkpoint.metadata.get("spec")
        if spec is not None:
            require_family(DecoderSpec(**spec))
        raise ConfigError("No architecture of transformers computes this model", where=str(checkpoint.path))
    return json.loads(path.read_bytes())


def _metadata(checkpoint: Checkpoint, dtype: Dtype) -> dict[str, Any]:
    hashes = {
        name: entry["xxh3_128"] for name, entry in staged_directory.read_manifest(checkpoint.path)["files"].items()
    }
    hashes.setdefault(WEIGHTS_NAME, checkpoint.metadata.get("fingerprint"))  # sharded checkpoints store parts
    described = (
        (IDS_NAME,) if IDS_NAME in hashes else (tokenizers.TOKENIZER_NAME, tokenizers.CONFIG_NAME)
    )  # a run on token ids has no tokenizer
    named = (WEIGHTS_NAME, GENERATION_CONFIG_NAME, *described)
    missing = [name for name in named if hashes.get(name) is None]
    if missing:
        raise CheckpointError(f"Checkpoint has no {missing[0]}", where=str(checkpoint.path))
    sources = {name: hashes[name] for name in (CONFIG_NAME, *named)}
    return {"format": FORMAT, "step": checkpoint.step, "dtype": dtype, "sources": sources}


def _is_exported(target: Path, metadata: Mapping[str, Any]) -> bool:
    if not target.exists():
        return False
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
        return False
    try:
        found = staged_directory.verify_directory(target)
    except (CheckpointError, OSError):
        found = None
    if found != metadata:
        raise ConfigError(
            "Target holds something other than this export", where=str(target),
            hint="choose another directory, or remove this one",
        )  # fmt: skip
    return True


def _write(
    directory: StagedDirectory, checkpoint: Path, spec: DecoderSpec, config: Mapping[str, Any], dtype: Dtype
) -> None:
    stored, loaded = _STORED[dtype]
    directory.write(CONFIG_NAME, atomic.pretty_json({**config, "dtype": loaded}))
    directory.write(GENERATION_CONFIG_NAME, (checkpoint / GENERATION_CONFIG_NAME).read_bytes())
    tokenizer = tokenizers.load(checkpoint)  # earlier versions wrote fewer files
    for name, content in tokenizer.files(spec.max_positions_tokens).items():
        is_copied = name == tokenizers.TOKENIZER_NAME
        directory.write(name, (checkpoint / name).read_bytes() if is_copied else content)
    entries, arrays = _weights(checkpoint, spec)
    with directory.open(WEIGHTS_NAME) as writer:
        write_weights(writer, [replace(entry, dtype=stored) for entry in entries], arrays)


def _weights(checkpoint: Path, spec: DecoderSpec) -> tuple[Sequence[TensorEntry], Iterable[NamedArray]]:
    """Return the checkpoint's parameters under Hugging Face names, from one file or assembled from parts."""
    path = checkpoint / WEIGHTS_NAME
    if path.exists():
        weights = WeightsFile(path)
        return tuple(weights.entries.values()), weights
    return huggingface_entries(spec), to_huggingface(spec, iter(read_weights(checkpoint, spec)))


def _write_failure(target: Path, spec: DecoderSpec, dtype: Dtype, error: OSError) -> CheckpointError:
    if not atomic.is_disk_full(error):
        return CheckpointError(
            f"Export cannot be written: {error.strerror}", where=str(error.filename or target),
            hint="check the disk, or export to another directory", saved="the checkpoint is unchanged",
        )  # fmt: skip
    needed_bytes = spec.num_parameters * (4 if dtype == "fp32" else 2)
    return CheckpointError(
        f"No room for the export: {room_text(needed_bytes, target, error)}",
        where=str(target), hint="free some space and export again", saved="the checkpoint is unchanged",
    )  # fmt: skip


def compare(
    directory: Path, checkpoint: Path, spec: DecoderSpec, engine: Engine, texts: Sequence[str] = _SAMPLE_TEXTS
) -> Comparison:
    """Compare an exported directory with the engine: ids of texts, and logits of texts and random tokens.

    Args:
        directory: The export.
        checkpoint: Its source.
        spec: The model.
        engine: An engine of this model that computes in fp32, with any optimizer; its weights are replaced.
        texts: Texts to encode and score.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: transformers cannot load the export, or its results differ.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("Comparing needs transformers", where="export --check", hint=install_command("hf")) from error
    transformers.logging.disable_progress_bar()
    ids = _same_ids(transformers, directory, texts)
    rows = [*_random_rows(spec), *(np.array([row], np.int32) for row in _real_rows(spec, ids))]
    # Weights only: the engine may have another optimizer and precision than the run.
    engine.import_weights(from_huggingface(spec, _weights(checkpoint, spec)[1]))
    trained = [engine.logits(row) for row in rows]
    weights = WeightsFile(directory / WEIGHTS_NAME)
    engine.import_weights(from_huggingface(spec, weights))
    stored = [engine.logits(row) for row in rows]
    theirs = list(_transformers_logits(transformers, directory, rows))
    largest = max(float(np.abs(logits).max()) for logits in stored)
    comparison = Comparison(
        max_difference=_largest_difference(stored, theirs),
        tolerance=TOLERANCE * max(1.0, largest / 10),
        rounding_difference=_largest_difference(trained, stored),
        num_tokens=sum(row.size for row in rows),
        num_texts=len(ids),
    )
    is_exact = all(entry.dtype == "F32" for entry in weights.entries.values())
    if is_exact and comparison.rounding_difference != 0:
        raise CheckpointError("Exported weights differ from those of the checkpoint", where=str(directory))
    if not comparison.max_difference <= comparison.tolerance:
        raise CheckpointError(
            f"Logits of transformers differ from the engine's by {comparison.max_difference:.2e}; allowed: "
            f"{comparison.tolerance:.2e}",
            where=str(directory), hint="compare with an engine that computes in fp32 without tf32",
        )  # fmt: skip
    return comparison


def _same_ids(transformers: Any, directory: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, after comparing both tokenizers."""
    ours = tokenizers.load(directory)
    if not (directory / tokenizers.TOKENIZER_NAME).exists():  # a run on token ids
        return [list(range(min(_REAL_TOKENS, ours.vocab_size)))]
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    if theirs.eos_token_id != ours.end_of_text_id:
        raise CheckpointError(
            f"End-of-text id of transformers is {theirs.eos_token_id}, expected {ours.end_of_text_id}",
            where=str(directory / tokenizers.CONFIG_NAME),
        )
    result: list[list[int]] = []
    for text in texts:
        kept = _known_part(ours, text)
        ids = [int(token) for token in ours.encode(kept)]
        if list(theirs(kept, add_special_tokens=False)["input_ids"]) != ids:
            raise CheckpointError(
                f"Tokenizer of transformers returns other ids for {kept!r}",
                where=str(directory / tokenizers.TOKENIZER_NAME),
            )
        result.append(ids)
    return result


def _known_part(tokenizer: tokenizers.Tokenizer, text: str) -> str:
    """Drop characters that a character vocabulary lacks; other tokenizers encode any text."""

    def is_known(piece: str) -> bool:
        try:
            tokenizer.encode(piece)
        except DataError:
            return False
        return True

    return text if is_known(text) else "".join(filter(is_known, text))


def _random_rows(spec: DecoderSpec) -> Iterator[Int32Array]:
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(b"vorox export 1\0\0", np.uint64)))
    length = min(_RANDOM_TOKENS, spec.max_positions_tokens)
    yield generator.integers(0, spec.vocab_size, (_RANDOM_ROWS, length), dtype=np.int32)


def _real_rows(spec: DecoderSpec, texts: Iterable[list[int]]) -> Iterator[list[int]]:
    length = min(_REAL_TOKENS, spec.max_positions_tokens)
    yield from (ids[:length] for ids in texts if ids)


def _transformers_logits(
    transformers: Any, directory: Path, rows: Iterable[Int32Array]
) -> Iterator[npt.NDArray[np.float32]]:
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), dtype="float32", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"Export cannot be loaded by transformers: {error}", where=str(directory)) from error
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if problems:
        raise CheckpointError(f"Parameters do not match those of transformers: {problems}", where=str(directory))
    for row in rows:
        # BatchEncoding creates the tensors, so no framework is imported here.
        encoding = transformers.BatchEncoding({"input_ids": row.tolist()}, tensor_type="pt")
        yield model(**encoding).logits.detach().numpy()


def _largest_difference(first: Sequence[npt.NDArray[np.float32]], second: Sequence[npt.NDArray[np.float32]]) -> float:
    """Return the largest absolute difference; NaN if either side has one."""
    return float(np.max([np.abs(a.astype(np.float64) - b).max() for a, b in zip(first, second, strict=True)]))
