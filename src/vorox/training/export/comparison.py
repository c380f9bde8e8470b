"""The check of an export: transformers and the engine compute the same logits and greedy tokens.

In: an exported directory, its checkpoint and an engine. Out: a ``Comparison``, or an error with the first difference.
Both sides use the stored weights in fp32, so bf16 and fp16 are checked as strictly as fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.batch import Int32Array
from vorox.core.engine import Engine, NamedArray
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.platform.installation import install_command
from vorox.core.platform.library_logs import silence_torchao
from vorox.core.schema.train import Weights
from vorox.data.tokenizers import loading as tokenizers
from vorox.models.arrays.weights_file import TensorEntry, WeightsFile, open_directory
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.gguf_tensors import require_gguf
from vorox.models.huggingface.spec import HuggingFaceSpec, auto_class
from vorox.models.spec import ModelSpec
from vorox.models.stored.engine_state import read_average, read_weights
from vorox.models.stored.weights import from_stored, stored_entries, to_stored
from vorox.training.export.adapter import ADAPTER_CONFIG_NAME, load_peft
from vorox.training.export.gguf import GGUF_NAME, read_gguf, stores_only_fp32
from vorox.training.origin.model_origin import is_model_directory
from vorox.training.origin.transformers_ids import TEXTS, how_to_load

WEIGHTS_NAME = "model.safetensors"
TOLERANCE = 1e-4
"""Largest allowed difference of fp32 logits up to 10; for larger logits it scales with them, as fp32 spacing does."""

_RANDOM_ROWS, _RANDOM_TOKENS, _REAL_TOKENS, _GREEDY_TOKENS = 2, 64, 256, 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of transformers and the engine on the same tokens.

    Attributes:
        max_difference: Largest difference of any logit, both with the stored weights in fp32.
        tolerance: Largest allowed difference.
        rounding_difference: Largest change of any logit by rounding to the stored type; 0 for fp32.
        num_tokens: Compared positions.
        num_texts: Texts for which both tokenizers return the same ids.
        num_greedy_tokens: Tokens of a greedy completion, equal on both sides; fewer than requested after a near tie.
    """

    max_difference: float
    tolerance: float
    rounding_difference: float
    num_tokens: int
    num_texts: int
    num_greedy_tokens: int


def canonical_weights(checkpoint: Path, spec: ModelSpec, weights: Weights = "model") -> Iterator[NamedArray]:
    return iter(from_stored(spec, checkpoint_weights(checkpoint, spec, weights)[1]))


def checkpoint_weights(
    checkpoint: Path, spec: ModelSpec, weights: Weights = "model"
) -> tuple[Sequence[TensorEntry], Iterable[NamedArray]]:
    """Return the checkpoint's parameters, or their average, under Hugging Face names, from one file or from parts.

    Those of a directory of transformers are all read, to put them in order.
    """
    if weights == "ema":
        return stored_entries(spec), to_stored(spec, read_average(checkpoint, spec))
    if is_model_directory(checkpoint):
        pairs = (pair for file in open_directory(checkpoint) for pair in file)
        arrays = dict(from_stored(spec, pairs))
        ordered = ((row.name, arrays.pop(row.name)) for row in spec.parameters)
        return stored_entries(spec), to_stored(spec, ordered)
    path = checkpoint / WEIGHTS_NAME
    if path.exists():
        file = WeightsFile(path)
        return tuple(file.entries.values()), file
    return stored_entries(spec), to_stored(spec, read_weights(checkpoint, spec))


