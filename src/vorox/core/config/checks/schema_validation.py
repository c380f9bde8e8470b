"""Validation of a configuration tree against the schema.

A tree goes in; a ``RunConfig`` or all problems come out. Values are validated as strict JSON. If some are invalid, the
rest is still checked for contradictions: invalid values are replaced by defaults for these checks, and problems that
follow from them are not reported.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.config.checks.remedies import remedy
from vorox.core.config.checks.support import gives_way, support_problems
from vorox.core.config.layers.preset_rules import fill_sources
from vorox.core.config.layers.setting_dependencies import SOURCE_LISTS, resolve_dependencies
from vorox.core.config.layers.synonyms import OTHER_OPTIONS
from vorox.core.config.layers.tree import ConfigTree, Problem, dotted
from vorox.core.config.schema_fields import REQUIRED, SchemaField, admits, did_you_mean, find_field
from vorox.core.config.yaml.reader import Json, KeyPath, WholeFloat
from vorox.core.schema import RunConfig

_SURROGATE = re.compile("[\ud800-\udfff]")


def validate(tree: ConfigTree) -> tuple[RunConfig | None, list[Problem]]:
    """Return the configuration, or ``None`` and all problems."""
    for section in ("data", "train"):  # so that missing keys are reported one level deeper
        tree.values.setdefault(section, {})
    fill_sources(tree)
    resolve_dependencies(tree)
    values = _without_surrogates(_integers(tree.values, ()), (), tree)
    config, errors = _try(values)
    if config is not None and _give_way(tree, config):
        return validate(tree)
    schema_problems = [problem for error in errors for problem in _describe(error, values, tree)]
    wrong = {key for problem in schema_problems for key in problem.keys}
    if config is None:
        config, _ = _try(_repaired(values, errors))
    crossing = list(tree.problems)
    for problem in find_problems(config) if config is not None else []:
        crossing.append(replace(problem, origin=_origin_of(problem, tree)))
    independent = [problem for problem in crossing if not any(_related(key, wrong) for key in problem.keys)]
    problems = list(dict.fromkeys([*schema_problems, *independent]))
    misread = [problem for problem in problems if problem.kind == "misread"]
    if misread:  # a missing key may be in a line that could not be parsed
        rest = [problem for problem in problems if not problem.kind]
        problems = [*misread, *rest]
    return (None if problems else config), problems


def _give_way(tree: ConfigTree, config: RunConfig) -> bool:
    """Reset what a preset chose and later layers do not support, if it changes only how a step is executed."""
    found = False
    for one, other in (keys for problem in support_problems(config) for keys in (problem.keys, problem.keys[::-1])):
        if gives_way(one) and not tree.is_set_by_user(one) and tree.origin(one).layer < tree.origin(other).layer:
            tree.reset(one)
            found = True
    return found


def _try(values: Json) -> tuple[RunConfig | None, list[ErrorDetails]]:
    try:
        return RunConfig.model_validate_json(json.dumps(values), strict=True), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
        locations = {detail["loc"] for detail in errors}
        # A list whose entries failed is reported as too short as well.
        return None, [detail for detail in errors if not any(_is_above(detail["loc"], other) for other in locations)]


def _is_above(path: KeyPath, other: KeyPath) -> bool:
    return len(path) < len(other) and other[: len(path)] == path


def _integers(value: Json, path: KeyPath) -> Json:
    """Return a copy with whole floats (``1e9``) as integers where the schema accepts only integers."""
    if isinstance(value, dict):
        return {key: _integers(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_integers(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, float) and value.is_integer():
        field = find_field(dotted(path))
        if field is not None and admits(field.annotation, int) and not admits(field.annotation, float):
            if isinstance(value, WholeFloat):
                return value.exact
            return int(value) if abs(value) <= 2**53 else value  # above, the intended integer is ambiguous
    return value


def _without_surrogates(value: Json, path: KeyPath, tree: ConfigTree) -> Json:
    """Return a copy with a placeholder for text that cannot be encoded; each such text is a problem."""
    if isinstance(value, dict):
        return {key: _without_surrogates(item, (*path, key), tree) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item, (*path, index), tree) for index, item in enumerate(value)]
    half = _SURROGATE.search(value) if isinstance(value, str) else None
    if half is None:
        return value
    key = dotted(path)
    what = f"{key} holds half of a character (U+{ord(half[0]):04X}); write the whole one"
    tree.add_problem(what, tree.origin(key), (key,))
    return "-"


def _known_path(error: ErrorDetails) -> KeyPath:
    """Return the part of an error's location that names a key, without members of unions."""
    location = error["loc"]
    if error["type"] in {"extra_forbidden", "missing"}:
        return location
    path: KeyPath = ()
    for part in location:
        if not isinstance(part, int) and find_field(dotted((*path, part))) is None:
            break
        path = (*path, part)
    return path


