"""``vorox config``: show, explain, compare configurations; print the schema. Parsing and printing only.

Wherever a configuration is named, a run's name or directory does as well: then its recorded one is meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.arguments import OVERRIDES_CONTEXT, sort_words

if TYPE_CHECKING:
    from vorox.core.config import ResolvedConfig
    from vorox.core.config.explain import Explanation

app = typer.Typer(
    name="config", help="Show, explain and compare configurations.", no_args_is_help=True, add_completion=False
)

Words = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [a.b=v ...]", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(context_settings=OVERRIDES_CONTEXT)
def show(
    words: Words = None,
    origins: Annotated[bool, typer.Option("--origins", help="Say where every value comes from.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a preset, file or run with everything filled in."""
    from vorox.core.config import config_values, dump_yaml

    resolved = _resolve(words or [], options=("--origins", "--json"))
    if as_json:
        _print_json(config_values(resolved.config))
    else:
        typer.echo(dump_yaml(resolved.config, resolved if origins else None), nl=False)


@app.command(context_settings=OVERRIDES_CONTEXT)
def explain(
    key: Annotated[str, typer.Argument(help="Such as optimizer.lr, schedule or data.sources.0.weight.")],
    words: Words = None,
    as_json: AsJson = False,
) -> None:
    """Say what a setting is, what it accepts, and what it is in a configuration."""
    from vorox.core.config.explain import explain as explain_key

    resolved = _resolve(words, options=("--json",)) if words else None
    explanation = explain_key(key, resolved)
    if as_json:
        _print_json(explanation.to_json())
        return
    for line in _explanation_lines(explanation):
        typer.echo(line)


@app.command()
def schema() -> None:
    """Print the JSON schema of configuration files, for editors."""
    from vorox.core.config import json_schema

    _print_json(json_schema())


@app.command(context_settings=OVERRIDES_CONTEXT)
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A preset, file or run.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one; overrides behind it apply to it.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[a.b=v ...]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List every setting that differs. Those that make it another run are marked with *."""
    from vorox.core.config import differences, in_digest

    sorted_words = sort_words(words or [], options=("--json",), max_positional=0)
    old = _resolve([before], options=())
    new = _resolve([after, *sorted_words.overrides], options=())
    found = differences(old.config, new.config)
    if as_json:
        _print_json(
            [
                {"key": item.key, "before": item.before, "after": item.after, "changes_run": in_digest(item.key)}
                for item in found
            ]
        )
        return
    for item in found:
        typer.echo(f"{'*' if in_digest(item.key) else ' '} {item}")
    if not found:
        typer.echo("no difference")


def _resolve(words: list[str], options: tuple[str, ...]) -> ResolvedConfig:
    from vorox.core.config import resolve_config

    sorted_words = sort_words(words, options=options, max_positional=1)
    source = configuration_source(sorted_words.positional[0]) if sorted_words.positional else None
    return resolve_config(source, sorted_words.overrides)


def configuration_source(name: str) -> str | Path:
    """What ``load_config`` takes for a name: a preset or file as it is, a run by its recorded configuration."""
    from vorox.core.config.presets import run_presets
    from vorox.core.errors import ConfigError
    from vorox.core.run_lookup import find_run

    if name in run_presets() or Path(name).is_file():
        return name
    try:
        return find_run("runs", name) / "config.yaml"
    except ConfigError:
        return name  # load_config says what there is instead


def _explanation_lines(explanation: Explanation) -> list[str]:
    from vorox.core.config.fields import schema_fields
    from vorox.core.config.yaml_writer import write_inline

    field = explanation.field
    lines = [field.key, f"  {field.description}"]
    if field.is_section:
        width = max(len(key) for key in explanation.keys)
        lines += [f"  {key:<{width}}  {schema_fields()[key].description}" for key in explanation.keys]
        return lines
    lines.append(f"  type      {field.type_name}" + (f", {field.accepted}" if field.accepted else ""))
    lines.append(f"  default   {explanation.default or 'none: it must be given'}")
    if explanation.synonyms:
        lines.append(f"  also      {', '.join(explanation.synonyms)}")
    if explanation.needs:
        lines.append(f"  needs     {explanation.needs}; without, it is refused")
    if not explanation.changes_run:
        lines.append("  identity  not part of it: the same run with another value")
    for value in explanation.values:
        name = "here" if len(explanation.values) == 1 else value.key
        lines.append(f"  {name:<8}  {write_inline(value.value)}  ({value.origin})")
    return lines


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
