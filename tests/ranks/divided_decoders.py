"""One rank of PyTorch that trains divided decoders, started by ``layouts.py`` for every kind of parallelism.

Arguments: a seed, a checkpoint of one device, a folder, then layouts ``DATA,FSDP,TP,PP,CP,SP,EP,RING``, of which the
last ones may be left out; SP is 1 with sequence parallelism, RING with ring attention. ``LAYOUT:CASE+CASE`` trains
these cases. The rank is in the environment, as for every command. Every rank writes what it computed. Each layout loads
what the one before it saved.

Shape legend: A micro-batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ranks.resharding import save
from small_configurations import (
    GPT2,
    LLAMA,
    LR,
    MODELS,
    POSITIONS,
    SMOOTH_EPS,
    VOCAB,
    batch_of,
    configuration,
    random_rows,
)
from vorox import backends
from vorox.core.batch import Batch, DataShard
from vorox.core.files.staged_directory import read_manifest
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import decoder_spec
from vorox.models.huggingface.spec import CONTEXT_MODELS, EXPERT_MODELS, PIPELINE_MODELS
from vorox.models.pipeline_stages import StagePlacement, parameters_of, tied_embedding
from vorox.models.spec import ModelSpec

STEPS = 20
UNTIED = {"llama", "mistral", "phi3", "olmo2"}
RECOMPUTED = {"gemma3_text", "gpt2", "llama", "qwen3_moe"}
SCHEDULES = {"gemma3_text": "interleaved", "llama": "zero_bubble", "gpt2": "zero_bubble"}
FIVE_LAYERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    },
    "llama": {"num_hidden_layers": 5},
    "gpt2": {"num_hidden_layers": 5, "n_layer": 5},
}  # fmt: skip
ONLY_DIVIDED: dict[str, dict[str, Any]] = {
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
}
"""Models of transformers that no other test trains."""
CASES: dict[str, dict[str, Any]] = {
    "llama": {
        "model": LLAMA | {"num_kv_heads": 2, "tie_embeddings": False},
        "loss": {"z_loss_weight": 0.01, "label_smoothing_fraction": 0.1}, "optimizer__clip_norm": 0.3,
    },
    # Muon turns rounding into directions where a gradient is nearly singular; small steps keep that small.
    "gemma3": {
        "model": MODELS["gemma3"], "optimizer__name": "muon", "optimizer__muon_lr": 5e-3,
        "train__activation_checkpointing": "dots",
    },
    "gpt2": {"model": GPT2 | {"dropout_fraction": 0.1}, "train__activation_checkpointing": "block"},
    "documents": {
        "model": GPT2 | {"num_layers": 5}, "data__document_mask": True, "train__activation_checkpointing": "block",
        "log__activation_statistics": True, "train__embedding_noise": 5.0, "parallel__pipeline_schedule": "interleaved",
    },
    "noise": {
        "model": GPT2 | {"dropout_fraction": 0.1}, "data__document_mask": True, "train__embedding_noise": 5.0,
        "train__activation_checkpointing": "block", "log__activation_statistics": True,
    },
    "three heads": {
        "model": MODELS["mistral, scaled positions"] | {"num_heads": 3, "hidden_size": 36, "num_kv_heads": 1},
        "data__document_mask": True, "train__activation_checkpointing": "dots", "log__accuracy": True,
    },
    "zero bubble": {
        "model": GPT2 | {"num_layers": 5, "tie_embeddings": False}, "data__document_mask": True,
        "train__activation_checkpointing": "dots", "parallel__pipeline_schedule": "zero_bubble",
    },
    "experts": {
        "model": MODELS["mixtral"], "loss": {"load_balancing_weight": 0.1, "router_z_loss_weight": 0.01},
        "data__document_mask": True,
    },
    "experts, muon": {"model": MODELS["mixtral"], "optimizer__name": "muon"},
    **{
        f"transformers {name}": {
            "model": {"kind": "huggingface", "name_or_path": name, "pretrained": False}, "data__document_mask": True,
            "train__activation_checkpointing": "block" if name in RECOMPUTED else "none",
            **({"parallel__pipeline_schedule": SCHEDULES[name]} if name in SCHEDULES else {}),
        }
        for name in sorted(PIPELINE_MODELS | CONTEXT_MODELS | EXPERT_MODELS)
    },
    "transformers noise": {
        "model": {
            "kind": "huggingface", "name_or_path": "mistral", "pretrained": False, "attention_kernel": "reference",
        },
        "train__embedding_noise": 5.0, "log__accuracy": True,
    },
    "single rows": {
        "model": LLAMA | {"num_kv_heads": 2}, "data__document_mask": True, "train__micro_batch_sequences": 1,
    },
    "multi-query": {
        "model": LLAMA | {"num_kv_heads": 1, "qk_norm": True}, "data__document_mask": True, "log__accuracy": True,
    },
}  # fmt: skip


def sizes_of(layout: str) -> list[int]:
    return [int(size) for size in layout.partition(":")[0].split(",")]


def cases_of(layout: str) -> list[str]:
    """The cases that a layout trains: all alone, one of them with other divisions."""
    if ":" in layout:
        return layout.partition(":")[2].split("+")
    by_layout = {
        "1,1,2": ["llama", "gemma3", "gpt2"], "1,2,2": ["gemma3"], "1,1,2,1,1,1": ["gemma3", "gpt2"],
        "1,1,1,2": ["llama", "gemma3", "documents", "zero bubble"], "2,1,1,2": ["documents"],
        "1,2,1,2": ["gemma3", "documents", "zero bubble"], "1,2,1": [],
        "1,1,1,1,2": ["gemma3", "noise"], "1,1,1,1,4": ["multi-query"], "2,1,1,1,2": ["noise"],
        "1,2,1,1,2": ["gemma3"],
        "1,1,1,1,2,0,1,1": ["gemma3", "documents", "three heads"], "1,1,1,1,4,0,1,1": ["multi-query", "three heads"],
        "2": ["llama", "noise"], "1,2": ["gemma3", "documents"], "4": ["noise"], "1,4": ["gemma3"],
        "2,2": ["documents"], "2,1,1,1,2,0,1,1": ["three heads"], "1,2,1,1,2,0,1,1": ["gemma3"],
        "2,1,1,1,1,0,2": ["experts"], "4,1,1,1,1,0,2": ["experts"],
        "1,1,2,2": ["llama", "gemma3", "documents", "zero bubble"], "1,1,2,2,1,1": ["gemma3", "zero bubble"],
        "2,1,2,2": ["documents"], "1,2,2,2": ["gemma3"],
        "1,1,2,1,2": ["noise"], "1,1,2,1,2,1": ["gpt2"], "1,1,2,1,2,0,1,1": ["llama"],
        "1,1,1,2,2": ["documents"], "1,1,1,2,2,0,1,1": ["zero bubble"], "1,1,2,2,2": ["documents"],
        "1,2,2,1,2": ["gemma3"], "1,2,1,2,2": ["zero bubble"],
    }  # fmt: skip
    return by_layout.get(layout, ["llama"])


def state_case(layout: str) -> str:
    """The case whose state moves through a layout."""
    if ":" in layout:
        return cases_of(layout)[0]
    return "experts, muon" if layout.count(",") == 6 else "gemma3"


def config_of(
    case: str,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    positions: int = 1,
    sequence: int = 0,
    experts: int = 1,
    ring: int = 0,
) -> RunConfig:
    own, only = "parallel__", {"pipeline_schedule": pipeline > 1}
    parallel = {
        "data_parallel_size": data, "fsdp_size": fsdp, "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline, "context_parallel_size": positions,
        "sequence_parallel": bool(sequence), "expert_parallel_size": experts,
        "context_parallel_kind": "ring" if ring else "ulysses",
    }  # fmt: skip
    sections: dict[str, Any] = {}
    for key, value in CASES[case].items():
        if not key.startswith(own):
            sections[key] = value
        elif only[key.removeprefix(own)]:
            parallel[key.removeprefix(own)] = value
    sections.setdefault("train__micro_batch_sequences", 2)
    return configuration(**sections, log__parameter_norms=True, optimizer__eps=SMOOTH_EPS, parallel=parallel)


def rows_of_step(config: RunConfig, seed: int, step: int) -> Batch:
    """Eight fresh rows in micro-batches, of three documents each if those are masked."""
    shape_AB = 8 // config.train.micro_batch_rows, config.train.micro_batch_rows
    batch = batch_of(random_rows(8, seed + step), shape_AB[0], step=step)
    batch = dataclasses.replace(batch, row_digests_AB=np.ones(shape_AB, np.uint64))  # digest 0 is that of padding
    if not config.data.document_mask:
        return batch
    cuts_ABT = np.sort(np.random.default_rng([seed, step]).integers(1, POSITIONS, (*shape_AB, 2)), axis=-1)
    places_T = np.arange(POSITIONS)
    segments_ABT = 1 + (places_T >= cuts_ABT[..., :1]).astype(np.int32) + (places_T >= cuts_ABT[..., 1:])
    starts_ABT = np.where(segments_ABT == 1, 0, np.where(segments_ABT == 2, cuts_ABT[..., :1], cuts_ABT[..., 1:]))
    return dataclasses.replace(
        batch, segment_ids_ABT=segments_ABT.astype(np.int32), position_ids_ABT=(places_T - starts_ABT).astype(np.int32)
    )


def engine_of(config: RunConfig, dist: DistributedContext) -> Any:
    return backends.load("torch").create(config, spec_of(config), dist)


def spec_of(config: RunConfig) -> ModelSpec:
    if config.model.kind == "decoder":
        return decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    import transformers

    from backends.torch_engine.transformers_models import MODELS as TRANSFORMERS_MODELS
    from backends.torch_engine.transformers_models import SHARED
    from vorox.backends.torch_engine.networks.huggingface_settings import resolve

    name = str(config.model.name_or_path)
    own = {**SHARED, **(TRANSFORMERS_MODELS | ONLY_DIVIDED)[name], "vocab_size": VOCAB}
    own["tie_word_embeddings"] = name not in UNTIED
    own |= FIVE_LAYERS.get(name, {})
    # Behind a norm, steps of LR turn smaller weights about: in OLMo 3, differences double from step to step. Gemma 3
    # has norms on both sides of five layers: with 0.15, fp32 gradients of step 1 are up to 1e-5 away from float64.
    own["initializer_range"] = 0.3 if name == "gemma3_text" else 0.15
    values = transformers.AutoConfig.for_model(name, **own).to_json_string()
    return resolve(config, json.loads(values), revision=None, tokenizer_vocab_size=VOCAB)


def part_of(batch: Batch, shard: DataShard) -> Batch:
    """The micro-batches that a rank reads of a step."""
    mine = slice(shard.index, None, shard.count)
    arrays = {
        field.name: value[mine]
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), np.ndarray)
    }
    return dataclasses.replace(batch, **arrays, num_target_tokens=batch.num_target_tokens // shard.count)


def in_order(order: Sequence[int]) -> Callable[[Batch], Batch]:
    """Return a function that gives a step the same micro-batches in another order."""

    def arrange(batch: Batch) -> Batch:
        arrays = {
            field.name: value[list(order)]
            for field in dataclasses.fields(batch)
            if isinstance(value := getattr(batch, field.name), np.ndarray)
        }
        return dataclasses.replace(batch, **arrays)

    return arrange


def train(engine: Any, seed: int, arrange: Callable[[Batch], Batch] = lambda batch: batch) -> dict[str, Any]:
    """Train on fresh rows; return numbers of every step, gradients of the first, weights of the last."""
    found: dict[str, Any] = {"values": [], "statistics": []}
    for step in range(STEPS):
        batch = arrange(rows_of_step(engine._config, seed, step))
        result = engine.train_step(part_of(batch, engine.data_shard), lr=LR, weight_decay=0.1).fetch()
        found["values"].append([result.loss, result.grad_norm, result.extra["parameter_norm"]])
        shown = ("activation", "router")
        found["statistics"].append([value for name, value in sorted(result.extra.items()) if name.startswith(shown)])
        if step == 0:
            gradients = engine.parameters.whole(engine.parameters.gradients)
            found |= {f"gradient.{name}": gradient.detach().numpy().copy() for name, gradient in gradients}
    held_out = batch_of(random_rows(4, seed + STEPS))
    evaluation = engine.eval_step(held_out)
    found["evaluation"] = [evaluation.loss_sum, evaluation.num_correct]
    found["logits"] = engine.logits(held_out.tokens_ABT[0])
    decoder = engine.decoder(4, POSITIONS)
    decoder.feed(held_out.tokens_ABT[0][:, :-1])
    found["decoded"] = decoder.feed(held_out.tokens_ABT[0][:, -1:])
    return found | {f"weight.{name}": array for name, array in engine.export_weights()}


def replicated_bits(engine: Any) -> str:
    """A hash of the parameters that several ranks of a replica have: with context parallelism all; with tensor
    parallelism those that are not divided, of all stages; with expert parallelism all but experts; of a pipeline a
    tied embedding. Empty on ranks of a pipeline that do not need it."""
    found, ranks = hashlib.sha256(), engine._ranks
    if ranks.pipeline_parallel_size > 1:
        stages = StagePlacement.of(engine._spec.num_layers, engine._config.parallel).devices[ranks.pipeline_index]
        if (name := tied_embedding(engine._spec)) is not None:
            if all(row.name != name for row in parameters_of(engine._spec, stages)):
                return ""
            tied = dict(engine.parameters.local.whole(engine.parameters.values))[name]
            found.update(tied.detach().numpy().tobytes())
        if ranks.tensor_parallel_size == 1:
            return found.hexdigest()
    divides_experts = ranks.expert_parallel_size > 1
    shapes = {one.name: one.shape for one in engine._spec.parameters if not (divides_experts and one.is_routed)}
    inner = getattr(engine.parameters, "_inner", engine.parameters)
    for name, view in inner.whole(engine.parameters.values):
        if tuple(view.shape) == shapes.get(name):
            found.update(name.encode() + view.detach().numpy().tobytes())
    return found.hexdigest()


def check_resume(config: RunConfig, dist: DistributedContext, seed: int, target: Path) -> None:
    """A state that is loaded in the middle gives the bits of the steps that follow it."""
    engine = engine_of(config, dist)

    def steps(first: int, end: int) -> list[tuple[float, float]]:
        batches = [part_of(rows_of_step(config, seed, step), engine.data_shard) for step in range(first, end)]
        results = [engine.train_step(batch, lr=LR, weight_decay=0.1).fetch() for batch in batches]
        return [(result.loss, result.grad_norm) for result in results]

    steps(0, 2)
    save(engine, target, dist)  # overwrites the parameters
    dist.barrier("saved in the middle")
    engine.load(target)
    expected, fingerprint = steps(2, 4), engine.fingerprint()
    engine = engine_of(config, dist)
    engine.load(target)
    assert steps(2, 4) == expected
    assert engine.fingerprint() == fingerprint


def main() -> None:
    seed, source, folder = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    dist = backends.load("torch").connect(config_of("llama"))
    for layout in sys.argv[4:]:
        sizes = layout.partition(":")[0]
        for case in cases_of(layout):
            engine = engine_of(config_of(case, *sizes_of(layout)), dist)
            found = train(engine, seed)
            np.savez(folder / f"{sizes}-{case}-{dist.rank}.npz", bits=replicated_bits(engine), **found)
        engine = engine_of(config_of(state_case(layout), *sizes_of(layout)), dist)
        recorded = read_manifest(source)["metadata"]["fingerprint"]
        engine.load(source)
        assert engine.fingerprint() == recorded
        source = folder / f"saved-{sizes}"
        save(engine, source, dist)
        dist.barrier(f"saved {sizes}")
        engine.load(source)
        assert engine.fingerprint() == recorded
        middle = {"1,1,1,2": "documents", "1,2,1,1,2": "noise", "1,2,1,1,2,0,1,1": "three heads"}
        if layout in middle:
            config = config_of(middle[layout], *sizes_of(layout))
            check_resume(config, dist, seed, folder / f"middle-{layout}")
    dist.barrier("end")


if __name__ == "__main__":
    main()
