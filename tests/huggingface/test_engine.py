"""A checkpoint directory of our engine is a transformers model, and a transformers model becomes our engine's weights.

Both ways: logits within 1e-4 in fp32; for what we save also the same 32 greedy tokens from decoder and ``generate``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_decoder import numpy_logits
from training_device import DEVICE
from vorox import backends
from vorox.core.engine import Engine
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import DataConfig, RunConfig, RuntimeConfig, SourceConfig, TokenizerConfig, TrainConfig
from vorox.data.tokenizers import loading as tokenizers
from vorox.models.arrays.weights_file import open_directory
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.config import huggingface_files, spec_from_huggingface
from vorox.models.huggingface.weights import from_huggingface
from vorox.training.checkpoints.store import write_state
from vorox.training.export.checkpoint import export

pytestmark = [pytest.mark.hf, pytest.mark.torch]
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.jax)])
TOLERANCE = 1e-4
NEW_TOKENS = 32
TEXT = "def greet(name):\n    return f'hello {name}'\n"


def engine_of(
    config: dict[str, Any], tokenizer_vocab_size: int, backend: Any = "torch", **runtime: Any
) -> tuple[DecoderSpec, Engine]:
    model = spec_from_huggingface(config)
    run = RunConfig(
        backend=backend,
        model=model,
        data=DataConfig(sources=(SourceConfig(name="none", format="txt", paths=("none",)),), sequence_length_tokens=32),
        train=TrainConfig(num_steps=1, global_batch_sequences=1, micro_batch_sequences=1),
        runtime=RuntimeConfig(device=DEVICE, num_threads=1 if backend == "torch" else None, **runtime),
    )
    spec = decoder_spec(model, tokenizer_vocab_size=tokenizer_vocab_size, sequence_length_tokens=32)
    return spec, backends.load(backend).create(run, spec, DistributedContext())


def randomised(engine: Engine, seed: int) -> dict[str, np.ndarray]:
    """Give the engine weights under which attention is uneven and logits lie apart; returns them."""
    generator = np.random.default_rng(seed)
    weights = {
        name: (
            generator.normal(0, 0.2, array.shape)
            if array.ndim == 2
            else generator.normal(array.mean(), 0.3, array.shape)  # biases start at 0, norms at 1 or 0
        ).astype(np.float32)
        for name, array in engine.export_weights()
    }
    engine.import_weights(weights.items())
    return weights


def transformers_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(tokens).long()).logits.numpy()


def greedy(engine: Engine, prompt_BT: np.ndarray) -> np.ndarray:
    decoder = engine.decoder(prompt_BT.shape[0], prompt_BT.shape[1] + NEW_TOKENS)
    tokens, found = prompt_BT, []
    for _ in range(NEW_TOKENS):
        tokens = decoder.feed(tokens).argmax(-1)[:, None].astype(np.int32)
        found.append(tokens)
    return np.concatenate(found, axis=1)


def check_padded_batch(model: Any, tokenizer: Any) -> None:
    """Rows of different lengths in one batch have the logits that each has alone."""
    texts = ["a", "a longer text"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch["attention_mask"].sum(-1).tolist() == [1, 13]
    logits = model(**batch).logits
    for row, text in enumerate(texts):
        alone = model(**tokenizer(text, return_tensors="pt")).logits[0]
        assert (logits[row, : len(alone)] - alone).abs().max() <= TOLERANCE


@BACKENDS
def test_what_the_engine_saves_is_a_transformers_model(backend: str, case: dict[str, Any], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = tokenizers.train(TokenizerConfig(kind="byte"), [])
    spec, engine = engine_of(case | {"vocab_size": 260}, tokenizer.vocab_size, backend)
    weights = randomised(engine, seed=11)
    with StagedDirectory(tmp_path / "step-00000001") as directory:
        write_state(engine.snapshot(detached=False), directory)
        files = huggingface_files(spec, end_of_text_id=tokenizer.end_of_text_id)
        for name, data in (files | tokenizer.files(spec.max_positions_tokens)).items():
            directory.write(name, data)
        path = directory.commit({})
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    theirs_tokenizer = AutoTokenizer.from_pretrained(path)
    assert theirs_tokenizer(TEXT)["input_ids"] == tokenizer.encode(TEXT).tolist()
    assert theirs_tokenizer.eos_token_id == model.config.eos_token_id == tokenizer.end_of_text_id
    check_padded_batch(model, theirs_tokenizer)
    assert theirs_tokenizer.model_max_length == spec.max_positions_tokens

    generator = np.random.default_rng(12)
    tokens = generator.integers(0, 260, size=(3, 47)).astype(np.int32)
    tokens[0, : len(TEXT)] = tokenizer.encode(TEXT)
    theirs, ours = transformers_logits(model, tokens), engine.logits(tokens)
    assert theirs.std() > 0.5, "the comparison would be trivial"
    assert np.abs(theirs - ours).max() <= TOLERANCE
    assert np.abs(numpy_logits(spec, weights, tokens) - ours).max() <= TOLERANCE

    prompt = tokens[:, :20]
    model.generation_config.eos_token_id = None  # both run on past an end of text
    generated = model.generate(
        torch.from_numpy(prompt).long(), do_sample=False, max_new_tokens=NEW_TOKENS,
        attention_mask=torch.ones(prompt.shape, dtype=torch.long),
    )  # fmt: skip
    continued = generated.numpy()[:, prompt.shape[1] :]
    assert continued.shape == (3, NEW_TOKENS)
    assert len(np.unique(continued)) > 3, "the comparison would be trivial"
    assert np.array_equal(greedy(engine, prompt), continued)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_is_exported_and_checked(case: dict[str, Any], dtype: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers.train(TokenizerConfig(kind="byte"), [])
    spec, engine = engine_of(case | {"vocab_size": 260}, tokenizer.vocab_size)
    randomised(engine, seed=17)
    with StagedDirectory(tmp_path / "step-00000001") as directory:
        write_state(engine.snapshot(detached=False), directory)
        files = huggingface_files(spec, end_of_text_id=tokenizer.end_of_text_id) | tokenizer.files()
        for name, data in files.items():
            directory.write(name, data)
        path = directory.commit({"step": 1})
    _, other = engine_of(case | {"vocab_size": 260}, tokenizer.vocab_size)
    comparison = export(path, tmp_path / "hf", dtype=dtype, engine=other).comparison
    assert comparison is not None
    assert comparison.max_difference <= comparison.tolerance
    assert (comparison.rounding_difference == 0) == (dtype == "fp32")


@BACKENDS
def test_a_transformers_model_becomes_ours(
    backend: str, case: dict[str, Any], random_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = random_model(case, seed=13)
    model.save_pretrained(tmp_path)
    spec, engine = engine_of(json.loads((tmp_path / "config.json").read_text()), 7, backend)
    stored = (pair for file in open_directory(tmp_path) for pair in file)
    engine.import_weights(from_huggingface(spec, stored))
    tokens = np.random.default_rng(14).integers(0, 97, size=(3, 41)).astype(np.int32)
    theirs, ours = transformers_logits(model, tokens), engine.logits(tokens)
    assert theirs.std() > 0.5, "the comparison would be trivial"
    assert np.abs(theirs - ours).max() <= TOLERANCE


def test_a_wrong_weight_is_seen(case: dict[str, Any], random_model: Callable[..., Any], tmp_path: Path) -> None:
    """The bound above is sharp: exchanging two rows of one projection breaks it."""
    model = random_model(case, seed=15)
    model.save_pretrained(tmp_path)
    spec, engine = engine_of(json.loads((tmp_path / "config.json").read_text()), 7)
    weights = dict(from_huggingface(spec, (pair for file in open_directory(tmp_path) for pair in file)))
    key = weights["blocks.1.attention.key.weight"]
    key[[0, 1]] = key[[1, 0]]
    engine.import_weights(weights.items())
    tokens = np.random.default_rng(16).integers(0, 97, size=(3, 41)).astype(np.int32)
    assert np.abs(transformers_logits(model, tokens) - engine.logits(tokens)).max() > 10 * TOLERANCE
