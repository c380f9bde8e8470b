"""Pages of the site that are generated from the code: one per command, one per section of the configuration.

A hook of mkdocs (https://www.mkdocs.org/user-guide/configuration/#hooks): it adds the pages to the site and to its
navigation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from vorox.cli import app
from vorox.core.config.explain import Explanation, explain
from vorox.core.config.schema_fields import schema_fields


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    commands = [{f"vorox {name}": f"reference/commands/{name}.md"} for name in _commands()]
    settings = [{name: f"reference/settings/{name}.md"} for name in _sections()]
    assert config.nav is not None
    config.nav = [*config.nav, {"Commands": commands}, {"Settings": settings}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, command in _commands().items():
        for subcommand in getattr(command, "commands", {}).values():  # typer shortens help to 45 characters
            subcommand.short_help = " ".join(subcommand.help.partition("\n\n")[0].split())
        page = get_docs_for_click(obj=command, ctx=typer.Context(command), name=name, call_prefix="vorox")
        files.append(File.generated(config, f"reference/commands/{name}.md", content=page))
    for name in _sections():
        page = "\n".join(_section_page(name))
        files.append(File.generated(config, f"reference/settings/{name}.md", content=page))
    return files


def _commands() -> Mapping[str, Any]:
    commands: Mapping[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009
    return {name: command for name, command in commands.items() if name != "help"}


def _sections() -> list[str]:
    return [key for key in schema_fields() if "." not in key]


def _section_page(name: str) -> Iterator[str]:
    """Yield the lines of a section, or of a setting outside of all sections."""
    yield from (f"# {name}", "", _escaped(schema_fields()[name].description), "")
    for key in schema_fields():
        explanation = explain(key)
        if (key == name or key.startswith(f"{name}.")) and not explanation.field.is_section:
            yield from _setting(explanation)


def _setting(explanation: Explanation) -> Iterator[str]:
    field = explanation.field
    facts = [", ".join(text for text in (field.type_name, field.accepted) if text)]
    facts.append(f"default `{explanation.default}`" if explanation.default else "required")
    if explanation.changes_run:
        facts.append("a different value makes a new run")
    facts.append(f"at a resume it {explanation.resume}")
    yield from (f"### {_escaped(field.key)}", "", _escaped(" · ".join(facts)), "", _escaped(field.description), "")
    if explanation.needs:
        yield from (f"Needs {_escaped(explanation.needs)}.", "")
    if explanation.synonyms:
        yield from (f"Also: {', '.join(f'`{name}`' for name in explanation.synonyms)}.", "")


def _escaped(text: str) -> str:
    """Escape what Markdown would take for markup."""
    return text.replace("<", "&lt;").replace("*", "\\*")
