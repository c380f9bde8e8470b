"""Parsing of command lines with dotted overrides: configuration, overrides, and unknown options.

Overrides look like options (``--optimizer.lr=6e-4``), so commands that accept them pass unknown options on to this
module. No argument is ignored: a mistyped option is refused, with the nearest name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_EQUIVALENTS = {
    **dict.fromkeys(("text", "texts", "file", "input", "train_data", "train_file", "corpus", "d"), "--data PATH"),
    **dict.fromkeys(("val_data", "validation_file", "eval_data"),
                    "'data.validation.sources=[{name: held-out, format: txt, paths: [PATH]}]'"),
    **dict.fromkeys(("gpu", "cuda"), "--device cuda"),
    **dict.fromkeys(("lora", "use_lora", "peft", "use_peft"), "adapter.kind=lora"),
    **dict.fromkeys(("qlora", "load_in_4bit"), "adapter.kind=qlora"),
    **dict.fromkeys(("bf16", "amp", "mixed_precision"), "precision.dtype=bf16"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "train.global_batch_sequences=ROWS (of a step)"),
    **dict.fromkeys(("model_name_or_path", "checkpoint", "pretrained"), "--from-weights DIRECTORY"),
    "fp16": "precision.dtype=fp16",
    "cpu": "--device cpu",
    "vocab_size": "tokenizer.vocab_size=TOKENS",
    "model": "model.preset=NAME (a size) or --from-weights DIRECTORY (trained weights)",
    "optimizer": "optimizer.name=adamw",
    "scheduler": "schedule.name=cosine",
    "wandb": "log.wandb=true",
    "mlflow": "log.mlflow=true",
    "trackio": "log.trackio=true",
    "tensorboard": "log.tensorboard=true",
    "jax": "backend=jax",
    "torch": "backend=torch",
}  # fmt: skip
"""Options of other trainers without a single equivalent setting, and what to write instead."""

_DEVICE_COUNTS = ("gpus", "num_gpus", "n_gpu", "devices", "num_devices", "nproc_per_node", "num_processes")
"""Options of other trainers for the number of devices."""

OVERRIDES_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer context settings of commands that accept overrides."""


@dataclass(frozen=True, slots=True)
class ParsedArguments:
    """The arguments of a command, by kind.

    Attributes:
        positional: Arguments that are neither overrides nor options, in order, including that of ``--config FILE``.
        overrides: ``a.b=v`` and ``--a.b=v``, in order; ``--a.b v`` becomes ``--a.b=v``.
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
    from vorox.core.config.overrides import is_override
    from vorox.core.errors import ConfigError

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
    if len(positional) > max_positional:
        extra = positional[max_positional]
        raise ConfigError(f"Unexpected argument {extra!r}", where=extra, hint="write settings as section.key=VALUE")
    return ParsedArguments(tuple(positional), tuple(overrides), tuple(data))


def _key_of_option(name: str) -> str | None:
    """Return the key of an option: a dotted key, or a known name, in which ``-`` may replace ``_``."""
    from vorox.core.config.schema_fields import schema_fields
    from vorox.core.config.synonyms import SYNONYMS

    bare = name.removeprefix("--")
    if "." in bare and not bare.startswith("-"):
        return bare
    known = {key for key in (*schema_fields(), *SYNONYMS) if "." not in key} | {"preset"}
    return next((key for key in (bare, bare.replace("-", "_")) if key in known), None)


def _next_value(name: str, rest: list[str]) -> str:
    """Remove and return the value that follows an option."""
    from vorox.core.errors import ConfigError

    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"Option {name} has no value", where=name, hint=f"write {name}=VALUE")
    return rest.pop(0)


def _refuse_blanks_around_equals(word: str, key: str | None, rest: Sequence[str]) -> None:
    """Refuse ``key = value``, ``key= value`` and ``key =value``, and suggest the correct form.

    Raises:
        ConfigError: The argument has blanks around the ``=``.
    """
    from vorox.core.config.schema_fields import find_field
    from vorox.core.config.synonyms import key_of
    from vorox.core.errors import ConfigError

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
    from vorox.core.config.schema_fields import nearest
    from vorox.core.config.synonyms import SYNONYMS
    from vorox.core.errors import ConfigError

    known = name.lstrip("-").replace("-", "_")
    equivalent = _EQUIVALENTS.get(known)
    if known in _DEVICE_COUNTS:
        equivalent = "--hardware, for example h100x8" if "--hardware" in options else "--nproc N (a process for each)"
    if equivalent is not None:
        return ConfigError(f"Unknown option {name}", where=name, hint=f"write {equivalent}")
    own = (*options, "--config", "--data")
    bare = name.lstrip("-")
    near = nearest(bare, [*(option[2:] for option in own), *(synonym for synonym in SYNONYMS if "." not in synonym)])
    near = [f"--{option}" for option in near] or [f"--{key}=" for key in nearest(bare)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"options: {', '.join(own)}; settings: --section.key=VALUE"
    return ConfigError(f"Unknown option {name}", where=name, hint=hint)
