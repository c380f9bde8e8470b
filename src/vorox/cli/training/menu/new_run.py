"""A new run in the menu: what it trains on, and its name."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

import typer

from vorox.cli.settings.config import CONFIGURATION_ENDINGS
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_wrapped
from vorox.cli.training.menu.questions import BACK, Ask, Back, title
from vorox.core.config import model_label, slug
from vorox.core.config.layers.presets import run_presets
from vorox.core.errors import VoroxError
from vorox.core.schema import RunConfig
from vorox.planned_run import planned_model
from vorox.records.run_lookup import run_directories

_MAX_FILES = 6


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A name for a run, and its meaning."""

    name: str
    meaning: str


def ask_what_to_train(ask: Ask) -> tuple[str, ...]:
    """Ask for a preset, a configuration or a text, and return it as words of the command.

    Raises:
        Back: The user returns to the list.
    """
    choices = [*_files(), *_presets()]
    title("What to train")
    width = max(len(name) for name, _ in choices)
    left = shutil.get_terminal_size().columns - width - 7  # one line each, so that the list fits on a screen
    print_wrapped(
        (
            f"{number:>3}  {name:<{width}}  {textwrap.shorten(text, max(left, 24), placeholder=' ...')}"
            for number, (name, text) in enumerate(choices, 1)
        ),
        indent_columns=width + 7,
    )
    print_wrapped(
        ["", "  Or type a path: your own text (a file or a folder), or a configuration.", ""], indent_columns=2
    )
    default = next(number for number, (name, _) in enumerate(choices, 1) if name == _DEFAULT)
    while True:
        answer = ask(f"1-{len(choices)}, a path, or {BACK} = back [{default}]: ").strip() or str(default)
        if answer.upper() == BACK:
            raise Back
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            return (choices[int(answer) - 1][0],)
        if answer in dict(choices):
            return (answer,)
        words = _words(answer)
        if words is not None:
            return words
        print_wrapped([f"  {answer} is neither a number of the list nor a file or folder."])


_DEFAULT = "quickstart"


def _words(answer: str) -> tuple[str, ...] | None:
    """Return the words of a typed path; ``None`` if it does not exist."""
    path = Path(answer).expanduser()
    if not path.exists():
        return None
    is_configuration = path.is_file() and path.suffix.lower() in CONFIGURATION_ENDINGS
    return (str(path),) if is_configuration else ("--data", str(path))


def _files() -> list[tuple[str, str]]:
    """Return the configurations in this folder."""
    found = sorted(path.name for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern))
    return [(name, "a configuration in this folder") for name in found[:_MAX_FILES]]


def _presets() -> list[tuple[str, str]]:
    """Return name and first sentence of every preset, the quickstart first."""
    found: list[tuple[str, str]] = []
    for name, path in run_presets().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        comment = " ".join(
            line.removeprefix("# ") for line in itertools.takewhile(lambda line: line.startswith("# "), lines)
        )
        sentence = re.split(r"(?<=[a-zA-Z)])\. ", comment)[0].rstrip(".:")
        found.append((name, sentence))
    return sorted(found, key=lambda choice: choice[0] != _DEFAULT)


def choose_name(config: RunConfig, ask: Ask) -> str:
    """Suggest names for a run, ask for one, and return it with the next free run number.

    Raises:
        Back: The user returns to the list.
    """
    suggestions = suggest_names(config)
    title("Name")
    width = max(len(one.name) for one in suggestions)
    print_wrapped(
        (f"{number:>3}  {one.name:<{width}}  {one.meaning}" for number, one in enumerate(suggestions, 1)),
        indent_columns=width + 7,
    )
    typer.echo("")
    answer = ask(f"1-{len(suggestions)}, a name, or {BACK} = back [1]: ").strip() or "1"
    if answer.upper() == BACK:
        raise Back
    is_number = answer.isdecimal() and 1 <= int(answer) <= len(suggestions)
    name = suggestions[int(answer) - 1].name if is_number else slug(answer)
    numbered = f"{name}_run_{next_run_number(Path(config.run.directory), name)}"
    typer.echo(f"  The run is named {numbered}.")
    return numbered


def suggest_names(config: RunConfig) -> list[Suggestion]:
    """Return four names built from size, data and sequence length."""
    size, data = _size(config), slug("-".join(source.name for source in config.data.sources))[:40]
    tokens = config.data.sequence_length_tokens
    full = f"{size}_{data}_{tokens}"
    family = slug(config.model.family) if config.model.kind == "decoder" else "model"
    return [
        Suggestion(full, f"{size} parameters, {data}, rows of {tokens:,} tokens"),
        Suggestion(f"experiment_{full}", "an experiment"),
        Suggestion(f"{family}_{size}", "architecture and size"),
        Suggestion(f"test_{size}", "a test run"),
    ]


def _size(config: RunConfig) -> str:
    """Return the number of parameters as in a name: 415M, 1.3M; the model's label if it is not known in advance."""
    try:
        text = humanize.count(planned_model(config).num_parameters)
    except VoroxError:
        return slug(model_label(config))
    number, unit = float(text[:-1].replace(",", "")) if text[-1].isalpha() else float(text), text[-1]
    unit = unit.upper() if unit.isalpha() else ""
    return f"{number:.0f}{unit}" if number >= 10 else f"{number:.1f}{unit}"


def next_run_number(root: Path, name: str) -> int:
    """Return one more than the largest run number of a name."""
    pattern = re.compile(re.escape(name) + r"_run_(\d+)-")
    numbers = [int(match[1]) for path in run_directories(root) if (match := pattern.match(path.name))]
    return max(numbers, default=0) + 1
