"""Telling the words of a command line apart: a configuration, overrides, and options that nobody knows.

Dotted overrides look like options (``--optimizer.lr=6e-4``), so commands that take them let unknown options through to
here. Nothing is ignored: a mistyped option is refused with the nearest name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OVERRIDES_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that take overrides."""


@dataclass(frozen=True, slots=True)
class Words:
    """A command line, sorted.

    Attributes:
        positional: Words that are neither overrides nor options, in order.
        overrides: ``a.b=v`` and ``--a.b=v``, in order.
    """

    positional: tuple[str, ...]
    overrides: tuple[str, ...]


def sort_words(words: Sequence[str], *, options: Sequence[str], max_positional: int) -> Words:
    """Sort the words that a command was given beside its own options.

    Args:
        words: All arguments, with unknown options among them.
        options: The command's options, for suggestions.
        max_positional: How many positional words the command takes.

    Raises:
        ConfigError: There is an option that the command does not have, or a word too many.
    """
    from vorox.core.config.fields import nearest, schema_fields
    from vorox.core.config.overrides import is_override
    from vorox.core.config.synonyms import SYNONYMS
    from vorox.core.errors import ConfigError

    known = {key for key in (*schema_fields(), *SYNONYMS) if "." not in key} | {"preset"}
    positional: list[str] = []
    overrides: list[str] = []
    for word in words:
        name = word.partition("=")[0]
        dotted = "." in name or name.removeprefix("--") in known
        if is_override(word) and (dotted or not word.startswith("-")):
            overrides.append(word)
        elif word.startswith("-") and len(word) > 1:
            if dotted and "=" not in word:
                raise ConfigError(f"{word} has no value", where=word, hint=f"write {word}=VALUE, with the = sign")
            near = nearest(name, options) or [f"--{key}=" for key in nearest(name.lstrip("-"))]
            hint = f"did you mean {' or '.join(near)}?" if near else f"options: {', '.join(options)}"
            raise ConfigError(f"there is no option {name}", where=word, hint=hint)
        else:
            positional.append(word)
    if len(positional) > max_positional:
        extra = positional[max_positional]
        raise ConfigError(
            f"{extra!r} is one word too many", where=extra, hint="settings are given as section.key=VALUE"
        )
    return Words(tuple(positional), tuple(overrides))
