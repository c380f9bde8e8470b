"""The role of every weight of transformers models: Muon, weight decay, FLOPs and pruning act on what it is."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from vorox import backends
from vorox.core.batch import Batch, DataCursor
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.weights import to_huggingface
from vorox.models.matrix_layout import MatrixLayout
from vorox.models.module_spec import ModuleSpec, Row
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.pruning import Pruning, check_pruning, prune
from vorox.planning.flops import causal_flops_per_token, flops_per_token

pytestmark = [pytest.mark.hf, pytest.mark.torch]
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, EXPERTS = 96, 32, 4
SHARED = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTRAL = SHARED | {
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
GPT_OSS = SHARED | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 16}
LLAMA4 = SHARED | {
    "intermediate_size": 16, "intermediate_size_mlp": 48, "num_local_experts": EXPERTS, "num_experts_per_tok": 1,
    "attention_chunk_size": 8, "num_hidden_layers": 4,
}  # fmt: skip
MAMBA2 = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 16, "state_size": 8,
    "n_groups": 1, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = SHARED | {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "n_group": 1, "topk_group": 1,
}  # fmt: skip
FALCON = {key: value for key, value in SHARED.items() if key != "head_dim"} | {"multi_query": True}
GEMMA4 = {key: value for key, value in SHARED.items() if key != "tie_word_embeddings"} | {
    "num_hidden_layers": 6, "sliding_window": 20, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
}  # fmt: skip


def configuration(model: dict[str, Any], **optimizer: Any) -> RunConfig:
    return RunConfig.model_validate({
        "backend": "torch", "model": model,
        "data": {"sources": [{"name": "t", "format": "txt"}], "sequence_length_tokens": LENGTH},
        "train": {"num_steps": 20, "global_batch_sequences": 4, "micro_batch_sequences": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-5, "clip_norm": None, **optimizer},
        "loss": {"load_balancing_weight": 0.0}, "runtime": {"device": "cpu", "num_threads": 1},
    })  # fmt: skip


FOREIGN = {"kind": "huggingface", "name_or_path": "x", "pretrained": False}


def config_json(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    config = transformers.CONFIG_MAPPING[model_type](**values)
    return {**json.loads(config.to_json_string(use_diff=False)), "model_type": model_type}


def spec_of(model_type: str, values: dict[str, Any]) -> ModuleSpec:
    spec = backends.model_spec(
        configuration(FOREIGN), config_json(model_type, values), revision=None, tokenizer_vocab_size=VOCAB
    )
    assert isinstance(spec, ModuleSpec)
    return spec


def native_spec(model: dict[str, Any]) -> DecoderSpec:
    spec = backends.model_spec(configuration(model), None, revision=None, tokenizer_vocab_size=VOCAB)
    assert isinstance(spec, DecoderSpec)
    return spec


NATIVE_GPT2 = {
    "family": "gpt2", "positions": "learned", "norm": "layer_norm", "norm_bias": True, "activation": "gelu_tanh",
    "attention_bias": True, "mlp_bias": True, "tie_embeddings": True, "num_layers": 2, "hidden_size": 32,
    "num_heads": 4, "vocab_size": VOCAB,
}  # fmt: skip
NATIVE_MIXTRAL = {
    "family": "mixtral", "num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2,
    "num_experts": EXPERTS, "experts_per_token": 2, "tie_embeddings": False, "rope_theta": 10000.0, "norm_eps": 1e-5,
    "vocab_size": VOCAB,
}  # fmt: skip


def stacked(named: dict[str, np.ndarray], row: Row) -> np.ndarray:
    """Return a weight of Mixtral as transformers stacks it, from the published names of single experts."""
    if row.name in named:
        return named[row.name].reshape(row.shape)
    prefix = f"model.layers.{row.name.split('.')[2]}.block_sparse_moe."
    if row.name.endswith("mlp.gate.weight"):
        return named[f"{prefix}gate.weight"]
    names = ("w1", "w3") if row.name.endswith("gate_up_proj") else ("w2",)
    experts = [[named[f"{prefix}experts.{expert}.{name}.weight"] for name in names] for expert in range(EXPERTS)]
    return np.stack([np.concatenate(matrices) for matrices in experts])


def train(engine: Any, seed: int) -> np.ndarray:
    rng, losses = np.random.default_rng(seed), []
    for step in range(15):
        tokens = rng.integers(0, VOCAB, (1, 4, LENGTH + 1)).astype(np.int32)
        batch = Batch(
            step, tokens[:, :, :-1].copy(), tokens[:, :, 1:].copy(), None, None, np.zeros((1, 4), np.uint64),
            4 * LENGTH, DataCursor("", 0, step + 1, 0, 0),
        )  # fmt: skip
        losses.append(engine.train_step(batch, lr=1e-3, weight_decay=0.1).fetch().loss)
    return np.array(losses)


@pytest.mark.parametrize(
    ("model_type", "values", "native"),
    [("gpt2", GPT2, NATIVE_GPT2), ("mixtral", MIXTRAL, NATIVE_MIXTRAL)], ids=["gpt2", "mixtral"],
)  # fmt: skip
def test_muon_trains_a_foreign_model_as_the_native_one(
    model_type: str, values: dict[str, Any], native: dict[str, Any]
) -> None:
    """Transposed layers, fused projections and stacked experts hold the same matrices as the native decoder."""
    seed = int(np.random.default_rng().integers(1 << 30))
    load = backends.load("torch").create
    spec, foreign = native_spec(native), spec_of(model_type, values)
    losses = {}
    for name in ("adamw", "muon"):
        ours = load(configuration(native, name=name), spec, DistributedContext())
        theirs = load(configuration(FOREIGN, name=name), foreign, DistributedContext())
        named = dict(to_huggingface(spec, ours.export_weights()))
        theirs.import_weights([(row.name, stacked(named, row)) for row in foreign.rows])
        losses[name] = train(theirs, seed)
        np.testing.assert_allclose(losses[name], train(ours, seed), atol=2e-6, err_msg=f"{name}, seed {seed}")
    assert np.abs(losses["muon"] - losses["adamw"]).max() > 1e-3, "Muon would be AdamW"
    assert flops_per_token(foreign, LENGTH) == flops_per_token(spec, LENGTH)
    assert causal_flops_per_token(foreign, LENGTH) == causal_flops_per_token(spec, LENGTH)


@pytest.mark.parametrize(
    ("model_type", "values", "expected"),
    [
        ("gpt_oss", GPT_OSS, {"experts.gate_up_proj": (4, True, (1, 1)), "experts.down_proj": (4, True, ())}),
        ("llama4_text", LLAMA4, {"experts.gate_up_proj": (4, True, (16, 16)), "experts.down_proj": (4, True, ())}),
        ("mixtral", MIXTRAL, {"experts.gate_up_proj": (4, False, (48, 48)), "q_proj.weight": (1, False, ())}),
        ("phi3", SHARED, {"qkv_proj.weight": (1, False, (32, 16, 16)), "gate_up_proj.weight": (1, False, (48, 48))}),
        ("gpt_neox", SHARED, {"query_key_value.weight": (1, False, (8, 8, 8))}),
        ("falcon", FALCON, {"query_key_value.weight": (1, False, (32, 8, 8))}),
        ("mamba2", MAMBA2, {"in_proj.weight": (1, False, (64, 64, 8, 8, 4)), "out_proj.weight": (1, False, ())}),
    ],
)  # fmt: skip
def test_how_weights_divide_into_matrices(model_type: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    """Against how transformers slices the same weights."""
    rows = spec_of(model_type, values).rows
    for ending, (count, is_transposed, parts) in expected.items():
        row = next(row for row in rows if row.name.endswith(ending))
        assert (row.kind, row.layout) == ("matrix", MatrixLayout(count, is_transposed, parts)), row.name


@pytest.mark.parametrize("layout", [
    MatrixLayout(), MatrixLayout(is_transposed=True), MatrixLayout(3), MatrixLayout(3, True, (1, 1)),
    MatrixLayout(3, False, (4, 2)), MatrixLayout(parts=(2, 1, 1)), MatrixLayout(2, True),
])  # fmt: skip
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_weight_is_split_and_joined(layout: MatrixLayout, library: str) -> None:
    shape = (12, 8) if layout.count in (1, 2) else (3, 12, 8) if not layout.is_transposed else (3, 8, 12)
    stored = np.random.default_rng().normal(size=shape).astype(np.float32)
    array: Any = stored if library == "numpy" else torch.from_numpy(stored)
    parts = layout.split(array)
    assert [tuple(part.shape[1:]) for part in parts] * layout.count == layout.shapes(shape)
    joined = layout.join(parts, shape, np.concatenate if library == "numpy" else torch.cat)
    np.testing.assert_array_equal(np.asarray(joined), stored)


def test_the_parts_of_interleaved_projections() -> None:
    """gpt_oss reads the gate from even and the up projection from odd columns."""
    stored = np.random.default_rng().normal(size=(EXPERTS, 6, 10))
    gate, up = MatrixLayout(EXPERTS, True, (1, 1)).split(stored)
    np.testing.assert_array_equal(gate, stored[..., ::2].swapaxes(1, 2))
    np.testing.assert_array_equal(up, stored[..., 1::2].swapaxes(1, 2))


UNDECAYED = re.compile(r"bias|A_log|norm|scale|\.D$|dt_bias|time_|temp|gamma|sinks|_decay", re.IGNORECASE)
TYPES: dict[str, dict[str, Any]] = {
    "gpt_oss": GPT_OSS, "mamba": {**SHARED, "state_size": 8}, "falcon_mamba": {**SHARED, "state_size": 8},
    "jamba": SHARED, "recurrent_gemma": {**SHARED, "lru_width": 32, "num_key_value_heads": 1}, "rwkv": SHARED,
    "kimi_linear": SHARED, "cohere": {**SHARED, "use_qk_norm": True}, "mixtral": MIXTRAL, "gpt2": GPT2,
    "ernie4_5_moe": SHARED, "gemma4_text": GEMMA4, "apertus": SHARED, "minimax": SHARED,
}  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_biases_scales_and_states_are_not_decayed(model_type: str) -> None:
    spec = spec_of(model_type, TYPES[model_type])
    groups = optimizer_groups(spec, configuration(FOREIGN).optimizer)
    decayed = {name for name, group in groups.items() if group.rule == "decayed"}
    assert not [name for name in decayed if UNDECAYED.search(name.rpartition(".")[2]) or ".norm" in name]
    vectors = {row.name for row in spec.parameters if max(row.shape, default=1) == row.num_elements}
    assert not decayed & vectors
    matrices = {row.name for row in spec.rows if row.kind == "matrix"}
    assert matrices <= decayed
    assert sum(row.num_elements for row in spec.parameters if row.kind == "matrix") > spec.num_parameters // 10


def shapes_of(model_type: str, values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**values))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def matmul_weights(shapes: dict[str, tuple[int, ...]], share: float, *, tied: bool) -> float:
    """Count weights that multiply: by name, independently of the code under test."""
    total = 0.0
    for name, shape in shapes.items():
        is_table = re.search(r"embed|wte|wpe", name) is not None and "lm_head" not in name
        if len(shape) < 2 or is_table or "conv1d" in name or name.endswith("_bias"):
            continue
        total += np.prod(shape) * (share if ".experts." in name else 1.0)
    return total + (32 * VOCAB if tied else 0)


@pytest.mark.parametrize(
    ("model_type", "values", "share", "attention"),
    [
        ("gpt_oss", GPT_OSS, 0.5, 12 * 32 * (16 + LENGTH)),
        ("llama4_text", LLAMA4, 0.25, 12 * 32 * (3 * 8 + LENGTH)),
        ("deepseek_v3", DEEPSEEK, 0.5, 6 * 4 * (16 + 10) * 2 * LENGTH),
        ("mamba2", MAMBA2, 1.0, 3 * 21 * 64 * 8),
        ("gpt2", GPT2, 1.0, 12 * 32 * 2 * LENGTH),
    ],
)  # fmt: skip
def test_flops_against_a_count_from_shapes(
    model_type: str, values: dict[str, Any], share: float, attention: float
) -> None:
    weights = matmul_weights(shapes_of(model_type, values), share, tied=model_type == "gpt2")
    assert flops_per_token(spec_of(model_type, values), LENGTH) == pytest.approx(6 * weights + attention)


def test_flops_of_layers_with_other_heads() -> None:
    """Gemma 4: heads of full attention are wider than those with a window."""
    spec = spec_of("gemma4_text", GEMMA4)
    assert sorted(set(spec.attention_widths)) == [4 * 8, 4 * 16]
    keys = [LENGTH if window is None else 20 for window in spec.layer_windows]
    expected = 12 * sum(width * count for width, count in zip(spec.attention_widths, keys, strict=True))
    assert flops_per_token(spec, LENGTH) == pytest.approx(6 * spec.num_matmul_weights + expected)


def test_chunks_are_counted_pair_by_pair() -> None:
    spec = spec_of("llama4_text", LLAMA4)
    near = sum(key // 8 == query // 8 for query in range(LENGTH) for key in range(query + 1))
    pairs = 3 * near + LENGTH * (LENGTH + 1) // 2
    assert causal_flops_per_token(spec, LENGTH) == pytest.approx(6 * spec.num_matmul_weights + 12 * 32 * pairs / LENGTH)


@pytest.mark.parametrize(("model_type", "values"), [("mixtral", MIXTRAL), ("gpt2", GPT2), ("gpt_oss", GPT_OSS)])
def test_pruning_prunes_every_expert_and_transposed_layers(model_type: str, values: dict[str, Any]) -> None:
    rng, spec = np.random.default_rng(), spec_of(model_type, values)
    weights = {row.name: rng.normal(size=row.shape).astype(np.float32) for row in spec.rows}
    halves = dict(prune(spec, weights.items(), Pruning.parse("magnitude:0.5")))
    check_pruning(spec, Pruning.parse("2:4"))
    groups = dict(prune(spec, weights.items(), Pruning.parse("2:4")))
    for row in spec.rows:
        for pruned in (halves[row.name], groups[row.name]):
            experts = pruned.reshape(row.layout.count, -1)
            zeros = (experts == 0).mean(1)
            assert zeros == pytest.approx(0.5 if row.kind == "matrix" else 0.0), row.name
            np.testing.assert_array_equal(pruned[pruned != 0], weights[row.name][pruned != 0])
        if row.kind == "matrix":  # along the inputs, which come second in a transposed layer
            array = groups[row.name]
            inputs_last = array.swapaxes(-1, -2) if row.layout.is_transposed else array
            assert ((inputs_last.reshape(-1, 4) == 0).sum(1) == 2).all(), row.name


def test_a_table_survives_json() -> None:
    spec = spec_of("gpt_oss", GPT_OSS)
    stored = json.loads(json.dumps(spec.to_json()))
    assert type(spec).from_json(stored).rows == spec.rows
    assert not spec.differences(stored)
