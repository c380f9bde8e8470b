"""Resolution of YAML, presets and dotted overrides to one frozen ``RunConfig``.

A preset or a YAML file (which may be based on a preset: ``preset: quickstart``) and overrides go in; overrides take
precedence, and environment variables have no influence. The configuration with the origin of every value comes out, or
one ``ConfigError`` that lists *all* problems. Values are validated as strict JSON: ``true`` is not a number and ``"8"``
is not 8, but ``1e9`` is an integer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.config.checks.schema_validation import validate
from vorox.core.config.digest import config_values
from vorox.core.config.layers.overrides import Assignment, parse_override
from vorox.core.config.layers.preset_rules import (
    WITH_ITS_SOURCES,
    fit_heads,
    fit_warmup,
    names_heads,
    names_warmup,
    selects_sources,
)
from vorox.core.config.layers.presets import model_presets, run_presets
from vorox.core.config.layers.pretrained import Pretrained
from vorox.core.config.layers.python_file import mapping_document, read_python
from vorox.core.config.layers.section_synonyms import translate_sections
from vorox.core.config.layers.training_defaults import fill_training_defaults
from vorox.core.config.layers.tree import ConfigTree, Problem, document_assignments
from vorox.core.config.schema_fields import nearest
from vorox.core.config.yaml.reader import Json, KeyPath, YamlDocument, read_mapping
from vorox.core.config.yaml.writer import write_inline, write_yaml
from vorox.core.errors import ConfigError
from vorox.core.files.disk_errors import disk_error
from vorox.core.redaction import redact
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import is_extension

_MAX_PRESET_CHAIN = 8


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A valid configuration with the origin of each value, and the weights that it starts from, if any."""

    config: RunConfig
    tree: ConfigTree
    pretrained: Pretrained | None = None

    def origin(self, key: str) -> str:
        """Return ``my.yaml:12``, ``override a.b=v``, ``preset quickstart:4``, ``model.preset=...`` or ``default``."""
        return self.tree.origin(key).text


@dataclass(frozen=True, slots=True)
class GivenConfig:
    """A configuration that is not in a file: its name, for messages and the run's name, and its values."""

    name: str
    values: dict[str, Json]


ConfigSource = str | Path | GivenConfig | Mapping[str, Any]
"""A preset or file, a generated configuration, or a mapping of values."""

_MAPPING_NAME = "the mapping"
_SHIPPED, _FITTED = "preset ", "preset for "
"""Before the name of a preset, and of a configuration that was fitted to a text."""


