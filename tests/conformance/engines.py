"""The engines that the conformance cases run on, all tiny, and the batches that they run with.

Shape legend: A micro-batches, B rows of a micro-batch, T positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numpy_engine import NumpyEngine
from small_configurations import SMOOTH_EPS
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.engine import Engine

VOCAB = 37
POSITIONS = 16
LR = 0.01


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "normalize_expert_weights": True, "intermediate_size": 24}
"""Settings of ``model`` for an engine named ``torch-experts`` or ``jax-experts``."""


def make_engine(name: str, *, seed: int = 0, width: int = 8, **runtime: Any) -> Engine:
    """A fresh engine; ``width`` makes another architecture, ``runtime`` are settings of that section."""
    name, _, model = name.partition("-")
    if name == "numpy":
        return NumpyEngine(VOCAB, seed=seed, width=width)
    from vorox import backends
    from vorox.core.ranks.distributed_context import DistributedContext
    from vorox.models.decoder.spec import decoder_spec

    threads = {} if name == "jax" else {"num_threads": 1}
    sections: dict[str, Any] = {"runtime": {"device": "cpu", **threads, **runtime}}
    if model:  # the load-balancing loss is that of a micro-batch, so that splitting a step changes its gradient
        sections |= {
            "model": shape(width) | EXPERTS,
            "optimizer": {"eps": SMOOTH_EPS},
            "loss": {"load_balancing_weight": 0.0, "router_z_loss_weight": 0.1},
        }
    config = jax_config(seed, width, **sections) if name == "jax" else torch_config(seed, width, **sections)
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    return backends.load(name).create(config, spec, DistributedContext())


def shape(width: int) -> dict[str, int]:
    return {"num_layers": 2, "hidden_size": width * 4, "num_heads": 4, "num_kv_heads": 2}


def torch_config(seed: int = 0, width: int = 8, **sections: dict[str, Any]):
    from vorox.core.schema import RunConfig

    return RunConfig.model_validate(
        {
            "model": shape(width),
            "data": {"sources": [{"name": "text", "format": "txt"}], "sequence_length_tokens": POSITIONS},
            "train": {"num_steps": 10, "global_batch_sequences": 8, "micro_batch_sequences": 8},
            "runtime": {"device": "cpu", "num_threads": 1},
            "run": {"seed": seed},
            **sections,
        }
    )


def jax_config(seed: int = 0, width: int = 8, **sections: dict[str, Any]):
    return torch_config(seed, width, **{"backend": "jax", "runtime": {"device": "cpu"}, **sections})


def rows(number: int, *, seed: int = 0) -> np.ndarray:
    """Token ids of some rows, one longer than the positions: ``[number, T + 1]``."""
    return np.random.Generator(np.random.Philox(key=seed)).integers(0, VOCAB, (number, POSITIONS + 1), np.int32)


def batch(tokens: np.ndarray, micro_batches: int = 1, *, step: int = 0, keep: np.ndarray | None = None) -> Batch:
    """A batch of whole rows; ``keep`` (bool, ``[rows, T]``) says which positions are trained on."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:].copy()
    if keep is not None:
        labels[~keep] = IGNORED_LABEL
    shape = (micro_batches, len(tokens) // micro_batches, tokens.shape[1] - 1)
    return Batch(
        step=step,
        tokens_ABT=np.ascontiguousarray(inputs.reshape(shape), np.int32),
        labels_ABT=np.ascontiguousarray(labels.reshape(shape), np.int32),
        segment_ids_ABT=None,
        position_ids_ABT=None,
        row_digests_AB=np.arange(len(tokens), dtype=np.uint64).reshape(shape[:2]),
        num_target_tokens=int((labels != IGNORED_LABEL).sum()),
        cursor_after=DataCursor("", 0, step + 1, 0, 0),
    )


def packed_batch(documents: list[np.ndarray]) -> Batch:
    """One row that holds several documents, then padding, with document masking."""
    tokens, labels = np.zeros(POSITIONS, np.int32), np.full(POSITIONS, IGNORED_LABEL, np.int32)
    segments, positions, offset = np.zeros(POSITIONS, np.int32), np.zeros(POSITIONS, np.int32), 0
    for number, document in enumerate(documents, start=1):
        place = slice(offset, offset + len(document))
        tokens[place], segments[place], positions[place] = document, number, np.arange(len(document))
        labels[offset : offset + len(document) - 1] = document[1:]
        offset += len(document)
    shaped = [array.reshape(1, 1, POSITIONS) for array in (tokens, labels, segments, positions)]
    kept = int((labels != IGNORED_LABEL).sum())
    return Batch(0, *shaped, np.zeros((1, 1), np.uint64), kept, DataCursor("", 0, 1, 0, 0))