def _at(values: Json, path: KeyPath) -> Json:
    for part in path:
        if isinstance(values, dict):
            values = values.get(cast(str, part))
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values


def _describe(error: ErrorDetails, values: Json, tree: ConfigTree) -> list[Problem]:
    path = _known_path(error)
    key = dotted(path)
    field = find_field(key)
    value = _at(values, path)
    if error["type"] == "extra_forbidden":
        return [_unknown(leaf, tree) for leaf in _leaves(value, path)]
    if error["type"] == "missing":
        description = f": {field.description}" if field is not None else ""
        parent = tree.origin(dotted(path[:-1]))
        origin = parent.text if parent.layer >= 0 else ""
        return [Problem(f"{key} is missing{description}", origin, (key,), "missing")]
    of_list = find_field(dotted(path[:-1])) if field is None and isinstance(path[-1], int) else None
    if of_list is not None and of_list.type_name == "list of texts":
        what = f"{key}={_show(value)} must be text; write it in quotes"
        return [Problem(what, tree.origin(key).text, (key,))]
    if of_list is not None and not of_list.is_section:
        what = f"{key}={_show(value)} must be {of_list.type_name.removeprefix('list of ')}"
        return [Problem(what + remedy(of_list.key, value, of_list), tree.origin(key).text, (key,))]
    what = f"{key}={_show(value)} must be {_wanted(field)}"
    correction = remedy(key, value, field) if of_list is None else remedy(of_list.key, value, of_list)
    return [Problem(what + correction, tree.origin(key).text, (key,))]


def _leaves(value: Json, path: KeyPath) -> list[KeyPath]:
    """Return the paths of all leaves in an unknown section, or the path itself."""
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    return [path]


def _unknown(path: KeyPath, tree: ConfigTree) -> Problem:
    key = dotted(path)
    indices = [str(part) for part in path if isinstance(part, int)]
    equivalent = OTHER_OPTIONS.get(key)
    hint = did_you_mean(key) if equivalent is None else f"write {equivalent}"
    if len(indices) == 1:
        hint = hint.replace("*", indices[0])
    return Problem(f"Unknown key {key}" + (f"; {hint}" if hint else ""), tree.origin(key).text, (key,))


def _wanted(field: SchemaField | None) -> str:
    if field is None or field.type_name == "section":  # an entry of a list of sections has no row in the table
        return "a section with keys of its own"
    article = {"integer": "an ", "number": "a ", "list": "a "}.get(field.type_name.split()[0], "")
    return article + field.type_name + (f", {field.accepted}" if field.accepted else "")


def _show(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _related(key: str, others: set[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in others)


def _origin_of(problem: Problem, tree: ConfigTree) -> str:
    """Return the places that set the keys of a contradiction, latest layer first."""
    origins = sorted({tree.origin(key) for key in problem.keys}, key=lambda origin: (-origin.layer, origin.text))
    return ", ".join(dict.fromkeys(origin.text for origin in origins if origin.layer >= 0))


_PLACEHOLDERS: dict[str, Any] = {
    "data.sources": [{"name": "placeholder", "format": "python_stdlib"}],
    **{f"{sources}.*.format": "python_stdlib" for sources in SOURCE_LISTS},
}


def _repaired(values: Json, errors: list[ErrorDetails]) -> Json:
    """Return a copy without invalid values, with placeholders for required keys."""
    copy = cast(Json, json.loads(json.dumps(values)))
    for path in sorted({_known_path(error) for error in errors}, key=lambda path: [str(part) for part in path]):
        parent = _at(copy, path[:-1])
        if isinstance(parent, dict):
            parent.pop(str(path[-1]), None)
            field = find_field(dotted(path))
            if field is not None and field.default is REQUIRED:
                placeholder = _PLACEHOLDERS.get(field.key, {} if field.is_section else f"placeholder-{dotted(path)}")
                parent[str(path[-1])] = placeholder
        elif isinstance(parent, list):
            is_source = dotted(path[:-1]) in SOURCE_LISTS
            parent[cast(int, path[-1])] = _PLACEHOLDERS["data.sources"][0] if is_source else "placeholder"
    return copy
