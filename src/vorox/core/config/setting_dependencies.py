"""Dependencies between settings: keys that only have an effect under certain values of another.

No setting is ignored silently: one without effect in the layer that sets it is a problem. One that a later layer
disables (``tokenizer.kind=byte`` over a preset's ``tokenizer.vocab_size``) is reset to its default, so the resolved
configuration is consistent. The same holds for mutually exclusive keys, such as the three lengths of a run: the latest
layer wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from vorox.core.config.schema_fields import find_field
from vorox.core.config.tree import ConfigTree, Problem
from vorox.core.config.yaml_reader import Json
from vorox.core.extensions import is_extension
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.model import IMAGE_PROCESSOR_KEYS, MAMBA_KEYS, ModelConfig
from vorox.core.schema.vision import VisionConfig


@dataclass(frozen=True, slots=True)
class Dependency:
    """A key that has an effect only under certain values of another key, its switch."""

    key: str
    switch: str
    holds: Callable[[Json], bool]
    remedy: str


def _is(*values: Json) -> Callable[[Json], bool]:
    return lambda value: value in values


def _is_or_function(*values: Json) -> Callable[[Json], bool]:
    return lambda value: value in values or is_extension(value)


def _is_set(value: Json) -> bool:
    return value is not None


def _reads_the_hub(paths: Json) -> bool:
    return isinstance(paths, list | tuple) and any(isinstance(path, str) and path.startswith("hf://") for path in paths)


_MIX = "model.layer_pattern"
_FILES = ("txt", "jsonl", "csv", "parquet", "arrow", "mds", "bin")
_FIELDS = ("jsonl", "csv", "parquet", "arrow", "mds")
_CHATS = ("jsonl", "csv", "parquet", "arrow")
_TOKENS = ("bin", "mds")
_TORCH = (
    "model.vision.num_layers", "train.distillation.teacher", "train.distillation.logits", "train.quantization_aware",
    "optimizer.in_backward", "parallel.pipeline_parallel_size", "parallel.context_parallel_size",
    "parallel.sequence_parallel", "parallel.expert_parallel_size", "parallel.gradient_bucket_bytes",
    "parallel.fsdp_offload", "precision.float8",
)  # fmt: skip
_FILE_FORMAT = "a format other than python_stdlib"

SOURCE_LISTS = ("data.sources", "data.validation.sources")
"""The keys of the lists of sources."""

_SOURCE_DEPENDENCIES: tuple[tuple[str, str, Callable[[Json], bool], str], ...] = (
    ("paths", "format", _is_or_function(*_FILES), _FILE_FORMAT),
    ("fallback", "format", _is_or_function(*_FILES), _FILE_FORMAT),
    ("text_field", "format", _is(*_FIELDS), "format jsonl, csv, parquet, arrow or mds"),
    ("chat_fields", "format", _is(*_CHATS), "format jsonl, csv, parquet or arrow"),
    ("preference_pairs", "chat_fields", bool, "chat_fields [prompt, chosen, rejected] or [chosen, rejected]"),
    ("images_field", "format", _is("jsonl", "parquet", "arrow"), "format jsonl, parquet or arrow"),
    ("metadata_fields", "format", _is(*_FIELDS), "format jsonl, csv, parquet, arrow or mds"),
    ("delimiter", "format", _is("csv"), "format csv"),
    ("damaged_files", "format", _is("txt", "jsonl", "csv"), "gzip and zstd files of format txt, jsonl or csv"),
    ("tokens_field", "format", _is("mds"), "format mds"),
    ("tokenizer", "format", _is(*_TOKENS), "format bin or mds"),
    ("end_of_text_id", "format", _is(*_TOKENS), "format bin or mds"),
    ("ids_dtype", "format", _is(*_TOKENS), "format bin or mds"),
    ("hf_config", "format", _is_or_function(*_FILES), _FILE_FORMAT),
    ("hf_split", "format", _is_or_function(*_FILES), _FILE_FORMAT),
    ("revision", "format", _is_or_function(*_FILES), _FILE_FORMAT),
    ("hf_config", "paths", _reads_the_hub, "a path hf://OWNER/NAME"),
    ("hf_split", "paths", _reads_the_hub, "a path hf://OWNER/NAME"),
    ("revision", "paths", _reads_the_hub, "a path hf://OWNER/NAME"),
)
"""(key, switch, when it holds, remedy) within one source."""


def source_conflicts(source: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, remedy) for every setting of a source that has no effect under its other settings."""
    for key, switch, holds, remedy in _SOURCE_DEPENDENCIES:
        is_default = getattr(source, key) == type(source).model_fields[key].get_default(call_default_factory=True)
        if not is_default and not holds(getattr(source, switch)):
            yield key, remedy