def load_config(source: ConfigSource | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, resolve and validate a configuration.

    Args:
        source: Name of a run preset, a YAML or Python file, or a mapping; ``None`` starts from the defaults.
        overrides: ``a.b=v`` or ``--a.b=v``.

    Raises:
        ConfigError: The configuration is invalid; the message lists all problems.
    """
    return resolve_config(source, overrides).config


def resolve_config(
    source: ConfigSource | None,
    overrides: Sequence[str] = (),
    *,
    adopt: Callable[[ConfigTree], Pretrained | None] = lambda _: None,
) -> ResolvedConfig:
    """Resolve a configuration like ``load_config``, with the origins of its values.

    Args:
        source: As for ``load_config``.
        overrides: As for ``load_config``.
        adopt: Sets what the initial weights decide, once all layers are merged, and returns what is known of them.
    """
    tree = ConfigTree(model_presets())
    assignments: list[Assignment] = []
    for text in overrides:
        try:
            assignments.append(parse_override(text))
        except ConfigError as error:
            what = error.what + (f"; {error.hint}" if error.hint else "")
            tree.problems.append(Problem(what, f"override {text}", kind="misread"))
    base = [assignment for assignment in assignments if assignment.path == ("preset",)]
    explicit = [assignment for assignment in assignments if assignment.path != ("preset",)]
    layers = [_Layer(name, document) for name, document in _chain(source, base[-1].value if base else None)]
    for number, layer in enumerate(layers):
        for what, line in layer.document.problems:
            tree.problems.append(Problem(what, f"{layer.name}:{line}", kind="misread"))
        above = [entry for other in layers[number + 1 :] for entry in other.assignments]
        has_other_sources = selects_sources([*above, *explicit])
        tree.apply_layer(
            layer.assignments if has_other_sources else [*layer.assignments, *layer.with_its_sources],
            by_user=not layer.is_preset,
        )
    tree.apply_layer(explicit, by_user=True)
    translate_sections(tree)
    is_read = not any(problem.kind == "misread" for problem in tree.problems)
    pretrained = adopt(tree) if is_read else None
    fill_training_defaults(tree, pretrained)
    if isinstance(source, GivenConfig) and not names_warmup(explicit):
        fit_warmup(tree)
    if isinstance(source, GivenConfig) and not names_heads(explicit):
        fit_heads(tree)
    top = source if source is not None else (base[-1].value if base else None)
    if top is not None and not isinstance(top, Mapping):
        _name_run(tree, top.name if isinstance(top, GivenConfig) else str(top))
    config, problems = validate(tree)
    if config is None:
        raise _refusal(problems, _name_for_messages(source))
    return ResolvedConfig(config, tree, pretrained)


def config_from_record(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that a checkpoint recorded.

    Raises:
        pydantic.ValidationError: The values are not those of a configuration that this version knows.
    """
    return RunConfig.model_validate(dict(values))


def _name_for_messages(source: ConfigSource | None) -> str:
    if isinstance(source, Mapping):
        return _MAPPING_NAME
    return "the overrides" if source is None else source.name if isinstance(source, GivenConfig) else str(source)


class _Layer:
    """A document of the chain; settings that apply only to its own sources are kept separately.

    ``is_preset``: it ships with Vorox, or was fitted to a text; the user did not write it.
    """

    def __init__(self, name: str, document: YamlDocument) -> None:
        self.name, self.document = name, document
        self.is_preset = name.startswith(_FITTED) or name.removeprefix(_SHIPPED) in run_presets()
        special = document.value.pop(WITH_ITS_SOURCES, None)
        lines = {path[1:]: line for path, line in document.lines.items() if path[0] == WITH_ITS_SOURCES}
        inner = special if isinstance(special, dict) else {}
        self.with_its_sources = document_assignments(YamlDocument(inner, lines, []), name)
        self.assignments = document_assignments(document, name)


def _refusal(problems: list[Problem], name: str) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(redact(problems[0].what), where=redact(problems[0].origin))
    lines = [
        redact(f"  {number}. {problem.what}" + (f" [{problem.origin}]" if problem.origin else ""))
        for number, problem in enumerate(problems, 1)
    ]
    return ConfigError(f"{len(problems)} problems in {name}:\n" + "\n".join(lines))


def _chain(source: ConfigSource | None, preset: Json) -> list[tuple[str, YamlDocument]]:
    """Return the documents of a configuration, base first; ``preset`` replaces the base of the top one."""
    chain: list[tuple[str, YamlDocument]] = []
    seen: list[Path] = []
    if isinstance(source, GivenConfig):
        chain.append((f"{_FITTED}{source.name}", YamlDocument(copy.deepcopy(source.values), {}, [])))
        source = None
    elif isinstance(source, Mapping):
        document = mapping_document(source)
        chain.append((_MAPPING_NAME, document))
        below = document.value.pop("preset", None)
        source, preset = None, below if preset is None else preset
    current: tuple[str, Path] | None = None if source is None else locate_config(source)
    if current is None and preset is not None:
        current, preset = locate_config(_preset_name(preset, "override preset")), None
    while current is not None:
        name, path = current
        if path.resolve() in seen or len(seen) >= _MAX_PRESET_CHAIN:
            raise ConfigError(
                f"preset {name} is based on itself or on a chain of more than {_MAX_PRESET_CHAIN} presets", where=name
            )
        seen.append(path.resolve())
        document = read_python(path, name) if path.suffix == ".py" else read_mapping(_read_text(path), name)
        chain.insert(0, (name, document))
        below = document.value.pop("preset", None)
        if len(chain) == 1 and preset is not None:
            below = preset
        current = None
        if below is not None:
            where = f"{name}:{document.lines.get(('preset',), 1)}"
            current = locate_config(_preset_name(below, where), relative_to=path.parent)
    return chain


def _preset_name(value: Json, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"preset={write_inline(value)} is not a name", where=where)
    return value


def locate_config(source: str | Path, relative_to: Path | None = None) -> tuple[str, Path]:
    """Return the display name and the path of a preset or YAML file.

    Raises:
        ConfigError: Neither a preset nor a file of that name exists.
    """
    presets = run_presets()
    if isinstance(source, str) and source in presets:
        return f"{_SHIPPED}{source}", presets[source]
    path = Path(source) if relative_to is None else relative_to / source
    if path.is_file():
        return str(path), path
    if path.is_dir():
        raise ConfigError(f"{source} is a folder, not a configuration", where=str(path))
    here = relative_to or Path()
    files = [str(file) for pattern in ("*.y*ml", "configs/*.y*ml") for file in sorted(here.glob(pattern))]
    near = nearest(str(source), [*presets, *files])
    hint = f"did you mean {' or '.join(near)}?" if near else f"name a YAML file or a preset: {', '.join(presets)}"
    raise ConfigError(f"No preset or file {source}", hint=hint)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        hint = "check the path and its permissions"
        raise disk_error(error, str(path)) or ConfigError(
            f"Configuration cannot be read: {error.strerror}", where=str(path), hint=hint
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"Invalid UTF-8 at byte {error.start}", where=str(path)) from error


def slug(text: str) -> str:
    """Return a name that is valid as part of a directory name on all systems."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:80] or "run"


def model_label(config: RunConfig) -> str:
    """Return the short name of the model: its preset, else family and size."""
    return _label(lambda key: getattr(config.model, key))


def _label(get: Callable[[str], Json]) -> str:
    """Return the label of a model, given its settings by key."""
    last_part = str(get("name_or_path") or "").rstrip("/").rpartition("/")[2].partition("@")[0]
    class_name = str(get("kind")).rpartition(":")[2] if is_extension(get("kind")) else ""
    label = last_part or class_name or get("preset")
    return str(label or f"{get('family')}-{get('num_layers')}x{get('hidden_size')}")


def _name_run(tree: ConfigTree, source: str) -> None:
    """Name the run after its configuration and model, unless it has a name."""
    if tree.is_explicit("run.name"):
        return
    stem = slug(Path(source).stem if Path(source).suffix in {".yaml", ".yml", ".json", ".py"} else Path(source).name)
    label = slug(_label(lambda key: tree.get(f"model.{key}")))
    name = stem if label.lower() in stem.replace("_", "-").lower() else f"{stem}-{label}"
    tree.set_default("run.name", name, "name of the configuration and the model")


def dump_yaml(config: RunConfig, resolved: ResolvedConfig | None = None) -> str:
    """Return the whole configuration as YAML that ``load_config`` reads back unchanged.

    Args:
        config: The configuration.
        resolved: If given, every line ends with a comment on the origin of its value.
    """

    def comment(path: KeyPath) -> str:
        return resolved.origin(".".join(str(part) for part in path)) if resolved is not None else ""

    return write_yaml(config_values(config), comment)


def check_recordable(config: RunConfig) -> None:
    """Check that the ``config.yaml`` of a run can be read again, before anything is built for it.

    Raises:
        ConfigError: It is too long or too deep.
    """
    text = dump_yaml(config)
    try:
        read_mapping(text, "the recorded configuration")
    except ConfigError as error:
        raise ConfigError(
            f"The configuration could not be read again from the run: {error.what}", where="data.sources",
            hint="combine sources, whose paths is a list that may have globs, or flatten nested args",
        ) from error  # fmt: skip
