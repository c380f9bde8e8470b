"""How presets fill in a configuration: named sources, and settings tuned on a preset's sources.

A configuration tree goes in and is filled below what the user sets. ``preset: fineweb-edu`` in an entry of
``data.sources`` fills in the rest of the entry. Prompts, learning rate and holdout of a run preset were tuned on its
own sources (``with_its_sources`` in its file): they are dropped as soon as a later layer sets other sources. Defaults
then apply (``training_defaults``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from vorox.core.config.layers.overrides import Assignment
from vorox.core.config.layers.presets import source_presets
from vorox.core.config.layers.setting_dependencies import SOURCE_LISTS
from vorox.core.config.layers.synonyms import translate
from vorox.core.config.layers.tree import ConfigTree, Origin
from vorox.core.config.schema_fields import did_you_mean
from vorox.core.config.yaml.reader import Json

WITH_ITS_SOURCES: Final = "with_its_sources"
"""Top-level key of a configuration file: settings that apply only while its own ``data.sources`` do."""

_SELECTS_TEXT: Final = frozenset({"format", "paths", "preset"})

_BELOW_EVERY_LAYER = -0.5
"""Precedence of a named source: above defaults, below every layer."""

_PLACEHOLDER: Mapping[str, Json] = {"format": "txt", "paths": ["placeholder"]}
"""Used for an unknown name, so that missing keys are not reported as well."""


def selects_sources(assignments: Iterable[Assignment]) -> bool:
    """Whether any override sets the sources."""
    for assignment in map(translate, assignments):
        path = assignment.path
        if path == ("data", "sources") or path[:2] == ("data", "source"):
            return True
        if path[:2] == ("data", "sources") and (len(path) == 3 or path[3] in _SELECTS_TEXT):
            return True
        if path == ("data",) and isinstance(assignment.value, dict) and "sources" in assignment.value:
            return True
    return False


def names_warmup(assignments: Iterable[Assignment]) -> bool:
    """Whether any assignment sets the length of the warm-up."""
    paths = (translate(assignment).path for assignment in assignments)
    return any(path[0] == "schedule" and (len(path) < 2 or str(path[1]).startswith("warmup")) for path in paths)


def names_heads(assignments: Iterable[Assignment]) -> bool:
    """Whether any assignment sets the number of attention heads."""
    paths = (translate(assignment).path for assignment in assignments)
    return any(path[0] == "model" and (len(path) < 2 or path[1] in {"num_heads", "preset"}) for path in paths)


def fit_warmup(tree: ConfigTree) -> None:
    """Limit the warm-up to a tenth of the run's steps."""
    steps, warmup = tree.get("train.num_steps"), tree.get("schedule.warmup_steps")
    if isinstance(steps, int) and isinstance(warmup, int) and warmup > max(1, steps // 10):
        tree.set_default("schedule.warmup_steps", max(1, steps // 10), f"fitted to train.num_steps={steps}")


def fit_heads(tree: ConfigTree) -> None:
    """Lower the number of heads that a preset chose until heads of an even width divide the model's width."""
    width, heads = tree.get("model.hidden_size"), tree.get("model.num_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or width < 2 or heads < 1:
        return
    fitting = next((count for count in range(heads, 0, -1) if width % (2 * count) == 0), heads)
    if fitting != heads:
        tree.set_default("model.num_heads", fitting, f"fitted to model.hidden_size={width}")


def fill_sources(tree: ConfigTree) -> None:
    """Fill in the keys that named sources define and the entries themselves leave open."""
    for sources in SOURCE_LISTS:
        entries = tree.get(sources)
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                _fill_source(tree, f"{sources}.{index}", entry)


def _fill_source(tree: ConfigTree, key: str, entry: Mapping[str, Json]) -> None:
    name, preset_key = entry.get("preset"), f"{key}.preset"
    if not isinstance(name, str):
        return
    set_at = tree.origin(preset_key)
    known = source_presets()
    if name not in known:
        hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
        tree.add_problem(f"{preset_key}={name} is unknown; {hint}", set_at, (preset_key,))
    origin = Origin(_BELOW_EVERY_LAYER, f"{preset_key}={name} ({set_at.text})")
    for option, value in known.get(name, _PLACEHOLDER).items():
        if option not in entry:
            tree.set_below(f"{key}.{option}", value, origin)
