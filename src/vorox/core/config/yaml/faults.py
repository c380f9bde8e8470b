"""Explain YAML syntax errors: a message and a hint for each parser error.

The parser reports its own states ("expected <block end>"); users need to know about the tab, quote or indentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml

_TOML = re.compile(r"\A(?:\s*(?:#.*)?\n)*\s*(?:\[\[?[\w.\-]+\]\]?[ \t]*(?:#.*)?(?:\n|\Z)|[\w.\-]+[ \t]*=[ \t]*\S)")
_INDENT = "indent all keys of a section equally, two blanks deeper than its name"
_PLAIN: tuple[tuple[str, str, str], ...] = (
    (r"found character '\\t'", "a tab in the indentation", "indent with blanks"),
    (r"found character '(.)'", "a value starts with {0}", "quote the value"),
    (
        r"mapping values are not allowed",
        "an extra `:`, or a line that is indented deeper than the previous one",
        f"quote text that contains `: `; {_INDENT}",
    ),
    (r"could not find expected ':'", "a line without `key: value`", "write `key: value`, with a blank after the `:`"),
    (r"expected ',' or '([\]}])'", "an unclosed list or mapping in brackets", "close it with {0}"),
    (r"sequence entries are not allowed", "a `- ` within a line", "write every list entry on its own line"),
    (r"expected <block end>", "inconsistent indentation", _INDENT),
    (r"unexpected end of stream", "an unclosed quote", "close the quote"),
    (r"unacceptable character #x(\w+)", "the character U+{0} is not allowed", "remove it, or write it as an escape"),
    (r"expected '<document start>'", "a line that is not `key: value`", _INDENT),
)


@dataclass(frozen=True, slots=True)
class YamlFault:
    """A syntax error: a message and a hint."""

    what: str
    hint: str


def looks_like_toml(text: str) -> bool:
    """Whether a text starts like TOML, with a ``[section]`` or a ``key = value``."""
    return _TOML.match(text) is not None


TOML_FAULT = YamlFault(
    "The file is TOML, but a configuration is YAML or JSON",
    "write [train] as `train:` and, indented below it, num_steps = 100 as `num_steps: 100`",
)


def explain_fault(error: yaml.YAMLError, text: str) -> YamlFault:
    """Return the explanation of the parser's error."""
    if looks_like_toml(text):
        return TOML_FAULT
    text_of_error = " ".join(str(error).split())
    for pattern, what, hint in _PLAIN:
        match = re.search(pattern, text_of_error)
        if match:
            groups = [group.lstrip("0") or "0" for group in match.groups()] if "U+" in what else match.groups()
            return YamlFault(f"Invalid YAML: {what.format(*groups)}", hint.format(*groups))
    return YamlFault(f"Invalid YAML: {text_of_error}", "")
