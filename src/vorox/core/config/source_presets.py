"""Named sources (``presets/sources.yaml``): ``preset: fineweb-edu`` in an entry of ``data.sources`` fills in the rest.

A configuration tree goes in and is filled below what the entries say themselves. What a preset says that has no
meaning beside the entry's own keys (its hub configuration, when the entry has paths of its own) goes the way of every
such key.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from vorox.core.config.conditions import SOURCE_LISTS
from vorox.core.config.fields import did_you_mean
from vorox.core.config.presets import PRESETS_DIRECTORY
from vorox.core.config.tree import ConfigTree, Origin
from vorox.core.config.yaml_reader import Json, read_mapping

_BELOW_EVERY_LAYER = -0.5
"""Whoever says a key, in whatever layer, says more than a preset; only defaults say less."""


_STAND_IN: Mapping[str, Json] = {"format": "txt", "paths": ["stand-in"]}
"""For a name that is unknown, so that what follows from that is not reported as well."""


@functools.cache
def source_presets() -> Mapping[str, Mapping[str, Json]]:
    """The named sources; every value is a key of an entry of ``data.sources``."""
    path = PRESETS_DIRECTORY / "sources.yaml"
    document = read_mapping(path.read_text(encoding="utf-8"), path.name)
    assert not document.problems, document.problems
    return {name: entry for name, entry in document.value.items() if isinstance(entry, dict)}


def fill_sources(tree: ConfigTree) -> None:
    """Fill in what the named sources of the configuration say."""
    for sources in SOURCE_LISTS:
        entries = tree.get(sources)
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                _fill(tree, f"{sources}.{index}", entry)


def _fill(tree: ConfigTree, key: str, entry: Mapping[str, Json]) -> None:
    name, key_of_preset = entry.get("preset"), f"{key}.preset"
    if not isinstance(name, str):
        return
    said = tree.origin(key_of_preset)
    known = source_presets()
    if name not in known:
        hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
        tree.add_problem(f"{key_of_preset}={name} is unknown; {hint}", said, (key_of_preset,))
    origin = Origin(_BELOW_EVERY_LAYER, f"{key_of_preset}={name} ({said.text})")
    for option, value in known.get(name, _STAND_IN).items():
        if option not in entry:
            tree.set_below(f"{key}.{option}", value, origin)
