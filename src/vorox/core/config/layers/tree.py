"""The configuration tree: values merged from several layers, each with its origin.

Layers are applied in order (presets, file, command line): later ones win, mappings are merged, lists are replaced.
``model.preset`` resets the model section to the defaults of its family and its sizes; ``model.family`` fills in the
architecture's keys; keys set in the same layer take precedence over both. The schema is not checked here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from vorox.core.config.layers.overrides import Assignment
from vorox.core.config.layers.presets import ModelPresets
from vorox.core.config.layers.synonyms import translate
from vorox.core.config.schema_fields import REQUIRED, did_you_mean, find_field, schema_fields
from vorox.core.config.yaml.reader import Json, KeyPath, YamlDocument


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a configuration.

    Attributes:
        what: A message with the key and the value.
        origin: The place that set the value; empty for defaults.
        keys: The keys concerned, so that a fault is reported once.
        kind: ``misread``: a text could not be parsed; ``missing``: a required key is not set, possibly because it was
            misread.
    """

    what: str
    origin: str = ""
    keys: tuple[str, ...] = ()
    kind: Literal["", "misread", "missing"] = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value; ``layer`` is -1 for defaults and increases with precedence.

    Values filled in by a family or a size are half a layer below explicit ones. ``by_user``: a file, a mapping or the
    command line sets the value or the name that fills it in; false for defaults, presets and initial weights.
    """

    layer: float
    text: str
    by_user: bool = False


DEFAULT_ORIGIN = Origin(-1, "default")
_ABSENT: Final = object()


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def _descend(value: object, path: KeyPath) -> object:
    """Return the value at a path, or ``_ABSENT``."""
    for part in path:
        if isinstance(value, dict) and part in value:
            value = cast("dict[str | int, object]", value)[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(cast("list[object]", value)):
            value = cast("list[object]", value)[part]
        else:
            return _ABSENT
    return value


def dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in path)


def document_assignments(document: YamlDocument, name: str) -> list[Assignment]:
    """Return the leaves of a YAML mapping as assignments; empty sections have none."""
    assignments: list[Assignment] = []

    def visit(mapping: Mapping[str, Json], path: KeyPath) -> None:
        for key, value in mapping.items():
            child = (*path, key)
            field = schema_fields().get(dotted(child))
            is_section = field is not None and field.type_name == "section"
            if isinstance(value, dict) and (is_section or field is None):
                visit(value, child)
                if value or is_section:
                    continue
            if value is None and is_section:
                continue
            lines = _lines_within(document, child) if isinstance(value, dict | list) else _line_of(document, child)
            nested = {path: f"{name}:{line}" for path, line in lines.items()}
            assignments.append(Assignment(child, value, nested.get(child, name), nested))

    visit(document.value, ())
    return assignments


def _lines_within(document: YamlDocument, above: KeyPath) -> dict[KeyPath, int]:
    return {path: line for path, line in document.lines.items() if path[: len(above)] == above}


def _line_of(document: YamlDocument, path: KeyPath) -> dict[KeyPath, int]:
    return {path: document.lines[path]} if path in document.lines else {}


class ConfigTree:
    """Values by path, with their origins and problems."""

    def __init__(self, models: ModelPresets) -> None:
        self.values: dict[str, Json] = {}
        self.problems: list[Problem] = []
        self._models = models
        self._origins: dict[KeyPath, Origin] = {}
        self._num_layers = 1  # 0 and below: what every layer overrides
        self._first_user_layer: int | None = None
        family = schema_fields()["model.family"].default
        self._fill_model(self._models.families.get(family, {}), Origin(-1, f"default of family {family}"))

    def origin(self, key: str) -> Origin:
        """Return the origin of the value of a dotted key (with indices)."""
        path = _path(key)
        if _descend(self.values, path) is _ABSENT:
            return DEFAULT_ORIGIN
        while path:
            if path in self._origins:
                return self._origins[path]
            path = path[:-1]
        return DEFAULT_ORIGIN

    def get(self, key: str) -> Json:
        """Return the value of a dotted key, or its default (``None`` for a required key)."""
        value = _descend(self.values, _path(key))
        if value is not _ABSENT:
            return cast(Json, value)
        field = find_field(key)
        return None if field is None or field.default is REQUIRED else cast(Json, field.default)

    def is_explicit(self, key: str) -> bool:
        """Whether a layer sets this very key, even to null."""
        return tuple(key.split(".")) in self._origins

    def is_set_by_user(self, key: str) -> bool:
        """Whether a file, a mapping or the command line decides a key, not a preset, the weights or a default."""
        return self.origin(key).by_user

    def set_default(self, key: str, value: Json, origin: str) -> None:
        """Set a key that no layer sets, below every layer."""
        self.set_at(key, value, Origin(-1, origin))

    def adopt(self, key: str, value: Json, origin: str) -> None:
        """Set a key to the value that the initial weights have: above presets, below the user's first layer."""
        first = self._num_layers if self._first_user_layer is None else self._first_user_layer
        self.set_at(key, value, Origin(first - 0.75, origin))

    def set_at(self, key: str, value: Json, origin: Origin) -> None:
        """Set a key at a layer."""
        *sections, name = key.split(".")
        holder: Json = self.values
        for section in sections:
            holder = holder.setdefault(section, {}) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            holder[name] = value
            self._origins[(*sections, name)] = origin

    def set_below(self, key: str, value: Json, origin: Origin) -> None:
        """Set a key of a list entry that the entry leaves open."""
        *above, last = _path(key)
        holder = _descend(self.values, tuple(above))
        if isinstance(holder, dict):
            cast("dict[str, Json]", holder)[str(last)] = copy.deepcopy(value)
            self._origins[(*above, last)] = origin

    def add_problem(self, what: str, origin: Origin, keys: tuple[str, ...]) -> None:
        self.problems.append(Problem(what, origin.text, keys))

    def apply_layer(self, assignments: Sequence[Assignment], *, by_user: bool) -> None:
        """Apply the assignments of one layer over the current values."""
        layer = self._num_layers
        self._num_layers += 1
        if by_user and self._first_user_layer is None:
            self._first_user_layer = layer
        assignments = [translate(entry) for entry in assignments]
        self._expand_model(assignments, layer, by_user)
        for assignment in assignments:
            self._assign(assignment, layer, by_user)

    def _assign(self, assignment: Assignment, layer: int, by_user: bool) -> None:
        path, value = assignment.path, assignment.value
        if isinstance(value, dict) and self._merges(path):
            for key, item in value.items():
                entry = Assignment((*path, key), item, assignment.origin, assignment.nested)
                self._assign(translate(entry), layer, by_user)
            return
        parent = self._parent(path, assignment)
        if parent is None:
            return
        last = path[-1]
        if isinstance(_descend(self.values, path), dict | list):
            for old in [known for known in self._origins if known[: len(path)] == path]:
                del self._origins[old]
        else:
            self._origins.pop(path, None)
        if isinstance(parent, list):
            parent[cast(int, last)] = value
        else:
            parent[str(last)] = value
        self._origins[path] = Origin(layer, assignment.origin, by_user)
        for nested_path, text in assignment.nested.items():
            if nested_path[: len(path)] == path:
                self._origins[nested_path] = Origin(layer, text, by_user)

    def _merges(self, path: KeyPath) -> bool:
        """Whether a mapping at this path is merged key by key."""
        present = _descend(self.values, path)
        field = schema_fields().get(dotted(path))
        return isinstance(present, dict) or (present is _ABSENT and field is not None and field.type_name == "section")

    def _parent(self, path: KeyPath, assignment: Assignment) -> dict[str, Json] | list[Json] | None:
        """Return the collection that holds the last part of ``path``; missing mappings are created, lists are not."""
        current: dict[str, Json] | list[Json] = self.values
        for depth, part in enumerate(path):
            name = dotted(path[:depth])
            if isinstance(current, list):
                if isinstance(part, str):
                    self._problem(f"{name} is a list; write {name}.0.{part} for its first entry", assignment)
                    return None
                if part >= len(current):
                    self._problem(f"{name}.{part} does not exist: {name} has {len(current)} entries", assignment)
                    return None
            if depth == len(path) - 1:
                return current
            below = self._below(current, path[: depth + 1]) if isinstance(current, dict) else current[cast(int, part)]
            if not isinstance(below, dict | list):
                holder = dotted(path[: depth + 1])
                self._problem(f"{dotted(path)} does not exist: {holder} holds a value, not keys", assignment)
                return None
            current = below
        raise AssertionError("an assignment has a path")

    def _below(self, mapping: dict[str, Json], path: KeyPath) -> Json:
        """Return the value at the last part of ``path``; a mapping is created where the schema has no leaf."""
        key = str(path[-1])
        if key not in mapping:
            field = schema_fields().get(dotted(path))
            if field is None or field.type_name == "section":
                mapping[key] = {}
            elif field.type_name.startswith("list"):
                return []
        return mapping.get(key)

    def _problem(self, what: str, assignment: Assignment) -> None:
        self.problems.append(Problem(what, assignment.origin, (dotted(assignment.path),)))

    def _expand_model(self, assignments: Sequence[Assignment], layer: int, by_user: bool) -> None:
        preset = _last_assignment(assignments, "preset")
        family = _last_assignment(assignments, "family")
        if preset is not None and isinstance(preset.value, str):
            size = self._models.sizes.get(preset.value)
            if size is None:
                hint = did_you_mean(preset.value, self._models.sizes) or f"there are {', '.join(self._models.sizes)}"
                self._problem(f"model.preset={preset.value} is unknown; {hint}", preset)
            else:
                self._clear_model()
                size_family = str(size["family"])
                origin = Origin(layer - 0.5, f"model.preset={preset.value} ({preset.origin})", by_user)
                self._fill_model(self._models.families.get(size_family, {}), origin)
                self._fill_model(size, origin)
        if family is not None and isinstance(family.value, str):
            origin = Origin(layer - 0.5, f"model.family={family.value} ({family.origin})", by_user)
            self._fill_model(self._models.families.get(family.value, {}), origin)  # the schema refuses unknown ones

    def _clear_model(self) -> None:
        self.values["model"] = {}
        for path in [path for path in self._origins if path[0] == "model"]:
            del self._origins[path]

    def _fill_model(self, values: Mapping[str, Json], origin: Origin) -> None:
        model = self.values.setdefault("model", {})
        if isinstance(model, dict):
            for key, value in values.items():
                model[key] = value
                self._origins[("model", key)] = origin

    def reset(self, key: str) -> None:
        """Reset a key to its default."""
        *parents, last = key.split(".")
        holder = self.get(".".join(parents)) if parents else self.values
        if isinstance(holder, dict):
            holder.pop(last, None)
        path = _path(key)
        for known in [known for known in self._origins if known[: len(path)] == path]:
            del self._origins[known]

    def expand_key(self, key: str) -> list[str]:
        """Expand ``*`` in a dotted key to the indices of the current list."""
        head, star, tail = key.partition(".*.")
        if not star:
            return [key]
        entries = self.get(head)
        return [f"{head}.{index}.{tail}" for index in range(len(entries))] if isinstance(entries, list) else []


def _last_assignment(assignments: Sequence[Assignment], key: str) -> Assignment | None:
    """Return a layer's last assignment of ``model.<key>``, also inside ``model={...}``."""
    found: Assignment | None = None
    for assignment in assignments:
        if assignment.path == ("model", key):
            found = assignment
        elif assignment.path == ("model",) and isinstance(assignment.value, dict) and key in assignment.value:
            found = Assignment(("model", key), assignment.value[key], assignment.origin)
    return found
