"""Syntax errors of YAML in plain words: the parser's error and the text -> what is wrong, and how to write it.

The parser names its own states ("expected <block end>"). A person wants to hear about the tab, the quote or the indent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml

_TOML = re.compile(r"\A(?:\s*(?:#.*)?\n)*\s*(?:\[\[?[\w.\-]+\]\]?[ \t]*(?:#.*)?(?:\n|\Z)|[\w.\-]+[ \t]*=[ \t]*\S)")
_INDENT = "keys of one section stand in one column, two blanks deeper than the section's name"
_PLAIN: tuple[tuple[str, str, str], ...] = (
    (r"found character '\\t'", "a tab stands where only blanks may", "indent with blanks"),
    (r"found character '(.)'", "a value begins with {0}", "put the value in quotes"),
    (
        r"mapping values are not allowed",
        "a `:` too many, or a line that is indented deeper than the one above",
        f"put text that holds `: ` in quotes; {_INDENT}",
    ),
    (r"could not find expected ':'", "a line without `key: value`", "write `key: value`, with a blank behind the `:`"),
    (r"expected ',' or '([\]}])'", "a list or mapping in brackets has no end", "close it with {0}"),
    (r"sequence entries are not allowed", "a `- ` inside of a line", "begin every list entry on a line of its own"),
    (r"expected <block end>", "a line that is indented like none above it", _INDENT),
    (r"unexpected end of stream", "a quoted text has no end", "close the quote"),
    (r"unacceptable character #x(\w+)", "the character U+{0} is not allowed", "remove it, or write it as an escape"),
    (r"expected '<document start>'", "something that is not `key: value`", _INDENT),
)


@dataclass(frozen=True, slots=True)
class YamlFault:
    """A syntax error: what it is and how to write it instead."""

    what: str
    hint: str


def looks_like_toml(text: str) -> bool:
    """Whether a text begins like TOML: with a ``[section]`` or a ``key = value``."""
    return _TOML.match(text) is not None


TOML_FAULT = YamlFault(
    "this is TOML, and a configuration is YAML or JSON",
    "write [train] as `train:` and, indented below it, num_steps = 100 as `num_steps: 100`",
)


def explain_fault(error: yaml.YAMLError, text: str) -> YamlFault:
    """Explain the parser's error."""
    if looks_like_toml(text):
        return TOML_FAULT
    said = " ".join(str(error).split())
    for pattern, what, hint in _PLAIN:
        match = re.search(pattern, said)
        if match:
            groups = [group.lstrip("0") or "0" for group in match.groups()] if "U+" in what else match.groups()
            return YamlFault(f"not valid YAML: {what.format(*groups)}", hint.format(*groups))
    return YamlFault(f"not valid YAML: {said}", "")
