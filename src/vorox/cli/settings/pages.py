"""``vorox config explain``, ``reference``, ``support`` and ``schema``: the settings, without a configuration."""

from __future__ import annotations

import typer

from vorox.cli.terminal.output import print_unicode_json, print_wrapped
from vorox.core.config import json_schema
from vorox.core.config.checks.support import support_page
from vorox.core.config.explain import Explanation, reference_page, sections
from vorox.core.config.explain import explain as explain_key
from vorox.core.config.schema_fields import schema_fields
from vorox.core.config.yaml.writer import write_inline


def explain(key: str | None, arguments: list[str] | None, as_json: bool) -> None:
    if key is None:
        if as_json:
            print_unicode_json(sections())
            return
        width = max(map(len, sections()))
        print_wrapped((f"{name:<{width}}  {text}" for name, text in sections().items()), indent_columns=width + 2)
        typer.echo("Keys of a section: vorox config explain SECTION")
        return
    resolved = None
    if arguments:
        from vorox.cli.settings.config import resolve  # too slow for a setting by itself

        resolved = resolve(arguments, options=("--json",))
    explanation = explain_key(key, resolved)
    if as_json:
        print_unicode_json(explanation.to_json())
        return
    for line in _explanation_lines(explanation):
        typer.echo(line)


def reference() -> None:
    typer.echo(reference_page(), nl=False)


def support() -> None:
    typer.echo(support_page(), nl=False)


def schema() -> None:
    print_unicode_json(json_schema())


def _explanation_lines(explanation: Explanation) -> list[str]:
    field = explanation.field
    lines = [field.key, f"  {field.description}"]
    if field.is_section:
        width = max(len(key) for key in explanation.keys)
        lines += [f"  {key:<{width}}  {schema_fields()[key].description}" for key in explanation.keys]
        return lines
    lines.append(f"  type      {field.type_name}" + (f", {field.accepted}" if field.accepted else ""))
    lines.append(f"  default   {explanation.default or 'none; required'}")
    lines += [f"            {line}" for line in explanation.rules]
    if explanation.synonyms:
        lines.append(f"  synonyms  {', '.join(explanation.synonyms)}")
    if explanation.needs:
        lines.append(f"  needs     {explanation.needs}, else it is refused")
    if not explanation.changes_run:
        lines.append("  identity  not part of the run's identity")
    lines.append(f"  resume    {explanation.resume}")
    for value in explanation.values:
        name = "value" if len(explanation.values) == 1 else value.key
        lines.append(f"  {name:<8}  {write_inline(value.value)}  ({value.origin})")
    return lines
