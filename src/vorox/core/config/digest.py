"""The digest of a configuration: a hash of the settings that decide the bits of a run, and no others.

A ``RunConfig`` goes in; its values by dotted key, its digest, and its differences from another configuration come out.
``NOT_IN_DIGEST`` lists what the digest leaves out. Invariant: the digests of earlier versions stay equal.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from vorox.core.atomic import canonical_json
from vorox.core.config.schema_fields import schema_fields, wildcard
from vorox.core.config.setting_dependencies import SOURCE_LISTS
from vorox.core.config.synonyms import value_in_digest
from vorox.core.config.yaml_reader import Json, KeyPath
from vorox.core.config.yaml_writer import write_inline
from vorox.core.schema import RunConfig
from vorox.core.schema.model import MAMBA_KEYS

NOT_IN_DIGEST = (
    "model.preset",
    "model.family",
    *(
        f"{sources}.*.{key}"
        for sources in SOURCE_LISTS
        for key in (
            "preset",
            "metadata_fields",
            "max_decompressed_bytes",
            "max_decompression_ratio",
            "max_retries_per_unit",
            "stall_seconds",
        )
    ),
    "data.cache.directory",
    "data.growth.build",
    "data.loader",
    "data.pipeline",
    "data.mode",
    "data.streaming",
    "tokenizer.fast_path",
    "parallel.start_timeout_seconds",
    "checkpoint",
    "eval",
    "log",
    "parallel.reshard_after_forward",
    "runtime.stall_timeout_seconds",
    "runtime.cuda_graphs",
    "runtime.profile_steps",
    "runtime.recompute_every_steps",
    "runtime.rehearsal",
    "run.name",
    "run.directory",
)
"""Keys and sections that change no bit of the parameters: runs that differ only here are the same run.

Names and paths, prefetching, checkpoints, validation and logging. ``model.preset``, ``model.family`` and a source's
``preset`` only fill in keys that are in the digest themselves.
"""

DECIDED = ("train.auto_micro_batch_sequences",)
"""Keys that a run sets when it is created. They change bits, but not which run a configuration belongs to."""

DIGEST_OMITS_DEFAULT = (
    "adapter",
    *(f"model.{key}" for key in ("kind", "name_or_path", "revision", "pretrained")),
    "model.rope_scaling",
    *("model.rotary_fraction", "model.sliding_window_tokens", "model.layer_types"),
    "model.norm_placement",
    "model.norm_unit_offset",
    "model.scale_embeddings",
    "model.sliding_rope_theta",
    "model.query_pre_attn_scalar",
    "model.mlp",
    "model.block",
    "model.vision",
    "model.image_processor",
    "model.mup_base_hidden_size",
    *(f"model.{key}" for key in ("num_experts", "experts_per_token", "normalize_expert_weights")),
    *(f"loss.{key}" for key in ("load_balancing_weight", "router_z_loss_weight")),
    "model.layer_pattern",
    *(f"model.{key}" for key in MAMBA_KEYS),
    *(f"loss.{key}" for key in ("name", "dpo_beta", "dpo_label_smoothing_fraction")),
    "train.forward_backward",
    "optimizer.groups",
    "optimizer.layer_lr_decay",
    "optimizer.in_backward",
    *("precision.float8", "precision.float8_emulate"),
    "train.keep_zeros",
    "train.quantization_aware",
    "train.batch_stages",
    "train.distillation",
    "train.embedding_noise",
    "train.ema_decay",
    "train.ema_warmup",
    *(f"parallel.{key}" for key in ("kind", "zero_stage", "zero_offload", "deepspeed_config")),
    *(
        f"parallel.{key}"
        for key in ("pipeline_parallel_size", "pipeline_schedule", "context_parallel_size", "expert_parallel_size")
    ),
    "parallel.context_parallel_kind",
    "parallel.sequence_parallel",
    "parallel.gradient_bucket_bytes",
    "parallel.fsdp_offload",
    *(f"train.{key}" for key in ("spike_policy", "spike_deviations", "spike_window_steps", "max_spike_steps")),
    *(f"train.{key}" for key in ("spike_rollback_steps", "max_spike_rollbacks")),
    *(f"{sources}.*.{key}" for sources in SOURCE_LISTS for key in ("chat_fields", "preference_pairs", "images_field")),
    "tokenizer.chat_template",
)
"""Keys and sections younger than the first runs: a default is not part of the digest, so their digests stay equal."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs between two configurations; ``None`` also means a missing list entry."""

    key: str
    before: Json
    after: Json

    def __str__(self) -> str:
        return f"{self.key}: {write_inline(self.before)} -> {write_inline(self.after)}"


def config_values(config: RunConfig) -> dict[str, Json]:
    """Return the configuration as plain JSON values, with all keys."""
    return cast("dict[str, Json]", config.model_dump(mode="json"))


def flat_values(config: RunConfig) -> dict[str, Json]:
    """Return all leaves by dotted key (``data.sources.0.name``); lists of texts are leaves."""
    return flatten(config_values(config))


def flatten(values: Json) -> dict[str, Json]:
    """Return all leaves of plain values by dotted key."""
    flat: dict[str, Json] = {}

    def visit(value: Json, path: KeyPath) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, (*path, key))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                visit(item, (*path, index))
        else:
            flat[".".join(str(part) for part in path)] = value

    visit(values, ())
    return flat


@functools.lru_cache(maxsize=4096)
def in_digest(key: str) -> bool:
    """Whether a key is part of a run's identity."""
    return not _is_within(wildcard(key), NOT_IN_DIGEST)


def _is_within(key: str, names: Sequence[str]) -> bool:
    """Whether a list of keys and sections includes a key."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def config_digest(config: RunConfig) -> str:
    """Return the SHA-256, in hex, of all settings that decide the bits of the run."""
    return hashlib.sha256(canonical_json(digest_values(config))).hexdigest()


@functools.lru_cache(maxsize=4096)
def _omits_default(key: str) -> bool:
    return _is_within(wildcard(key), DIGEST_OMITS_DEFAULT)


def _is_default(key: str, value: Json) -> bool:
    return (tuple(value) if isinstance(value, list) else value) == schema_fields()[wildcard(key)].default


def digest_values(config: RunConfig) -> dict[str, Json]:
    """Return the keys that decide the bits of the run, with their values as digests spell them."""
    return {
        key: value_in_digest(key, value)
        for key, value in flat_values(config).items()
        if in_digest(key) and key not in DECIDED and not (_omits_default(key) and _is_default(key, value))
    }


def differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """Return all keys whose values differ, in schema order."""
    old, new = flat_values(before), flat_values(after)
    keys = list(dict.fromkeys([*old, *new]))
    return [Difference(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]
