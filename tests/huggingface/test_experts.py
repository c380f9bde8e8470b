"""Random checkpoints of mixture-of-experts transformers models, against the native decoders of both engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from huggingface.small_cases import CASES
from training_device import DEVICE
from vorox import backends
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.arrays.weights_file import open_directory
from vorox.models.decoder.spec import decoder_spec
from vorox.models.huggingface.config import spec_from_huggingface
from vorox.models.huggingface.weights import from_huggingface

pytestmark = [pytest.mark.hf, pytest.mark.torch]
TOLERANCE = 1e-5
ENGINES = ["torch", pytest.param("jax", marks=[pytest.mark.jax, pytest.mark.slow])]


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("mixtral", "qwen3-moe"))])
def test_logits_and_loss_equal_those_of_transformers(
    name: str, backend: str, random_model: Callable[..., Any], tmp_path: Path
) -> None:
    import torch

    model = random_model(dict(CASES[name]) | {"bos_token_id": 1, "eos_token_id": 1}, seed=3)
    model.save_pretrained(tmp_path)
    fields = spec_from_huggingface(json.loads((tmp_path / "config.json").read_text()))
    spec = decoder_spec(fields, tokenizer_vocab_size=7, sequence_length_tokens=41)
    config = RunConfig.model_validate({
        "backend": backend,
        "model": fields.model_dump(),
        "data": {"sources": [{"name": "text", "format": "txt"}], "sequence_length_tokens": 41},
        "train": {"num_steps": 1},
        "runtime": {"device": DEVICE, **({"num_threads": 1} if backend == "torch" else {})},
    })  # fmt: skip
    engine = backends.load(backend).create(config, spec, DistributedContext())
    engine.import_weights(from_huggingface(spec, (pair for file in open_directory(tmp_path) for pair in file)))
    tokens = np.random.default_rng(4).integers(0, 97, (3, 41))
    with torch.inference_mode():
        theirs = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
    ours = engine.logits(tokens.astype(np.int32))
    assert theirs.std() > 0.5, "the comparison would be trivial"
    assert np.abs(theirs - ours).max() <= TOLERANCE * np.abs(theirs).max()
