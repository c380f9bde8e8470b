"""Compile chat templates with Jinja, in the environment of transformers but without its clock.

Imported only for conversations: Jinja2 is an optional package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vorox.core.errors import ConfigError


class _GenerationBlocks(Extension):
    """``{% generation %}`` blocks, whose text is put between marks."""

    tags = {"generation"}  # noqa: RUF012 - the interface of Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        start, end = environment.globals["answer_marks"]
        return f"{start}{caller()}{end}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def compiled(source: str, start: str, end: str) -> jinja2.Template:
    """Compile a template.

    Args:
        source: Its text.
        start: Written before what a ``{% generation %}`` block renders.
        end: Written after it.

    Raises:
        ConfigError: The template is not valid Jinja.
    """
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["answer_marks"] = (start, end)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template has an error in line {error.lineno}: {error.message}", where="tokenizer.chat_template",
            hint="correct it, or set another template",
        ) from error  # fmt: skip
