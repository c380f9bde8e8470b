"""Parsing of command lines with dotted overrides: configuration, overrides, and unknown options.

Overrides look like options (``--optimizer.lr=6e-4``), so commands that accept them pass unknown options on to this
module. No argument is ignored: a mistyped option is refused, with the nearest name.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.core.config.layers.overrides import is_override
from vorox.core.config.layers.synonyms import OTHER_OPTIONS, key_of
from vorox.core.config.schema_fields import find_field, nearest, schema_fields, synonyms
from vorox.core.config.yaml.writer import write_scalar
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout

_EQUIVALENTS = {
    **OTHER_OPTIONS,
    **dict.fromkeys(("text", "texts", "file", "input", "train_data", "train_file", "corpus", "d"), "--data PATH"),
    **dict.fromkeys(("val_data", "validation_file", "eval_data"),
                    "'data.validation.sources=[{name: held-out, format: txt, paths: [PATH]}]'"),
    "model": "model.preset=NAME (a size) or --from-weights DIRECTORY (trained weights)",
}  # fmt: skip
"""Options of other trainers, and what to write instead: ``OTHER_OPTIONS``, which a file may have too, and those of a
command line only."""

_DEVICE_COUNTS = ("gpus", "num_gpus", "n_gpu", "devices", "num_devices", "nproc_per_node", "num_processes")
"""Options of other trainers for the number of devices."""


@dataclass(frozen=True, slots=True)
class ParsedArguments:
    """The arguments of a command, by kind.

    Attributes:
        positional: Arguments that are neither overrides nor options, in order, including that of ``--config FILE``.
        overrides: ``a.b=v`` and ``--a.b=v``, in order; ``--a.b v`` becomes ``--a.b=v``, and ``--from-weights NAME``
            the setting ``train.from_weights``.
        data: The paths given with ``--data``: the user's own text.
    """

    positional: tuple[str, ...]
    overrides: tuple[str, ...]
    data: tuple[str, ...] = ()


def parse_arguments(arguments: Sequence[str], *, options: Sequence[str], max_positional: int) -> ParsedArguments:
    """Sort the arguments that typer did not recognise as options of the command.

    Args:
        arguments: All such arguments, including unknown options.
        options: The command's options, for suggestions.
        max_positional: Maximum number of positional arguments.

    Raises:
        ConfigError: An option is unknown, or there are too many positional arguments.
    """
    positional: list[str] = []
    overrides: list[str] = []
    data: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in {"--config", "--data"} and not value.startswith("{"):
            (positional if name == "--config" else data).append(value if equals else _next_value(name, rest))
            continue
        if name == "--from-weights":  # quoted, so that a name is not parsed as a number or a list
            overrides.append(f"train.from_weights={write_scalar(value if equals else _next_value(name, rest))}")
            continue
        key = _key_of_option(name)
        _refuse_blanks_around_equals(word, key, rest)
        if key is not None and word.startswith("-"):
            overrides.append(f"--{key}={value if equals else _next_value(name, rest)}")
        elif is_override(word) and not word.startswith("-"):
            overrides.append(word)
        elif word.startswith("-") and len(word) > 1:
            raise _unknown_option(name, options)
        else:
            positional.append(word)
    empty = next((option for option, values in (("--data", data), ("An argument", positional)) if "" in values), None)
    if empty is not None or "train.from_weights=''" in overrides or 'train.from_weights=""' in overrides:
        name = empty or "--from-weights"
        raise ConfigError(
            f"{name} is empty", where=name, hint="write it out, or leave it out; is a shell variable unset?"
        )
    more = [word for word in positional if data and Path(word).exists() and not _may_be_configuration(word)]
    if more:
        shown = " ".join(f"--data {shlex.quote(path)}" for path in [*data, *more][:4])
        raise ConfigError(
            f"--data takes one path; {more[0]!r} follows it", where=more[0],
            hint=f"write {shown}{' ...' if len(data) + len(more) > 4 else ''}, or quote the pattern: --data '*.txt'",
        )  # fmt: skip
    if len(positional) > max_positional:
        extra = positional[max_positional]
        raise ConfigError(f"Unexpected argument {extra!r}", where=extra, hint="write settings as section.key=VALUE")
    return ParsedArguments(tuple(positional), tuple(overrides), tuple(data))


def _may_be_configuration(word: str) -> bool:
    """Whether a path that exists may be a configuration or a run."""
    path = Path(word)
    return path.suffix.lower() in {".yaml", ".yml", ".py"} or RunLayout(path).record.exists()


def _key_of_option(name: str) -> str | None:
    """Return the key of an option: a dotted key, or a known name, in which ``-`` may replace ``_``."""
    bare = name.removeprefix("--")
    if "." in bare and not bare.startswith("-"):
        return bare
    known = {key for key in (*schema_fields(), *synonyms()) if "." not in key} | {"preset"}
    return next((key for key in (bare, bare.replace("-", "_")) if key in known), None)


def _next_value(name: str, rest: list[str]) -> str:
    """Remove and return the value that follows an option."""
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"Option {name} has no value", where=name, hint=f"write {name}=VALUE")
    return rest.pop(0)


def _refuse_blanks_around_equals(word: str, key: str | None, rest: Sequence[str]) -> None:
    """Refuse ``key = value``, ``key= value`` and ``key =value``, and suggest the correct form.

    Raises:
        ConfigError: The argument has blanks around the ``=``.
    """
    name, equals, value = word.partition("=")
    following = rest[0] if rest else ""
    if key is None or find_field(key_of(key)) is None or value:
        return
    if equals and following and "=" not in following and not following.startswith("-"):
        corrected = f"{word}{following}"
    elif not equals and following.startswith("="):
        corrected = f"{word}={following[1:] or (rest[1] if len(rest) > 1 else 'VALUE')}"
    elif not equals and not word.startswith("-"):
        corrected = f"{word}=VALUE"
    else:
        return
    raise ConfigError(
        f"Setting {name} has no value", where=word, hint=f"write {corrected}, without blanks around the ="
    )


def _unknown_option(name: str, options: Sequence[str]) -> Exception:
    known = name.lstrip("-").replace("-", "_")
    equivalent = _EQUIVALENTS.get(known)
    if known in _DEVICE_COUNTS:
        equivalent = "--hardware, for example h100x8" if "--hardware" in options else "--nproc N (a process for each)"
    if equivalent is not None:
        return ConfigError(f"Unknown option {name}", where=name, hint=f"write {equivalent}")
    own = dict.fromkeys((*options, "--config", "--data", "--from-weights"))
    bare = name.lstrip("-")
    near = nearest(bare, [*(option[2:] for option in own), *synonyms()])
    near = [f"--{option}" for option in near] or [f"--{key}=" for key in nearest(bare)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"options: {', '.join(own)}; settings: --section.key=VALUE"
    return ConfigError(f"Unknown option {name}", where=name, hint=hint)
