"""``vorox config``: show, explain and compare configurations; print the JSON schema.

A configuration is a preset, a file, or a run, which means the configuration recorded with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.arguments import OVERRIDES_CONTEXT, ParsedArguments, parse_arguments
from vorox.cli.output import AsJson, print_wrapped

if TYPE_CHECKING:
    from vorox.core.config import ConfigSource, ResolvedConfig
    from vorox.core.config.explain import Explanation

app = typer.Typer(
    name="config", help="Show, explain and compare configurations.", no_args_is_help=True, add_completion=False
)

ConfigArguments = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [a.b=v ...]", show_default=False)]


@app.command(context_settings=OVERRIDES_CONTEXT)
def show(
    arguments: ConfigArguments = None,
    origins: Annotated[bool, typer.Option("--origins", help="Print the origin of every value.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the resolved configuration of a preset, file or run."""
    from vorox.core.config import config_values, dump_yaml

    resolved = _resolve(arguments or [], options=("--origins", "--json"))
    if as_json:
        _print_json(config_values(resolved.config))
    else:
        typer.echo(dump_yaml(resolved.config, resolved if origins else None), nl=False)


@app.command(context_settings=OVERRIDES_CONTEXT)
def explain(
    key: Annotated[str, typer.Argument(help="For example optimizer.lr, schedule or data.sources.0.weight.")],
    arguments: ConfigArguments = None,
    as_json: AsJson = False,
) -> None:
    """Explain a setting: description, type, default, accepted values, and its value in a configuration."""
    from vorox.core.config.explain import explain as explain_key

    resolved = _resolve(arguments, options=("--json",)) if arguments else None
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
    after: Annotated[str, typer.Argument(metavar="B", help="Another preset, file or run; overrides apply to it.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[a.b=v ...]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List all differing settings. * marks those that make it a different run."""
    from vorox.core.config import differences, in_digest

    parsed = parse_arguments(arguments or [], options=("--json",), max_positional=0)
    old = _resolve([before], options=())
    new = _resolve([after, *parsed.overrides], options=())
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
        typer.echo("No difference")


def _resolve(arguments: list[str], options: tuple[str, ...]) -> ResolvedConfig:
    from vorox.core.config import resolve_config

    return resolve_config(*source_and_overrides(parse_arguments(arguments, options=options, max_positional=1)))


def source_and_overrides(parsed: ParsedArguments, *, is_quiet: bool = False) -> tuple[ConfigSource | None, list[str]]:
    """Return the source and overrides that ``load_config`` takes.

    ``--data PATH`` alone yields a configuration fitted to the text; with a configuration, it replaces the sources.
    """
    source = configuration_source(parsed.positional[0]) if parsed.positional else None
    overrides = list(parsed.overrides)
    if not parsed.data:
        return source, overrides
    from vorox.core.config.config_for_text import config_for_text
    from vorox.data.text.format_detection import detect_source

    prefix = "data.sources.0."
    given = [
        word.removeprefix("--").removeprefix(prefix) for word in overrides if f"{prefix}" in word.partition("=")[0]
    ]
    text = detect_source(parsed.data, {name: value for name, _, value in (word.partition("=") for word in given)})
    if not is_quiet:
        print_wrapped(text.summary.split("\n"), err=True)
    is_base = any(word.removeprefix("--").startswith("preset=") for word in overrides)
    if source is not None or is_base:
        return source, [f"data.sources={json.dumps([text.source])}", *overrides]
    return config_for_text(
        str(text.source["name"]), text.source, text_bytes=text.text_bytes, repeated_words=text.repeated_words,
        opening=text.opening,
    ), overrides  # fmt: skip


def configuration_source(name: str) -> str | Path:
    """Return what ``load_config`` takes for a name: the preset or file, or the recorded configuration of a run.

    Raises:
        ConfigError: The name is a text file or folder, not a configuration.
    """
    from vorox.core.config.presets import run_presets
    from vorox.core.errors import ConfigError
    from vorox.core.run_layout import RunLayout
    from vorox.core.run_lookup import find_run

    path = Path(name)
    if name in run_presets() or (path.is_file() and path.suffix.lower() in CONFIGURATION_ENDINGS):
        return name
    try:
        return RunLayout(find_run("runs", name)).config
    except ConfigError:
        from vorox.data.text.format_detection import text_path_error

        refusal = text_path_error(name) if path.exists() else None
        if refusal is not None:
            raise refusal from None
        return name  # load_config reports the alternatives


CONFIGURATION_ENDINGS = frozenset({".yaml", ".yml", ".json", ".toml", ".py"})


def _explanation_lines(explanation: Explanation) -> list[str]:
    from vorox.core.config.schema_fields import schema_fields
    from vorox.core.config.yaml_writer import write_inline

    field = explanation.field
    lines = [field.key, f"  {field.description}"]
    if field.is_section:
        width = max(len(key) for key in explanation.keys)
        lines += [f"  {key:<{width}}  {schema_fields()[key].description}" for key in explanation.keys]
        return lines
    lines.append(f"  type      {field.type_name}" + (f", {field.accepted}" if field.accepted else ""))
    lines.append(f"  default   {explanation.default or 'none; required'}")
    if explanation.synonyms:
        lines.append(f"  synonyms  {', '.join(explanation.synonyms)}")
    if explanation.needs:
        lines.append(f"  needs     {explanation.needs}, else it is refused")
    if not explanation.changes_run:
        lines.append("  identity  not part of the run's identity")
    for value in explanation.values:
        name = "value" if len(explanation.values) == 1 else value.key
        lines.append(f"  {name:<8}  {write_inline(value.value)}  ({value.origin})")
    return lines


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
