"""Tiny transformers models, written by transformers on the spot with random weights, and batches for them."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training_device import DEVICE
from vorox.backends.torch_engine.engine import TorchEngine, create
from vorox.backends.torch_engine.networks.huggingface_settings import resolve
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.config import load_config
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig

VOCAB, LENGTH = 97, 24
DOCUMENTS = ((10, 14), (24,), (5, 9, 6))  # the last row ends in padding
SHARED = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi3": {"resid_pdrop": 0.0},
    "olmo2": {},
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "gpt_neox": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
    },
    "gpt_oss": {**_EXPERTS, "sliding_window": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4},
    "nemotron": {},
    "nemotron_h": {
        "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
        "chunk_size": 8,
    },
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
STATE_SPACE_MODELS: dict[str, dict[str, Any]] = {
    "nemotron_h": MODELS["nemotron_h"],
    "mamba": MODELS["mamba"],
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "zamba2": {
        "num_hidden_layers": 3, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 8, "mamba_ngroups": 2,
        "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4, "layers_block_type": ["mamba", "hybrid", "mamba"],
        "use_mem_rope": True,
    },
    "falcon_mamba": {"state_size": 4},
    "jamba": {
        "mamba_d_state": 4, "mamba_dt_rank": 3, "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
}  # fmt: skip
"""Models with Mamba layers; in packed rows, their states start at zero in every document."""
LEAKING_HYBRIDS = {
    "granitemoehybrid": _MAMBA2
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48}
}
"""Models with Mamba layers whose attention ignores position ids (transformers 5.23)."""
SEPARATE_ROWS = {"gpt_oss", "bloom"}
"""Models whose layers do not separate documents by position ids (transformers 5.23)."""


def write_model(directory: Path, name: str, **values: Any) -> Path:
    """Write a model with random weights far from their initial values."""
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(
        name, **{**SHARED, **(MODELS | STATE_SPACE_MODELS | LEAKING_HYBRIDS)[name], **values}
    )
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros would choose experts by their scores alone
                buffer.normal_(std=0.5)
    module.save_pretrained(directory)
    return directory


def configuration(directory: Path, *overrides: str) -> RunConfig:
    return load_config(
        "quickstart",
        [
            "backend=torch", "model.kind=huggingface", f"model.name_or_path={directory}", "data.document_mask=true",
            f"data.sequence_length_tokens={LENGTH}", "train.global_batch_sequences=3", "train.micro_batch_sequences=3",
            f"runtime.device={DEVICE}", "eval.prompts=[]", "optimizer.name=adamw", "optimizer.weight_decay=0.1",
            "optimizer.clip_norm=1.0", "optimizer.beta2=0.95", "optimizer.decay_embeddings=false", *overrides,
        ],
    )  # fmt: skip


def engine_of(directory: Path, *overrides: str) -> TorchEngine:
    """An engine with the weights of a directory."""
    config = configuration(directory, *overrides)
    values = json.loads((directory / "config.json").read_bytes())
    spec = resolve(config, values, revision=None, tokenizer_vocab_size=2)
    engine = create(config, spec, DistributedContext())
    if config.model.pretrained:
        engine.import_pretrained(directory)
    return engine


def batch_of(step: int, *, micro_batches: int = 1) -> Batch:
    """Packed rows of random tokens, with labels inside of documents only."""
    generator = np.random.default_rng(step)
    rows, tokens = len(DOCUMENTS), generator.integers(0, VOCAB, (micro_batches, len(DOCUMENTS), LENGTH), np.int32)
    labels = np.full_like(tokens, IGNORED_LABEL)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for segment, length in enumerate(lengths, start=1):
            end = start + length
            labels[:, row, start : end - 1] = tokens[:, row, start + 1 : end]
            segments[:, row, start:end], positions[:, row, start:end] = segment, np.arange(length)
            start = end
    return Batch(
        step, tokens, labels, segments, positions, np.ones((micro_batches, rows), np.uint64),
        int((labels != IGNORED_LABEL).sum()), DataCursor("", 0, step + 1, 0, 0),
    )  # fmt: skip


def plain_adamw(module: torch.nn.Module, decayed: Container[str], lr: float) -> torch.optim.AdamW:
    """PyTorch's own AdamW with the two groups of the default configuration; ``decayed`` names the decayed ones."""
    named = dict(module.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [value for name, value in named.items() if name in decayed], "weight_decay": 0.1},
            {"params": [value for name, value in named.items() if name not in decayed], "weight_decay": 0.0},
        ],
        lr=lr, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
