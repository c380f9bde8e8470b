"""Load a configuration with the model that it starts from: the one way in which every command and the API do.

A key gets its value from, each overriding those before:

1. defaults, presets, and what is fitted to a text (``--data``);
2. the initial weights (``train.from_weights``, ``model.name_or_path``): architecture, tokenizer, positions, and images;
3. the user's files, the innermost first;
4. the command line.

Architecture and tokenizer belong to the weights. A key that the user sets to another value is refused, with its place
and the override to type, unless it does not change what the weights mean (``FREE_TO_CHANGE``). A key of ``tokenizer``
changes that key and nothing else; only ``tokenizer.kind`` and ``tokenizer.path`` name another tokenizer, whose ids are
then compared with those of the weights before the run starts. Of ``train.from_weights`` and ``model.name_or_path`` the
later one counts.

Weights that the native decoder does not compute, and those under an adapter, are trained with transformers
(``model.kind: huggingface``) without being told; the note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from vorox.core.config import ConfigSource, ResolvedConfig, config_values, resolve_config
from vorox.core.config.layers.overrides import parse_override
from vorox.core.config.layers.pretrained import Pretrained
from vorox.core.config.layers.synonyms import translate
from vorox.core.config.layers.tree import ConfigTree
from vorox.core.config.locations import with_absolute_paths
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.user_code import trusted_code
from vorox.records.run_context import recorded_config
from vorox.training.origin.naming import FROM_WEIGHTS, NAME_OR_PATH, naming_setting

_ORIGIN_KEYS = frozenset({FROM_WEIGHTS, NAME_OR_PATH, "model.kind", "model.revision", "model.pretrained"})


def load_config(source: ConfigSource | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a configuration, with what its initial weights decide.

    Args:
        source: Name of a run preset, a YAML or Python file, or a mapping; ``None`` starts from the defaults.
        overrides: ``a.b=v`` or ``--a.b=v``.

    Raises:
        ConfigError: The configuration is invalid, contradicts the weights, or there are no weights.
        CheckpointError: The weights are damaged.
        DataError: A repository cannot be read.
    """
    return load_resolved(source, overrides).config


def load_resolved(source: ConfigSource | None, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Load a configuration like ``load_config``, with the origins of its values and the facts of its weights."""
    if _is_recorded(source):
        trusted_code.state([parse_override(text).value for text in overrides])
        recorded_config(Path(cast("str", source)).parent)  # its functions are not the user's word
        found = (
            resolve_config(source, overrides, adopt=_adopt)
            if _names_origin(overrides)
            else resolve_config(source, overrides)  # everything was decided when the run was recorded
        )
    else:
        found = resolve_config(source, overrides, adopt=_adopt_after_stating)
        if found.pretrained is None:
            trusted_code.state(config_values(found.config))
    return replace(found, config=_with_absolute_steps(with_absolute_paths(found.config)))


def _with_absolute_steps(config: RunConfig) -> RunConfig:
    """Return a configuration whose ``RUN@STEP`` names its run by an absolute path, for resumes elsewhere and later."""
    train = config.train
    weights, teacher = train.from_weights, train.distillation.teacher
    if not any("@" in name for name in (weights, teacher) if name is not None):
        return config
    from vorox.training.checkpoints.materialized_cache import absolute_name  # takes as long as everything else

    runs = config.run.directory
    distillation = train.distillation.model_copy(update={"teacher": teacher and absolute_name(teacher, runs)})
    changed = {"from_weights": weights and absolute_name(weights, runs), "distillation": distillation}
    return config.model_copy(update={"train": train.model_copy(update=changed)})


def _adopt_after_stating(tree: ConfigTree) -> Pretrained | None:
    """Trust the functions that the user names, then adopt: what the weights bring along is not the user's word."""
    trusted_code.state([tree.get(section) for section in RunConfig.model_fields])
    return _adopt(tree)


def _adopt(tree: ConfigTree) -> Pretrained | None:
    """Set what the initial weights decide; a run that starts from nothing loads no code for them."""
    if (setting := naming_setting(tree)) is None:
        return None
    from vorox.training.origin.adoption import adopt_origin  # takes as long as everything else

    return adopt_origin(tree, setting)


def _is_recorded(source: ConfigSource | None) -> bool:
    """Whether a source is the ``config.yaml`` of a run."""
    if not isinstance(source, str | Path):
        return False
    layout = RunLayout(Path(source).parent)
    return Path(source) == layout.config and layout.record.is_file()


def _names_origin(overrides: Sequence[str]) -> bool:
    for text in overrides:
        try:
            key = ".".join(map(str, translate(parse_override(text)).path))
        except ConfigError:
            continue  # reported with the other problems
        if key in _ORIGIN_KEYS or key in {"model", "train"}:
            return True
    return False