_SHARED = {"kind", "name_or_path", "revision", "pretrained", "vocab_size", "attention_kernel", "rope_scaling", "vision",
           "image_processor"}  # fmt: skip
"""Settings of the section ``model`` that do not describe the native decoder."""

_ROUTING = (
    *("model.experts_per_token", "model.normalize_expert_weights"),
    *("loss.load_balancing_weight", "loss.router_z_loss_weight"),
)
DEPENDENCIES: tuple[Dependency, ...] = (
    Dependency("checkpoint.mirror_wait_seconds", "checkpoint.mirror", _is_set, "checkpoint.mirror"),
    *(
        Dependency(f"model.{key}", "model.kind", _is("huggingface"), "model.kind huggingface")
        for key in ("name_or_path", "revision", "pretrained", *IMAGE_PROCESSOR_KEYS)
    ),
    *(
        Dependency(f"model.{key}", "model.kind", _is_or_function("decoder"), "model.kind decoder")
        for key in (*(ModelConfig.model_fields.keys() - _SHARED), "rope_scaling.rope_type", "vision.num_layers")
    ),
    *(
        Dependency(f"model.vision.{key}", "model.vision.num_layers", bool, "an image encoder (model.vision.num_layers)")
        for key in VisionConfig.model_fields.keys() - {"num_layers"}
    ),
    *(Dependency(key, "backend", _is("torch"), "backend torch") for key in _TORCH),
    Dependency("model.block", "model.kind", _is("decoder"), "model.kind decoder"),
    *(
        Dependency(f"model.{key}", "model.block", lambda value: value is None, "the built-in blocks (no model.block)")
        for key in ("mlp", "attention_kernel")
    ),
    *(
        Dependency(f"adapter.{key}", "adapter.kind", _is("lora", "dora", "qlora"), "adapter.kind lora, dora or qlora")
        for key in ("rank", "alpha", "dropout_fraction", "target_modules")
    ),
    Dependency("train.from_weights", "model.kind", _is("decoder"), "model.kind decoder; or set model.name_or_path"),
    *(
        Dependency(f"train.distillation.{key}", switch, _is(value), f"{switch} {value}")
        for key in ("teacher", "logits")
        for switch, value in (
            *(("loss.name", "cross_entropy"), ("model.kind", "decoder"), ("parallel.kind", "native")),
            ("parallel.tensor_parallel_size", 1),
        )
    ),
    *(
        Dependency(f"train.{key}", "train.spike_policy", _is("rollback"), "train.spike_policy rollback")
        for key in ("spike_rollback_steps", "max_spike_rollbacks")
    ),
    *(
        Dependency(
            "runtime.recompute_every_steps",
            switch,
            lambda value, refused=refused: value not in refused,
            remedy,
        )
        for switch, refused, remedy in (
            ("runtime.determinism", ("none", "data"), "runtime.determinism bitwise"),
            ("parallel.kind", ("deepspeed",), "parallel.kind native"),
        )
    ),
    Dependency("runtime.rehearsal", "parallel.kind", _is("native"), "parallel.kind native"),
    Dependency("train.auto_micro_batch_sequences", "train.micro_batch_sequences", _is("auto"), "auto"),
    Dependency("train.ema_warmup", "train.ema_decay", _is_set, "train.ema_decay"),
    Dependency("eval.weights", "train.ema_decay", _is_set, "train.ema_decay"),
    Dependency("train.from_optimizer", "train.from_weights", _is_set, "train.from_weights"),
    *(
        Dependency(f"{sources}.*.{key}", f"{sources}.*.{switch}", holds, remedy)
        for sources in SOURCE_LISTS
        for key, switch, holds, remedy in _SOURCE_DEPENDENCIES
    ),
    Dependency(
        "data.validation.held_out_fraction",
        "data.validation.sources",
        lambda value: not value,
        "data.validation.sources to be empty: they replace the held-out fraction",
    ),
    Dependency(
        "data.validation.split",
        "data.validation.sources",
        lambda value: not value,
        "data.validation.sources to be empty: they replace the held-out fraction",
    ),
    Dependency(
        "data.validation.held_out_fraction",
        "data.validation.split",
        lambda value: value != "named",
        "data.validation.split other than named",
    ),
    *(
        Dependency(key, "data.validation.held_out_fraction", lambda value: value != 0, "a validation split")
        for key in ("eval.every_steps", "eval.by_source", "eval.prompts", "eval.functions")
    ),
    Dependency(
        "data.loader.prefetch_batches", "data.loader.num_threads", lambda value: value != 0, "at least one thread"
    ),
    *(
        Dependency(f"data.pipeline.{key}", "data.pipeline.staged", _is(True), "data.pipeline.staged=true")
        for key in (
            "fetch_threads",
            "filter_threads",
            "tokenize_threads",
            "augment_threads",
            "pack_threads",
            "queue_bytes",
        )
    ),
    Dependency("data.cache.grow", "data.mode", _is("cached"), "data.mode cached"),
    Dependency("data.streaming.retention_bytes", "data.mode", _is("streaming"), "data.mode streaming"),
    Dependency("data.streaming.prefetch_segments", "data.mode", _is("streaming"), "data.mode streaming"),
    Dependency("data.streaming.validation_bytes", "data.mode", _is("streaming"), "data.mode streaming"),
    Dependency("data.sources.*.split_quantiles", "data.sources.*.split_by", _is_set, "split_by"),
    Dependency("data.sources.*.split_names", "data.sources.*.split_by", _is_set, "split_by"),
    Dependency("data.sources.*.on_exhausted", "data.sources.*.max_epochs", _is_set, "max_epochs"),
    Dependency("data.growth.first_segment_units", "data.growth.mode", _is("strict"), "mode strict"),
    Dependency("data.growth.max_segment_units", "data.growth.mode", _is("strict"), "mode strict"),
    Dependency("data.growth.later_passes", "data.growth.mode", _is("strict"), "mode strict"),
    Dependency("data.growth.horizon_steps", "data.growth.mode", _is("strict", "elastic"), "mode strict or elastic"),
    Dependency("data.growth.on_starve", "data.growth.mode", _is("strict", "elastic"), "mode strict or elastic"),
    Dependency("data.growth.build", "data.growth.mode", _is("strict", "elastic"), "mode strict or elastic"),
    Dependency("train.epoch_dataset_fraction", "train.num_epochs", _is_set, "train.num_epochs"),
    Dependency("train.follow_growth", "train.num_epochs", _is_set, "train.num_epochs"),
    Dependency("tokenizer.vocab_size", "tokenizer.kind", _is("bpe", "none"), "kind bpe or none"),
    Dependency("tokenizer.end_of_text_id", "tokenizer.kind", _is("none"), "kind none"),
    Dependency("eval.prompts", "tokenizer.kind", lambda value: value != "none", "a tokenizer"),
    Dependency("eval.tasks", "tokenizer.kind", lambda value: value != "none", "a tokenizer"),
    Dependency("tokenizer.train_bytes", "tokenizer.kind", _is("bpe"), "kind bpe"),
    Dependency(
        "tokenizer.path",
        "tokenizer.kind",
        _is_or_function("file", "huggingface", "tiktoken"),
        "kind file, huggingface or tiktoken",
    ),
    Dependency("tokenizer.chat_template", "tokenizer.kind", lambda value: value != "none", "a tokenizer"),
    Dependency("tokenizer.revision", "tokenizer.kind", _is("huggingface"), "kind huggingface"),
    Dependency("tokenizer.pattern", "tokenizer.kind", _is("tiktoken"), "kind tiktoken"),
    *(
        Dependency(f"model.{key}", "model.positions", _is("rope"), "positions rope")
        for key in ("rope_theta", "rope_scaling.rope_type", "rotary_fraction")
    ),
    *(
        Dependency(f"model.rope_scaling.{key}", "model.rope_scaling.rope_type", _is(*types), f"rope_type {types[-1]}")
        for types, keys in (
            (("linear", "dynamic", "yarn", "llama3"), ("factor",)),
            (("yarn", "llama3"), ("original_max_positions_tokens",)),
            (("llama3",), ("low_freq_factor", "high_freq_factor")),
            (("yarn",), ("beta_fast", "beta_slow", "attention_factor", "truncate")),
        )
        for key in keys
    ),
    *(
        Dependency(f"model.{key}", "model.sliding_window_tokens", _is_set, "model.sliding_window_tokens")
        for key in ("layer_types", "sliding_rope_theta")
    ),
    *(Dependency(key, "model.num_experts", _is_set, "model.num_experts") for key in _ROUTING),
    *(Dependency(f"model.{key}", _MIX, lambda value: "M" in str(value), f"{_MIX} with M") for key in MAMBA_KEYS),
    Dependency("model.norm_unit_offset", "model.norm", _is("rms_norm"), "norm rms_norm"),
    Dependency("model.norm_bias", "model.norm", _is("layer_norm"), "norm layer_norm"),
    *(
        Dependency(f"optimizer.{key}", "optimizer.name", _is("adamw", "adamw_8bit", "muon"), "a built-in optimizer")
        for key in ("beta1", "beta2", "eps")
    ),
    Dependency("optimizer.muon_lr", "optimizer.name", _is("muon"), "optimizer muon"),
    Dependency("optimizer.muon_momentum", "optimizer.name", _is("muon"), "optimizer muon"),
    Dependency("optimizer.groups.*.lr_scale", "optimizer.groups.*.frozen", _is(False), "frozen false"),
    Dependency("schedule.decay_fraction", "schedule.name", _is("wsd"), "schedule wsd"),
    Dependency("schedule.min_lr_fraction", "schedule.name", _is("cosine", "linear", "wsd"), "a falling schedule"),
    Dependency(
        "schedule.final_weight_decay_fraction",
        "schedule.weight_decay",
        _is("linear", "cosine"),
        "schedule.weight_decay linear or cosine",
    ),
    *(
        Dependency(f"loss.{key}", "loss.name", _is("cross_entropy"), "loss cross_entropy")
        for key in ("z_loss_weight", "label_smoothing_fraction")
    ),
    *(
        Dependency(f"loss.{key}", "loss.name", _is("dpo"), "loss dpo")
        for key in ("dpo_beta", "dpo_label_smoothing_fraction")
    ),
    *(
        Dependency(f"parallel.{key}", "parallel.kind", _is("deepspeed"), "parallel.kind deepspeed")
        for key in ("zero_stage", "zero_offload", "deepspeed_config")
    ),
    *(
        Dependency(f"parallel.{key}", "parallel.kind", _is("native"), "parallel.kind native")
        for key in ("fsdp_size", "gradient_bucket_bytes", "reshard_after_forward")
    ),
    *(
        Dependency(f"parallel.{key}_parallel_size", "parallel.kind", _is("native"), "parallel.kind native")
        for key in ("tensor", "pipeline", "context")
    ),
    *(
        Dependency(f"parallel.{key}", f"parallel.{size}", lambda value: value != 1, f"parallel.{size} above 1")
        for key, size in (
            ("sequence_parallel", "tensor_parallel_size"),
            ("pipeline_schedule", "pipeline_parallel_size"),
            ("fsdp_offload", "fsdp_size"),
            ("context_parallel_kind", "context_parallel_size"),
        )
    ),
    *(
        Dependency(
            f"parallel.{key}",
            "parallel.deepspeed_config",
            lambda value: value is None,
            "no parallel.deepspeed_config: the file sets it",
        )
        for key in ("zero_stage", "zero_offload")
    ),
    Dependency("precision.float8_emulate", "precision.float8", _is_set, "precision.float8"),
    Dependency("precision.initial_loss_scale", "precision.dtype", _is("fp16"), "dtype fp16"),
    Dependency("log.wandb_project", "log.wandb", _is(True), "log.wandb=true"),
    Dependency("log.mlflow_experiment", "log.mlflow", _is(True), "log.mlflow=true"),
    Dependency("log.trackio_project", "log.trackio", _is(True), "log.trackio=true"),
    Dependency("log.webhook_events", "log.webhook", bool, "log.webhook"),
    Dependency("log.metadata_dsn_variable", "log.metadata", _is("postgres"), "log.metadata=postgres"),
    *(
        Dependency(f"eval.{key}", "eval.tasks", bool, "eval.tasks")
        for key in ("task_path", "tasks_every_steps", "num_task_documents", "tasks_max_seconds")
    ),
    Dependency("eval.sample_tokens", "eval.prompts", bool, "eval.prompts"),
    Dependency("eval.sample_temperature", "eval.prompts", bool, "eval.prompts"),
    Dependency("eval.sample_top_k", "eval.prompts", bool, "eval.prompts"),
)