def compare(
    directory: Path,
    checkpoint: Path,
    spec: ModelSpec,
    engine: Engine,
    texts: Sequence[str] = TEXTS,
    weights: Weights = "model",
) -> Comparison:
    """Compare an exported directory with the engine: ids of texts, and logits of texts and random tokens.

    Args:
        directory: The export.
        checkpoint: Its source.
        spec: The model.
        engine: An engine of this model that computes in fp32, with any optimizer; its weights are replaced.
        texts: Texts to encode and score.
        weights: Which weights of the source were exported.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: transformers cannot load the export, or its results differ.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("Comparing needs transformers", where="export --check", hint=install_command("hf")) from error
    silence_torchao()
    transformers.logging.disable_progress_bar()
    is_gguf = (directory / GGUF_NAME).exists()
    ids = _ids(checkpoint, texts) if is_gguf else _same_ids(transformers, directory, texts)
    rows = [*_random_rows(spec), *(np.array([row], np.int32) for row in _real_rows(spec, ids))]
    # Weights only: the engine may have another optimizer and precision than the run.
    engine.import_weights(canonical_weights(checkpoint, spec, weights))
    trained = [engine.logits(row) for row in rows]
    engine.import_weights(_stored_weights(directory, checkpoint, spec, weights, is_gguf=is_gguf))
    stored = [engine.logits(row) for row in rows]
    model = _load(transformers, directory, checkpoint, spec, is_gguf=is_gguf)
    theirs = [_logits(transformers, model, row) for row in rows]
    largest = max(float(np.abs(logits).max()) for logits in stored)
    tolerance = TOLERANCE * max(1.0, largest / 10)
    difference, rounding = _largest_difference(stored, theirs), _largest_difference(trained, stored)
    if rounding != 0 and _stores_only_fp32(directory, is_gguf=is_gguf):
        raise CheckpointError("Exported weights differ from those of the checkpoint", where=str(directory))
    if not difference <= tolerance:
        raise CheckpointError(
            f"Logits of transformers differ from the engine's by {difference:.2e}; allowed: {tolerance:.2e}",
            where=str(directory), hint="compare with an engine that computes in fp32 without tf32",
        )  # fmt: skip
    return Comparison(
        max_difference=difference,
        tolerance=tolerance,
        rounding_difference=rounding,
        num_tokens=sum(row.size for row in rows),
        num_texts=len(ids),
        num_greedy_tokens=_greedy_tokens(engine, transformers, model, rows[-1], spec, tolerance),
    )


def _stored_weights(
    directory: Path, checkpoint: Path, spec: ModelSpec, weights: Weights, *, is_gguf: bool
) -> Iterable[NamedArray]:
    """Return the weights of an export as the engine takes them; those of an adapter, which is exported in fp32."""
    if isinstance(spec, AdapterSpec):
        return canonical_weights(checkpoint, spec, weights)
    if isinstance(spec, DecoderSpec) and is_gguf:
        return read_gguf(directory / GGUF_NAME, spec)
    return iter(from_stored(spec, WeightsFile(directory / WEIGHTS_NAME)))


def _stores_only_fp32(directory: Path, *, is_gguf: bool) -> bool:
    if is_gguf:
        return stores_only_fp32(directory / GGUF_NAME)
    return all(entry.dtype == "F32" for entry in WeightsFile(directory / WEIGHTS_NAME).entries.values())


def _greedy_tokens(
    engine: Engine, transformers: Any, model: Any, row: Int32Array, spec: ModelSpec, tolerance: float
) -> int:
    """Return the length of the greedy completion of a row, after comparing it with the cached decoding of transformers.

    Raises:
        CheckpointError: A token differs although no other logit is within the tolerance of the largest.
    """
    prompt = row[0, : spec.max_positions_tokens - _GREEDY_TOKENS].tolist()
    if not prompt:
        return 0
    encoding = transformers.BatchEncoding({"input_ids": [prompt]}, tensor_type="pt")
    model.generation_config = transformers.GenerationConfig()  # the base's penalties would change greedy tokens
    completed = model.generate(
        **encoding, attention_mask=encoding["input_ids"] >= 0, do_sample=False, max_new_tokens=_GREEDY_TOKENS,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    sequence = list(prompt)
    for token in completed[0, len(prompt) :].tolist():
        logits = engine.logits(np.array([sequence], np.int32))[0, -1]
        if int(logits.argmax()) != token:
            if logits.max() - logits[token] <= 2 * tolerance:
                break
            raise CheckpointError(
                f"Greedy token {len(sequence) - len(prompt)} of transformers is {token}, expected {logits.argmax()}",
                where="export --check",
            )
        sequence.append(token)
    return len(sequence) - len(prompt)


def _ids(checkpoint: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text by the tokenizer of the checkpoint."""
    tokenizer = tokenizers.load(checkpoint)
    if not (checkpoint / tokenizers.TOKENIZER_NAME).exists():  # a run on token ids
        return [list(range(min(_REAL_TOKENS, tokenizer.vocab_size)))]
    return [tokenizer.encode(_known_part(tokenizer, text)).tolist() for text in texts]


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
        if list(theirs(kept, add_special_tokens=False, verbose=False)["input_ids"]) != ids:
            raise CheckpointError(
                f"Tokenizer of transformers returns other ids for {kept!r}",
                where=str(directory / tokenizers.TOKENIZER_NAME),
                hint=f"export without --check; {how_to_load(type(theirs).__name__)}",
            )
        result.append(ids)
    added = ours.encode_as_transformers("")
    if list(theirs("")["input_ids"]) != added:
        raise CheckpointError(
            f"Tokenizer of transformers adds {theirs('')['input_ids']} to a text, expected {added}",
            where=str(directory / tokenizers.TOKENIZER_NAME),
        )
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


