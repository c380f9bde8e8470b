"""Habits of the schema: everything described, units in the names, nothing that nobody reads."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from vorox.core.config.schema_fields import admits, leaf_keys, schema_fields
from vorox.core.schema import RunConfig
from vorox.core.schema.optimizer import BUILT_IN_OPTIMIZERS

SOURCE = Path(__file__).parents[2] / "src" / "vorox"
UNITS = (
    "_tokens",
    "_steps",
    "_seconds",
    "_bytes",
    "_fraction",
    "_sequences",
    "_epochs",
    "_batches",
    "_rows",
    "_threads",
    "_segments",
    "_units",
    "_pixels",
)
COUNTS = re.compile(r"(^|\.)(num|max|keep)_\w+$")
WITHOUT_UNIT = {
    "data.sources.*.weight": "a ratio between sources",
    "data.sources.*.end_of_text_id": "a token id",
    "tokenizer.end_of_text_id": "a token id",
    "data.validation.sources.*.weight": "a ratio between sources",
    "data.validation.sources.*.end_of_text_id": "a token id",
    "tokenizer.vocab_size": "tokens of a vocabulary, as everybody calls it",
    "model.vocab_size": "as everybody calls it",
    "model.hidden_size": "as everybody calls it",
    "model.mup_base_hidden_size": "a hidden_size",
    "model.intermediate_size": "as everybody calls it",
    "model.experts_per_token": "as everybody calls it",
    "loss.load_balancing_weight": "a factor of a loss",
    "loss.router_z_loss_weight": "a factor of a loss",
    "model.vision.hidden_size": "as everybody calls it",
    "model.vision.intermediate_size": "as everybody calls it",
    "model.vision.merge_size": "as Qwen2-VL calls it",
    "train.batch_stages.*.start_step": "the number of a step",
    "model.image_processor.merge_size": "as Qwen2-VL calls it",
    "model.image_processor.temporal_patch_size": "as Qwen2-VL calls it",
    "model.image_processor.image_token_id": "an id",
    "model.image_processor.start_token_id": "an id",
    "model.image_processor.end_token_id": "an id",
    "model.head_dim": "as everybody calls it",
    "model.rope_theta": "the base of the rotary frequencies, a pure number",
    "model.rope_scaling.factor": "a pure number",
    "model.rope_scaling.low_freq_factor": "a pure number",
    "model.rope_scaling.high_freq_factor": "a pure number",
    "model.rope_scaling.beta_fast": "a pure number",
    "model.rope_scaling.beta_slow": "a pure number",
    "model.rope_scaling.attention_factor": "a pure number",
    "model.norm_eps": "a pure number",
    "model.sliding_rope_theta": "the base of the rotary frequencies, a pure number",
    "model.query_pre_attn_scalar": "a pure number",
    "model.init_std": "a pure number",
    "model.mamba_num_heads": "a count",
    "model.mamba_num_groups": "a count",
    "model.mamba_head_dim": "as everybody calls it",
    "model.mamba_state_size": "as everybody calls it",
    "model.mamba_time_step_min": "a pure number",
    "model.mamba_time_step_max": "a pure number",
    "optimizer.lr": "a pure number",
    "optimizer.beta1": "a pure number",
    "optimizer.beta2": "a pure number",
    "optimizer.eps": "a pure number",
    "optimizer.weight_decay": "a pure number",
    "optimizer.clip_norm": "a pure number",
    "optimizer.muon_lr": "a pure number",
    "optimizer.muon_momentum": "a pure number",
    "optimizer.groups.*.lr_scale": "a factor",
    "optimizer.layer_lr_decay": "a factor",
    "train.embedding_noise": "a pure number",
    "train.ema_decay": "a factor",
    "train.spike_deviations": "a factor of a deviation",
    "adapter.rank": "columns of a matrix, as everybody calls it",
    "adapter.alpha": "a pure number",
    "loss.z_loss_weight": "a pure number",
    "loss.dpo_beta": "a pure number",
    "train.distillation.temperature": "a pure number",
    "train.distillation.top_k": "tokens of the vocabulary, as everybody calls it",
    "train.distillation.weight": "a ratio of two losses",
    "precision.initial_loss_scale": "a pure number",
    "eval.sample_temperature": "a pure number",
    "eval.sample_top_k": "tokens of the vocabulary, as everybody calls it",
    "parallel.data_parallel_size": "devices, as everybody calls it",
    "parallel.fsdp_size": "devices, as everybody calls it",
    "parallel.tensor_parallel_size": "devices, as everybody calls it",
    "parallel.pipeline_parallel_size": "devices, as everybody calls it",
    "parallel.context_parallel_size": "devices, as everybody calls it",
    "parallel.expert_parallel_size": "devices, as everybody calls it",
    "run.seed": "a name, not a quantity",
    "data.transform_seed": "a name, not a quantity",
}


@pytest.mark.parametrize("key", list(schema_fields()))
def test_every_field_is_described_in_a_sentence(key: str) -> None:
    description = schema_fields()[key].description
    assert len(description) >= 8
    assert description[-1] in ".)", description


def numeric_keys() -> list[str]:
    fields = schema_fields()
    return [key for key in leaf_keys() if any(admits(fields[key].annotation, kind) for kind in (int, float))]


@pytest.mark.parametrize("key", numeric_keys())
def test_every_number_has_its_unit_in_the_name(key: str) -> None:
    has_unit = key.endswith(UNITS) or COUNTS.search(key) is not None
    assert has_unit or key in WITHOUT_UNIT, "end its name in a unit (UNITS), or say in WITHOUT_UNIT why it has none"
    assert not (has_unit and key in WITHOUT_UNIT), "its name has a unit: remove it from WITHOUT_UNIT"


def test_the_list_of_exceptions_is_not_stale() -> None:
    assert set(WITHOUT_UNIT) <= set(numeric_keys())


@pytest.mark.parametrize("key", [key for key in numeric_keys() if not key.endswith("sources.*.weight")])
def test_every_number_is_bounded_below(key: str) -> None:
    assert re.search(r"at least|greater than", schema_fields()[key].accepted)


def test_defaults_of_fractions_lie_within_their_bounds() -> None:
    for key in leaf_keys():
        if key.endswith("_fraction") and isinstance(schema_fields()[key].default, float):
            assert 0 <= schema_fields()[key].default <= 1


def test_sections_are_frozen_and_closed() -> None:
    def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
        found = {model}
        for info in model.model_fields.values():
            for kind in (info.annotation, *getattr(info.annotation, "__args__", ())):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    found |= sections(kind)
        return found

    everything = sections(RunConfig)
    assert len(everything) >= 19
    for section in everything:
        assert section.model_config.get("frozen") is True
        assert section.model_config.get("extra") == "forbid"
        for info in section.model_fields.values():
            assert "list" not in str(info.annotation), "lists are not frozen; use a tuple"
            assert "dict" not in str(info.annotation)


def test_validation_is_strict_where_it_counts() -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate_json('{"data": {"sources": []}, "train": {"num_steps": true}}', strict=True)


# Every setting is read


@functools.cache
def attributes_read() -> dict[str, set[str]]:
    """Names of all attributes that are loaded, and of all classes that are used, per module outside of the schema and
    the modules that treat every key alike."""
    generic = {
        "checks",
        "fields",
        "config",
        "config_tree",
        "conditions",
        "validation",
        "explain",
        "presets",
        "overrides",
    }
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        if relative.parts[:2] == ("core", "schema") or (relative.parts[0] == "core" and path.stem in generic):
            continue
        names = found[relative.as_posix()] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return found


CLASSES = {
    "model": ("ModelConfig",),
    "rope_scaling": ("RopeScalingConfig",),
    "data": ("DataConfig",),
    "sources": ("SourceConfig", "CorpusSource", "SourceCache", "Source"),
    "transforms": ("TransformConfig",),
    "pipeline": ("BuildPipelineConfig",),
    "validation": ("ValidationConfig",),
    "cache": ("CacheConfig",),
    "loader": ("LoaderConfig",),
    "tokenizer": ("TokenizerConfig",),
    "optimizer": ("OptimizerConfig",),
    "schedule": ("ScheduleConfig",),
    "loss": ("LossConfig",),
    "train": ("TrainConfig",),
    "precision": ("PrecisionConfig",),
    "checkpoint": ("CheckpointConfig",),
    "eval": ("EvalConfig",),
    "log": ("LogConfig",),
    "runtime": ("RuntimeConfig",),
    "parallel": ("ParallelConfig",),
    "run": ("RunSection",),
}
EXPLAINED = {
    "model.preset": "fills in other keys while loading (core/config/layers); names the run",
    "model.family": "fills in other keys while loading (core/config/layers); names the run",
}


@pytest.mark.parametrize("key", [key for key in leaf_keys() if key not in EXPLAINED])
def test_every_setting_is_read_by_somebody(key: str) -> None:
    """Some module loads an attribute of that name and deals with its section: ``config.eval`` or ``EvalConfig``."""
    *sections, name = key.split(".")
    section = next((part for part in reversed(sections) if part != "*"), "")
    holders = {section, *CLASSES.get(section, ())} if section else {name}
    readers = [module for module, names in attributes_read().items() if name in names and names & holders]
    assert readers, f"nobody reads {key}"


def named_values() -> list[tuple[str, str]]:
    """Every key that has a fixed set of values, with each of those that are text."""
    choices = {key: field.choices for key, field in schema_fields().items() if not key.startswith("data.validation")}
    return [(key, value) for key, values in choices.items() for value in values if isinstance(value, str)]


@functools.cache
def code_outside_the_schema() -> str:
    paths = (path for path in sorted(SOURCE.rglob("*.py")) if "schema" not in path.parts)
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


PASSED_ON = {
    ("precision.matmul", "ieee"),
    ("precision.float8", "tensorwise"),
    ("precision.float8", "rowwise_with_gw_hp"),
}
"""Values that PyTorch and torchao know under the same name."""


@pytest.mark.parametrize(("key", "value"), [pair for pair in named_values() if pair not in PASSED_ON])
def test_every_value_of_a_setting_is_named_where_it_is_computed(key: str, value: str) -> None:
    """A value that no code handles would fall through to the last branch."""
    assert f'"{value}"' in code_outside_the_schema(), f"no module names {key}={value}; a new value needs its own branch"


@pytest.mark.torch
def test_optimizers_are_the_same_everywhere() -> None:
    from vorox.backends.torch_engine.optimizers.make_optimizer import BUILT_IN

    names = {value for key, value in named_values() if key == "optimizer.name"}
    assert names == BUILT_IN_OPTIMIZERS.keys() == BUILT_IN.keys()
