"""Compress a checkpoint: prune and quantise its weights, and measure what that costs.

In: a run, a checkpoint, or averaged or pruned weights. Out: a directory and a ``Compression``: loss, size and speed
before and after, on the run's validation set. Pruned weights are written by ``training/export/derived.py``,
quantised ones as a transformers directory.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from vorox.api.arguments import check_argument
from vorox.api.checkpoints import FoundCheckpoint, find_checkpoint
from vorox.api.model import open_engine
from vorox.core.batch import Batch
from vorox.core.engine import Engine, EvalValues, NamedArray
from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.files.atomic import pretty_json
from vorox.core.files.json_reader import read_json
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.schema import QuantizationScheme, RunConfig
from vorox.data.corpus.corpus import prepare, prepare_recorded
from vorox.data.tokenizers.store import load_run_tokenizer
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.pruning import Pruning, check_pruning, prune
from vorox.models.spec import ModelSpec
from vorox.models.stored.engine_state import read_weights
from vorox.models.stored.spec import spec_from_json
from vorox.models.stored.weights import stored_entries, to_stored
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.export.checkpoint import export
from vorox.training.export.derived import PRUNED, remove_empty, write_derived
from vorox.training.materialize import StateNotices
from vorox.training.steps.dataloading import validation_set
from vorox.training.steps.evaluate import evaluate

REPORT_NAME = "compression.json"
FORMAT = "vorox-compression/1"
_PROMPT_TOKENS, _DECODED_TOKENS = 8, 64


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a model costs and how well it predicts.

    Attributes:
        loss: Mean cross entropy in nats over the validation set.
        bits_per_byte: The same in bits per byte of text; ``None`` if unknown.
        size_bytes: Bytes of the weights on disk.
        tokens_per_second: Greedy decoding of one sequence with a key/value cache.
    """

    loss: float
    bits_per_byte: float | None
    size_bytes: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Compression:
    """A finished compression, as ``compression.json`` records it."""

    path: Path
    step: int
    prune: str | None
    quantize: str | None
    before: Measurement
    after: Measurement

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "path": str(self.path)}


