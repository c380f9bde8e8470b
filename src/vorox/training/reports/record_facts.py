"""Facts for a training record that no run can know: provider, licences, kinds of sources, measures.

A YAML file goes in; checked facts come out. Every fact is optional: one that is missing is reported as not stated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from vorox.core.config.schema_fields import nearest
from vorox.core.config.yaml.reader import read_mapping
from vorox.core.errors import ConfigError
from vorox.core.schema.section import Section

SourceKind = Literal["public", "private", "crawled", "user", "synthetic", "other"]


class SourceFacts(Section):
    """Facts about one source."""

    kind: SourceKind | None = Field(default=None, description="How the data was obtained (sections 2.1 to 2.6).")
    licence: str | None = Field(default=None, description="Licence of the data.")
    acquired: str | None = Field(default=None, description="When the data was obtained.")
    description: str | None = Field(default=None, description="What the data is.")


class Facts(Section):
    """Facts about a model and its sources."""

    provider: str | None = Field(default=None, description="Name and contact of the provider.")
    model: str | None = Field(default=None, description="Name of the model.")
    languages: tuple[str, ...] = Field(default=(), description="Languages of the text.")
    copyright: str | None = Field(default=None, description="Measures to respect opt-outs and other rights.")
    illegal_content: str | None = Field(default=None, description="Measures to remove illegal content.")
    other: str | None = Field(default=None, description="Other processing of the data.")
    sources: Mapping[str, SourceFacts] = Field(default_factory=dict, description="Facts by name of the source.")


def read_facts(path: Path, source_names: Collection[str]) -> Facts:
    """Read the facts of a record.

    Args:
        path: A YAML file.
        source_names: The sources of the run.

    Raises:
        ConfigError: The file cannot be read, has an unknown key or value, or names a source that the run lacks.
    """
    try:
        document = read_mapping(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Facts cannot be read: {error}", where=str(path), hint="give a YAML file") from error
    for what, line in document.problems:
        raise ConfigError(what, where=f"{path}:{line}")
    try:
        facts = Facts.model_validate(document.value)
    except ValidationError as error:
        first = error.errors()[0]
        place = tuple(part for part in first["loc"] if part != "[key]")
        known = [*SourceFacts.model_fields] if place[0] == "sources" else [*Facts.model_fields]
        near = nearest(str(place[-1]), known)
        raise ConfigError(
            f"{'.'.join(map(str, place))}: {first['msg']}", where=f"{path}:{document.lines.get(place, 1)}",
            hint=f"did you mean {' or '.join(near)}?" if near and near[0] != place[-1] else f"keys: {', '.join(known)}",
        ) from error  # fmt: skip
    for name in facts.sources:
        if name not in source_names:
            raise ConfigError(
                f"Run has no source {name}", where=f"{path}:{document.lines.get(('sources', name), 1)}",
                hint=f"its sources are {', '.join(source_names)}",
            )  # fmt: skip
    return facts
