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
from vorox.core.config.yaml.reader import Json, resolve_plain
from vorox.core.config.yaml.writer import write_inline

_CHOICES_ELSEWHERE: Final[Mapping[str, str]] = {
    "gpu": "cuda",
    "float32": "fp32",
    "fp64": "fp32",
    "half": "fp16",
    "tsv": "csv",
}
"""Common names of choices that differ from ours."""

_TEXT_FORMATS = frozenset({"md", "markdown", "text", "rst", "tex", "html", "py", "code"})
_CHAT_FORMATS = frozenset({"chat", "chatml", "conversation", "conversations", "messages", "sharegpt", "alpaca"})
_UNITS: Final[Mapping[str, int]] = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}

_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?:[eE][+-]?\d+|[kKmMbBgGtT])?")
_DECIMAL = re.compile(r"[+-]?\d+,\d+(?:[eE][+-]?\d+|[kKmMbBgGtT])?")


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
    if key == "log.sinks" and f"log.{value.lower()}" in schema_fields():
        return f"write log.{value.lower()}=true"
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
    kinds = field.type_name.split()
    return _as_number(value, is_whole="number" not in kinds) if {"number", "integer"} & set(kinds) else ""


def _as_number(value: str, *, is_whole: bool) -> str:
    """Return how to write a text as a number.

    A comma stands for a decimal point or between thousands: where both fit, a whole number has thousands, and both are
    offered for any other.
    """
    bare = re.sub(r"(?<=\d)_(?=\d)", "", value)
    readings = [bare] if "," not in bare else []
    if _THOUSANDS.fullmatch(bare):
        readings.append(bare.replace(",", ""))
    if _DECIMAL.fullmatch(bare) and not (is_whole and readings):
        readings.insert(0, bare.replace(",", "."))
    written = [one for one in map(_number, readings) if one and not (is_whole and "." in one)]
    if not written:
        return ""
    is_scaled = value[-1:].lower() in _UNITS
    what = "" if is_scaled else "it is text, "
    how = "" if is_scaled else " without quotes or separators"
    return f"{what}write {' or '.join(written)}{how}"


def _number(text: str) -> str:
    """Return a number as it is written in YAML; empty if a text is none."""
    number = resolve_plain(text)
    if isinstance(number, int | float) and not isinstance(number, bool):
        return text
    scaled = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbBgGtT])", text)
    return "" if scaled is None else str(round(float(scaled[1]) * _UNITS[scaled[2].lower()]))