IMPLIED: tuple[tuple[str, Json, str, Json], ...] = (
    ("data.growth.mode", "strict", "data.mode", "streaming"),
    ("data.growth.later_passes", "segments", "data.mode", "streaming"),
)
"""(key, value, switch, setting): defaults of keys under a setting of another key."""

EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("train.num_steps", "train.num_tokens", "train.num_epochs"),
    ("schedule.warmup_steps", "schedule.warmup_tokens", "schedule.warmup_fraction"),
)


def resolve_dependencies(tree: ConfigTree) -> None:
    """Reset keys that a later layer disables, and report keys that have no effect in the layer that sets them."""
    _fit_micro_batch(tree)
    for key, value, switch, setting in IMPLIED:
        if tree.get(switch) == setting and not tree.is_explicit(key):
            tree.set_default(key, value, f"{switch}={_show(setting)}")
    for group in EXCLUSIVE:
        given = [key for key in group if tree.get(key) is not None]
        latest = max((tree.origin(key).layer for key in given), default=-1)
        for key in given:
            if tree.origin(key).layer < latest:
                tree.reset(key)
    disabled: dict[str, float] = {}  # reset keys, by the layer that disabled them
    for dependency in DEPENDENCIES:
        for key in tree.expand_key(dependency.key):
            index = key.removeprefix(dependency.key.partition("*")[0]).partition(".")[0]
            switch = dependency.switch.replace("*", index)
            field = find_field(key)
            value, setting = tree.get(key), tree.get(switch)
            default = field.default if field else None
            if dependency.holds(setting) or _same(value, default):
                continue
            layer = disabled.get(switch, tree.origin(switch).layer)
            if tree.origin(key).layer < layer:
                tree.reset(key)
                disabled[key] = layer
                continue
            context = "" if isinstance(setting, list | tuple) and not setting else f" with {switch}={_show(setting)}"
            tree.problems.append(
                Problem(
                    f"{key}={_show(value)} has no effect{context}; it needs {dependency.remedy}",
                    tree.origin(key).text,
                    (key, switch),
                )
            )


def _fit_micro_batch(tree: ConfigTree) -> None:
    """Reduce the micro-batch to the batch if a later layer makes the batch smaller."""
    rows, micro = tree.get("train.global_batch_sequences"), tree.get("train.micro_batch_sequences")
    is_auto = tree.get("parallel.data_parallel_size") == "auto"
    parts = (1, 1) if is_auto else (tree.get("parallel.data_parallel_size"), tree.get("parallel.fsdp_size"))
    batch_origin = tree.origin("train.global_batch_sequences")
    if batch_origin.layer <= tree.origin("train.micro_batch_sequences").layer or not all(
        isinstance(number, int) and number > 0 for number in (rows, micro, *parts)
    ):
        return
    each, rest = divmod(cast(int, rows), cast(int, parts[0]) * cast(int, parts[1]))
    if not rest and 0 < each < cast(int, micro):
        tree.set_default("train.micro_batch_sequences", each, f"train.global_batch_sequences={rows}")


def _same(value: Json, default: object) -> bool:
    if isinstance(value, list) and isinstance(default, tuple):
        return tuple(value) == default
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _show(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