def _random_rows(spec: ModelSpec) -> Iterator[Int32Array]:
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(b"vorox export 1\0\0", np.uint64)))
    length = min(_RANDOM_TOKENS, spec.max_positions_tokens)
    yield generator.integers(0, spec.vocab_size, (_RANDOM_ROWS, length), dtype=np.int32)


def _real_rows(spec: ModelSpec, texts: Iterable[list[int]]) -> Iterator[list[int]]:
    length = min(_REAL_TOKENS, spec.max_positions_tokens)
    yield from (ids[:length] for ids in texts if ids)


def _load(transformers: Any, directory: Path, checkpoint: Path, spec: ModelSpec, *, is_gguf: bool) -> Any:
    """Load an export with transformers.

    Raises:
        CheckpointError: It cannot be loaded, or its parameters are not those of the architecture.
    """
    if isinstance(spec, AdapterSpec) and (directory / ADAPTER_CONFIG_NAME).exists():
        return load_peft(directory, spec)
    options: dict[str, Any] = {"gguf_file": GGUF_NAME} if is_gguf else {}
    try:
        if (
            is_gguf and isinstance(spec, DecoderSpec) and require_gguf(spec) in ("gpt2", "qwen3")
        ):  # transformers does not read all of their keys
            options["config"] = transformers.AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
        kind = auto_class(spec.config["model_type"] if isinstance(spec, HuggingFaceSpec) else None)
        model, report = getattr(transformers, kind).from_pretrained(
            str(directory), dtype="float32", local_files_only=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"Export cannot be loaded by transformers: {error}", where=str(directory)) from error
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if problems:
        raise CheckpointError(f"Parameters do not match those of transformers: {problems}", where=str(directory))
    return model


def _logits(transformers: Any, model: Any, row: Int32Array) -> npt.NDArray[np.float32]:
    # BatchEncoding creates the tensors, so no framework is imported here.
    encoding = transformers.BatchEncoding({"input_ids": row.tolist()}, tensor_type="pt")
    return model(**encoding).logits.detach().numpy()


def _largest_difference(first: Sequence[npt.NDArray[np.float32]], second: Sequence[npt.NDArray[np.float32]]) -> float:
    """Return the largest absolute difference; NaN if either side has one."""
    return float(np.max([np.abs(a.astype(np.float64) - b).max() for a, b in zip(first, second, strict=True)]))