class _Measured(Protocol):
    def eval_step(self, batch: Batch) -> EvalValues: ...

    def decoding_seconds(self, prompt: Sequence[int], num_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class _EngineModel:
    engine: Engine

    def eval_step(self, batch: Batch) -> EvalValues:
        return self.engine.eval_step(batch)

    def decoding_seconds(self, prompt: Sequence[int], num_tokens: int) -> float:
        decoder = self.engine.decoder(1, len(prompt) + num_tokens)
        started = time.perf_counter()
        logits_BV = decoder.feed(np.array([prompt], np.int32))
        for _ in range(num_tokens - 1):
            logits_BV = decoder.feed(logits_BV.argmax(1).astype(np.int32)[:, None])
        return time.perf_counter() - started


def compress(
    name: str,
    target: Path,
    *,
    pruning: Pruning | None,
    quantization: QuantizationScheme | None,
    step: int | None,
    root: str,
    device: str | None,
    notices: StateNotices,
) -> Compression:
    """Prune, then quantise the weights of a checkpoint.

    Args:
        name: A run, ``RUN@STEP``, a checkpoint, or averaged or pruned weights.
        target: Directory to create. It may be empty.
        pruning: How to prune.
        quantization: How to quantise.
        step: The step, kept or not. ``None``: the newest valid checkpoint.
        root: Parent directory of runs.
        device: Replaces ``runtime.device``.
        notices: Gets corrupt checkpoints that are skipped, and what is computed again.

    Raises:
        ConfigError: There is nothing to do or to compress, the target is not empty, this machine cannot quantise so, or
            there is no validation set.
        CheckpointError: The checkpoint is corrupt, or the target cannot be written.
    """
    if pruning is None and quantization is None:
        raise ConfigError("Nothing to do", where="compress", hint="set --prune or --quantize, or both")
    remove_empty(target)
    found = find_checkpoint(name, step, root, notices)
    config, source = _measured_config(found.config(), device), found.checkpoint
    spec = spec_from_json(source.metadata["spec"])
    if isinstance(spec, AdapterSpec):
        raise ConfigError(
            "Adapters cannot be compressed", where=str(source.path),
            hint="merge it with `vorox export RUN --to hf --output MERGED`, train from MERGED, and compress that run",
        )  # fmt: skip
    if pruning is not None:
        check_pruning(spec, pruning)
    if quantization is not None:
        _quantizer().check_quantization(quantization, _device(config, quantization))
    with closing(_ValidationSet(config, found)) as validation:
        task = _Task(target, config, source, spec, pruning, validation)
        return task.prune() if quantization is None else task.quantize(quantization)


class _ValidationSet:
    """The validation set of a run, for any model."""

    def __init__(self, config: RunConfig, found: FoundCheckpoint) -> None:
        if found.data_run is not None:
            self._corpus = prepare_recorded(found.data_run, config)
        else:
            tokenizer = load_run_tokenizer(found.checkpoint.path, config.tokenizer)
            self._corpus = prepare(config, build=False, tokenizer=tokenizer)
        batches = validation_set(config, self._corpus)
        if batches is None:
            self.close()
            raise ConfigError(
                "Run has no validation set to measure the compression on", where="data.validation.held_out_fraction",
                hint="hold out text, and train again",
            )  # fmt: skip
        self._batches = batches
        tokenizer = self._corpus.tokenizer
        self._lengths = tokenizer.token_byte_lengths() if tokenizer.lossless else None

    def close(self) -> None:
        self._corpus.close()

    def measure(self, model: _Measured, size_bytes: int, max_positions_tokens: int) -> Measurement:
        found = evaluate(model, self._batches(), self._lengths)
        prompt = next(iter(self._batches())).tokens_ABT[0, 0, :_PROMPT_TOKENS].tolist()
        num_tokens = min(_DECODED_TOKENS, max_positions_tokens - len(prompt))
        model.decoding_seconds(prompt, min(4, num_tokens))  # the first call allocates
        seconds = model.decoding_seconds(prompt, num_tokens)
        return Measurement(found.loss, found.bits_per_byte, size_bytes, num_tokens / seconds)


@dataclass(frozen=True, slots=True)
class _Task:
    target: Path
    config: RunConfig
    source: Checkpoint
    spec: ModelSpec
    pruning: Pruning | None
    validation: _ValidationSet

    def prune(self) -> Compression:
        """Measure both models in the engine of the run, and write the pruned one."""
        engine = open_engine(self.config, self.source)
        size_bytes = 4 * self.spec.num_parameters  # zeros are stored
        engine.import_weights(read_weights(self.source.path, self.spec))
        before = self._measure(_EngineModel(engine), size_bytes)
        engine.import_weights(self._pruned())
        done = self._finish(None, before, self._measure(_EngineModel(engine), size_bytes))
        self._write_pruned(self.target, {REPORT_NAME: pretty_json(done.to_json())})
        return done

    def quantize(self, scheme: QuantizationScheme) -> Compression:
        """Measure both models in transformers, and write the quantised one."""
        module = _quantizer()
        device = _device(self.config, scheme)
        with _temporary_directory(self.target) as scratch:
            plain = export(self.source.path, scratch, check=False).path
            before = self._measure(module.TransformersModel(plain, device), _size(plain))
            if self.pruning is not None:
                shutil.rmtree(plain)
                self._write_pruned(plain, {})
            with StagedDirectory(self.target) as directory:
                module.quantize(plain, directory.path, scheme)
                for path in sorted(plain.glob("*token*")):
                    shutil.copy(path, directory.path / path.name)
                after = self._measure(module.TransformersModel(directory.path, device), _size(directory.path))
                done = self._finish(scheme, before, after)
                directory.adopt("")
                directory.write(REPORT_NAME, pretty_json(done.to_json()))
                directory.commit({"format": FORMAT, "step": done.step, "prune": done.prune, "quantize": scheme})
        return done

    def _measure(self, model: _Measured, size_bytes: int) -> Measurement:
        return self.validation.measure(model, size_bytes, self.spec.max_positions_tokens)

    def _pruned(self) -> Iterable[NamedArray]:
        assert self.pruning is not None
        return prune(self.spec, read_weights(self.source.path, self.spec), self.pruning)

    def _write_pruned(self, target: Path, files: dict[str, bytes]) -> None:
        tensors = stored_entries(self.spec), to_stored(self.spec, self._pruned())
        write_derived(self.source, target, self.spec, tensors, {PRUNED: str(self.pruning)}, files)

    def _finish(self, scheme: QuantizationScheme | None, before: Measurement, after: Measurement) -> Compression:
        pruned = None if self.pruning is None else str(self.pruning)
        return Compression(self.target, self.source.step, pruned, scheme, before, after)


def load_quantized(path: str | Path, *, device: Literal["cpu", "cuda"] = "cpu") -> Any:
    """Load a model that ``vorox compress --quantize`` wrote, with a kernel for the device.

    transformers alone loads it as well, but runs 4-bit weights on CUDA only.

    Args:
        path: The directory.
        device: Where the model runs.

    Returns:
        The transformers model, in evaluation mode.

    Raises:
        ConfigError: The directory has no such model, torchao or transformers is missing, or the device has no kernel.
    """
    check_argument("vorox.load_quantized", "path", path, (str, Path))
    directory = Path(path)
    try:
        scheme = read_json(directory / REPORT_NAME, dict)["quantize"]
    except (OSError, ValueError, KeyError):
        scheme = None
    if scheme is None:
        raise ConfigError(
            f"{directory} is no quantised model", where=REPORT_NAME, hint="write one with vorox compress --quantize"
        )
    _quantizer().check_quantization(scheme, device)
    return _quantizer().load_quantized(directory, device)


def _device(config: RunConfig, scheme: QuantizationScheme) -> str:
    """Return where a quantised model is measured: CUDA if the run names it, or if it has a faster kernel there."""
    chosen = config.runtime.device
    is_faster = chosen == "auto" and scheme == "int4" and _quantizer().has_cuda_int4()
    return "cuda" if chosen == "cuda" or is_faster else "cpu"


def _measured_config(config: RunConfig, device: str | None) -> RunConfig:
    runtime = config.runtime.model_copy(update={"compile": False, **({} if device is None else {"device": device})})
    return config.model_copy(update={"runtime": runtime})


@contextlib.contextmanager
def _temporary_directory(target: Path) -> Generator[Path]:
    """Yield a directory to create beside a target; it is removed in the end."""
    parent = target.absolute().parent
    created = atomic.make_directory(parent)
    atomic.sweep_temporary(parent)
    folder = atomic.temporary_name(parent / "plain")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        atomic.remove_if_empty(created)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _quantizer() -> Any:
    return importlib.import_module("vorox.backends.torch_engine.low_precision.quantization")
