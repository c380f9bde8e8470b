"""Export a checkpoint as a directory that transformers or llama.cpp loads, atomically.

In: a run or checkpoint. Out: ``config.json``, ``generation_config.json``, ``model.safetensors``, tokenizer files and a
manifest; or ``model.gguf`` and a manifest. An adapter is merged, or written by itself (``adapter.py``).
Repeating an export changes nothing; any other content at the target is refused, never overwritten. With an engine, the
staged directory is compared with it before the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from vorox.core.engine import Engine
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files import atomic, staged_directory
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.disk_errors import disk_error, room_text
from vorox.core.files.json_reader import read_json
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.schema.runtime import NumberFormat
from vorox.core.schema.train import Weights
from vorox.data.tokenizers import loading as tokenizers
from vorox.data.tokenizers.base_settings import GENERATION_NAME
from vorox.data.tokenizers.token_ids import IDS_NAME
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.arrays.weights_file import PIECE_BYTES, write_weights
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.config import (
    CONFIG_NAME,
    PREPROCESSOR_NAME,
    huggingface_files,
    spec_from_huggingface,
)
from vorox.models.huggingface.families import require_family
from vorox.models.huggingface.gguf_tensors import require_gguf
from vorox.models.huggingface.spec import KIND, HuggingFaceSpec, auto_class
from vorox.models.spec import ModelSpec
from vorox.models.stored.spec import spec_from_json
from vorox.models.stored.weights import stored_entries
from vorox.training.checkpoints.origins import CHECKPOINTS, RUN, origins_of
from vorox.training.checkpoints.signature import file_digests
from vorox.training.checkpoints.store import Checkpoint, latest_valid, verify
from vorox.training.export.adapter import merged, write_peft
from vorox.training.export.comparison import (
    WEIGHTS_NAME,
    Comparison,
    canonical_weights,
    checkpoint_weights,
    compare,
)
from vorox.training.export.gguf import GGUF_NAME, Stored, check_gguf, import_gguf, write_gguf
from vorox.training.origin.model_origin import EXPORT_FORMAT, is_model_directory
from vorox.training.origin.transformers_ids import TEXTS

Target = Literal["hf", "gguf", "peft"]
SIGNATURE_NAME = "model.sig"
"""The signature of a whole directory (``passport/model_signature.py``), which its manifest therefore cannot list."""
_PASSPORT_FORMAT = "vorox-passport/1"
_STORED: Mapping[NumberFormat, tuple[Stored, str]] = {
    "fp32": ("F32", "float32"),
    "bf16": ("BF16", "bfloat16"),
    "fp16": ("F16", "float16"),
}


@dataclass(frozen=True, slots=True)
class Companions:
    """Documents that describe the files of a model.

    Attributes:
        digest: Of what they are written from, for a repeated export.
        write: Returns them by name, given size and SHA-256 of each file of the model by its name.
    """

    digest: str
    write: Callable[[Mapping[str, tuple[int, str]]], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class Export:
    """A finished export.

    Attributes:
        existed: Whether the same export already existed.
        has_tokenizer: Whether it has a tokenizer for transformers; a run on token ids has none.
        auto_class: The class of transformers that loads it.
    """

    path: Path
    step: int
    dtype: NumberFormat
    num_parameters: int
    size_bytes: int
    existed: bool
    has_tokenizer: bool
    auto_class: str
    comparison: Comparison | None


def export(
    source: Path,
    target: Path,
    *,
    to: Target = "hf",
    dtype: NumberFormat = "fp32",
    weights: Weights = "model",
    engine: Engine | None = None,
    texts: Sequence[str] = TEXTS,
    check: bool = True,
    companions: Companions | None = None,
) -> Export:
    """Write a checkpoint in Hugging Face format, as GGUF or as a peft adapter.

    Args:
        source: A checkpoint, a run, whose latest valid checkpoint is exported, or a directory of transformers.
        target: Directory to create. It may be empty or hold the same export.
        to: ``hf`` for transformers, ``gguf`` for llama.cpp, ``peft`` for an adapter without its base.
        dtype: Type of the stored weights, rounded to nearest even.
        weights: The parameters, or their moving average.
        engine: An engine of the run's model that computes in fp32, with any optimizer, for the comparison; its weights
            are replaced. ``None`` skips the comparison. To merge an adapter (``hf``), it is needed.
        texts: Texts that the comparison encodes and scores, besides random tokens.
        check: Whether to compare with the engine.
        companions: Documents to write beside the model.

    Raises:
        ConfigError: The format does not have the architecture, or the target has other content.
        CheckpointError: The checkpoint is corrupt or has no average, the export cannot be written, or the comparison
            fails.
    """
    checkpoint = _checkpoint(source)
    spec = _spec(checkpoint)
    if isinstance(spec, AdapterSpec):
        if check and engine is not None and dtype != "fp32":
            raise ConfigError("The check of an adapter needs fp32", where="export --dtype", hint="leave out --dtype")
    elif to == "peft":
        raise ConfigError("The run has no adapter", where="export --to", hint="export with --to hf")
    if to == "gguf":
        require_gguf(_native(spec))
        import_gguf()
    metadata = _metadata(checkpoint, spec, dtype) | ({"to": to} if to != "hf" else {})
    metadata |= {"weights": weights} if weights != "model" else {}
    metadata |= {"passport": companions.digest} if companions is not None else {}
    if target.parent.is_dir():
        atomic.sweep_temporary(target.parent)
    existed = _is_exported(target, metadata)

    def compare_with(directory: Path) -> Comparison | None:
        return compare(directory, checkpoint.path, spec, engine, texts, weights) if engine and check else None

    if existed:
        comparison = compare_with(target)
    else:
        try:
            with StagedDirectory(target) as directory:
                if to == "gguf":
                    _write_gguf(directory, checkpoint.path, _native(spec), dtype, weights)
                elif isinstance(spec, AdapterSpec):
                    _write_adapter(directory, checkpoint.path, spec, engine, to, dtype, weights)
                else:
                    _write(directory, checkpoint.path, spec, _config(checkpoint), dtype, weights)
                comparison = compare_with(directory.path)
                if companions is not None:
                    _write_companions(directory, companions, directory.path)
                directory.commit(metadata)
        except OSError as error:
            raise _write_failure(target, spec, dtype, error) from error
    size_bytes = sum(path.stat().st_size for path in sorted(target.iterdir()))
    written = spec.base if isinstance(spec, AdapterSpec) and to == "hf" else spec
    has_tokenizer = not (checkpoint.path / IDS_NAME).exists()
    kind = auto_class(spec.config["model_type"] if isinstance(spec, HuggingFaceSpec) else None)
    return Export(
        target, checkpoint.step, dtype, written.num_parameters, size_bytes, existed, has_tokenizer, kind, comparison
    )


def export_passport(checkpoint: Checkpoint, target: Path, companions: Companions) -> bool:
    """Write the documents of a checkpoint without the model, and return whether they existed already.

    Args:
        checkpoint: A verified checkpoint.
        target: Directory to create. It may be empty or hold the same documents.
        companions: The documents.

    Raises:
        ConfigError: The target has other content.
        CheckpointError: The documents cannot be written.
    """
    metadata = {"format": _PASSPORT_FORMAT, "step": checkpoint.step, "passport": companions.digest}
    if target.parent.is_dir():
        atomic.sweep_temporary(target.parent)
    if _is_exported(target, metadata):
        return True
    try:
        with StagedDirectory(target) as directory:
            _write_companions(directory, companions, checkpoint.path)
            directory.commit(metadata)
    except OSError as error:
        raise disk_error(error, str(target)) or CheckpointError(
            f"Passport cannot be written: {error.strerror}", where=str(error.filename or target),
            hint="export to another directory", saved="the checkpoint is unchanged",
        ) from error  # fmt: skip
    return False


def _write_companions(directory: StagedDirectory, companions: Companions, model: Path) -> None:
    files = {name: ((model / name).stat().st_size, digest) for name, digest in file_digests(model).items()}
    for name, content in companions.write(files).items():
        directory.write(name, content)


def _checkpoint(source: Path) -> Checkpoint:
    if is_model_directory(source):
        return Checkpoint(source, {"step": 0})
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
        if spec is not None and isinstance(model := spec_from_json(spec), DecoderSpec):
            require_family(model)
        raise ConfigError("No transformers architecture computes this model", where=str(checkpoint.path))
    return read_json(path, dict)


def _spec(checkpoint: Checkpoint) -> ModelSpec:
    stored = checkpoint.metadata.get("spec", {})
    if stored.get("kind") == KIND:
        return spec_from_json(stored)
    try:
        model = spec_from_huggingface(_config(checkpoint))
    except ConfigError as error:
        raise ConfigError(
            error.what, where=str(checkpoint.path),
            hint="its files are in the format of transformers already; llama.cpp's convert_hf_to_gguf.py writes GGUF",
        ) from error  # fmt: skip
    return decoder_spec(model, tokenizer_vocab_size=1, sequence_length_tokens=1)


def _native(spec: ModelSpec) -> DecoderSpec:
    if not isinstance(spec, DecoderSpec):
        raise ConfigError(
            "GGUF export needs a native model", where="export --to", hint="export with --to hf, and convert that"
        )
    return spec


def _metadata(checkpoint: Checkpoint, spec: ModelSpec, dtype: NumberFormat) -> dict[str, Any]:
    hashes = _hashes(checkpoint.path)
    hashes.setdefault(WEIGHTS_NAME, checkpoint.metadata.get("fingerprint"))  # sharded checkpoints store parts
    described = (
        (IDS_NAME,) if IDS_NAME in hashes else (tokenizers.TOKENIZER_NAME, tokenizers.CONFIG_NAME)
    )  # a run on token ids has no tokenizer
    configs = () if isinstance(spec, AdapterSpec) else (CONFIG_NAME,)
    is_optional = is_model_directory(checkpoint.path) and GENERATION_NAME not in hashes
    settings = () if is_optional else (GENERATION_NAME,)
    named = (WEIGHTS_NAME, *configs, *settings, *described)
    missing = [name for name in named if hashes.get(name) is None]
    if missing:
        raise CheckpointError(f"Checkpoint has no {missing[0]}", where=str(checkpoint.path))
    sources = {name: hashes[name] for name in named}
    of = [origin.to_json() for origin in origins_of(checkpoint.path, checkpoint.metadata)]
    found: dict[str, Any] = {"format": EXPORT_FORMAT, "step": checkpoint.step, "dtype": dtype, "sources": sources}
    return found | ({CHECKPOINTS: of} if of else {})


def _hashes(directory: Path) -> dict[str, Any]:
    """Return the hash of each file by name, from the manifest if there is one."""
    if (directory / MANIFEST_NAME).exists():
        manifest = staged_directory.read_manifest(directory)
        return {name: entry["xxh3_128"] for name, entry in manifest["files"].items()}
    hashes: dict[str, Any] = {}
    weights = xxhash.xxh3_128()
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        digest = weights if path.suffix == ".safetensors" else xxhash.xxh3_128()
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
        hashes[path.name] = digest.hexdigest()
    return hashes | {WEIGHTS_NAME: weights.hexdigest()}


def _is_exported(target: Path, metadata: Mapping[str, Any]) -> bool:
    if not target.exists():
        return False
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
        return False
    try:
        found = staged_directory.verify_directory(target, extra_files=frozenset({SIGNATURE_NAME}))
    except (CheckpointError, OSError):
        found = None
    if found != metadata:
        raise ConfigError(
            "Target holds something other than this export", where=str(target),
            hint="choose another directory, or remove this one",
        )  # fmt: skip
    return True


def _write(
    directory: StagedDirectory,
    checkpoint: Path,
    spec: ModelSpec,
    config: Mapping[str, Any],
    dtype: NumberFormat,
    weights: Weights,
) -> None:
    stored, loaded = _STORED[dtype]
    directory.write(CONFIG_NAME, atomic.pretty_json({**config, "dtype": loaded}))
    _write_tokenizer(directory, checkpoint, spec)
    entries, arrays = checkpoint_weights(checkpoint, spec, weights)
    with directory.open(WEIGHTS_NAME) as writer:
        write_weights(writer, [replace(entry, dtype=stored) for entry in entries], arrays)


def _write_tokenizer(directory: StagedDirectory, checkpoint: Path, spec: ModelSpec) -> Tokenizer:
    if (checkpoint / PREPROCESSOR_NAME).exists():
        directory.write(PREPROCESSOR_NAME, (checkpoint / PREPROCESSOR_NAME).read_bytes())
    tokenizer = tokenizers.load(checkpoint)
    for name, content in tokenizer.files(spec.max_positions_tokens).items():
        is_copied = name == tokenizers.TOKENIZER_NAME
        directory.write(name, (checkpoint / name).read_bytes() if is_copied else content)
    return tokenizer


def _write_adapter(
    directory: StagedDirectory,
    checkpoint: Path,
    spec: AdapterSpec,
    engine: Engine | None,
    to: Target,
    dtype: NumberFormat,
    weights: Weights,
) -> None:
    """Write the adapter by itself, or merged into its base."""
    stored, loaded = _STORED[dtype]
    tokenizer, adapter = _write_tokenizer(directory, checkpoint, spec), canonical_weights(checkpoint, spec, weights)
    if to == "peft":
        write_peft(directory, spec, adapter, stored)
        return
    assert engine is not None
    files = huggingface_files(spec.base, special_ids=tokenizer.model_ids())
    config = json.loads(files.pop(CONFIG_NAME))
    directory.write(CONFIG_NAME, atomic.pretty_json({**config, "dtype": loaded}))
    for name, content in files.items():
        directory.write(name, content)
    with directory.open(WEIGHTS_NAME) as writer:
        entries = [replace(entry, dtype=stored) for entry in stored_entries(spec.base)]
        write_weights(writer, entries, merged(adapter, engine))


def _write_gguf(
    directory: StagedDirectory, checkpoint: Path, spec: DecoderSpec, dtype: NumberFormat, weights: Weights
) -> None:
    path, tokenizer = directory.path / GGUF_NAME, tokenizers.load(checkpoint)
    name = checkpoint.name if is_model_directory(checkpoint) else _run_name(checkpoint)
    described: Any = {"stored": _STORED[dtype][0], "name": name}
    write_gguf(path, spec, canonical_weights(checkpoint, spec, weights), tokenizer, **described)
    check_gguf(path, spec, canonical_weights(checkpoint, spec, weights), tokenizer, **described)
    directory.adopt("")


def _run_name(checkpoint: Path) -> str:
    """Return the name of the run that a checkpoint is of, in it or not."""
    run = Checkpoint.read(checkpoint).metadata.get(RUN)
    return Path(run).name if isinstance(run, str) else checkpoint.parent.parent.name


def _write_failure(target: Path, spec: ModelSpec, dtype: NumberFormat, error: OSError) -> CheckpointError:
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
