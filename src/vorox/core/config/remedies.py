"""Corrections for common mistakes in values of settings.

A key, the refused value and the schema's field go in; a clause that is appended to the error message comes out, empty
without a suggestion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from vorox.core.config.schema_fields import SchemaField, admits, did_you_mean, schema_fields
from vorox.core.config.yaml_reader import Json, resolve_plain
from vorox.core.config.yaml_writer import write_inline

_CHOICES_ELSEWHERE: Final[Mapping[str, str]] = {
    "gpu": "cuda",
    "float32": "fp32",
    "fp64": "fp32",
    "half": "fp16",
    "json": "jsonl",
    "tsv": "csv",
}
"""Common names of choices that differ from ours."""

_TEXT_FORMATS = frozenset({"md", "markdown", "text", "rst", "tex", "html", "py", "code"})
_CHAT_FORMATS = frozenset({"chat", "chatml", "conversation", "conversations", "messages", "sharegpt", "alpaca"})
_UNITS: Final[Mapping[str, int]] = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def remedy(key: str, value: Json, field: SchemaField | None) -> str:
    """Return the correction after a semicolon, or an empty string."""
    if field is None:
        return ""
    if field.is_section and field.type_name != "list of sections" and isinstance(value, str | int | float):
        inner = (one.key for one in schema_fields().values() if one.key.startswith(f"{key}.") and value in one.choices)
        return f"; write {next(inner, f'{key}.KEY')}={value}"
    found = _text_remedy(key, value, field) if isinstance(value, str) else _number_remedy(key, value, field)
    return f"; {found}" if found else ""


def _number_remedy(key: str, value: Json, field: SchemaField) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if "text" in field.type_name.split() and not field.choices and not admits(field.annotation, float):
        return f"write it in quotes: {key}='\"{value}\"'"
    if isinstance(value, float) and value.is_integer() and abs(value) > 2**53 and admits(field.annotation, int):
        return "beyond 2^53 a float skips integers: write all digits, without a point or exponent"
    return ""


def _text_remedy(key: str, value: str, field: SchemaField) -> str:
    if value.lower() in {"none", "nil"} and admits(field.annotation, type(None)):
        return f"write {key}=null"
    if key == "data.transforms":
        return f"write {key}=[{{name: {write_inline(value)}}}]"
    if key.endswith("sources"):
        name = re.sub(r"[^\w.-]+", "-", PurePath(value).stem).strip("-.") or "text"
        written = f"write {key}=[{{name: {name}, format: txt, paths: [{write_inline(value)}]}}]"
        return f"{written}, or --data {value}" if key == "data.sources" else written
    if field.type_name == "list of texts":
        return f"write {key}=[{write_inline(value)}]"
    if field.choices:
        if field.key.endswith(".format") and value.lower() in _TEXT_FORMATS:
            return "text of any ending is format txt, with the files named by a glob: format=txt paths=[notes/*.md]"
        if field.key.endswith(".format") and value.lower() in _CHAT_FORMATS:
            return "conversations are format jsonl, parquet or arrow: format=jsonl chat_fields=[messages]"
        known = _CHOICES_ELSEWHERE.get(value.lower())
        if known in field.choices:
            return f"did you mean {known}?"
        return did_you_mean(value, [str(choice) for choice in field.choices])
    return _as_number(value) if "number" in field.type_name or "integer" in field.type_name else ""


def _as_number(value: str) -> str:
    bare = value.replace("_", "").replace(",", "")
    number = resolve_plain(bare)
    if isinstance(number, int | float) and not isinstance(number, bool):
        return f"it is text, write {bare} without quotes or separators"
    scaled = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbBgGtT])", bare)
    if scaled is None:
        return ""
    exact = round(float(scaled[1]) * _UNITS[scaled[2].lower()])
    return f"write {exact}"
