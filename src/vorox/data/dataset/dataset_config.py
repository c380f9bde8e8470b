"""The configuration of a ``RemoteIterableDataset``, made from its arguments.

Defaults and checks equal those of a run's configuration. Invariant: the result is a valid configuration with
``data.mode: streaming``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.core.schema.source_formats import format_of_path

Sources = str | Path | Sequence[str] | Mapping[str, str | Sequence[str] | Mapping[str, Any]]
Transforms = Sequence[str | Mapping[str, Any]]

UNIT_BYTES = 8 << 20
"""Default bytes of text per unit: small, so that the first batch is ready within seconds."""

_ASSUMED_BYTES_PER_TOKEN = 4


def dataset_config(
    data: RunConfig | Sources,
    *,
    tokenizer: str | None,
    sequence_length_tokens: int | None,
    weights: Mapping[str, float | str] | None,
    transforms: Transforms | None,
    seed: int | None,
    shuffle: bool | None,
    shuffle_buffer_rows: int | None,
    cache_directory: str | Path | None,
    retention_bytes: int | None,
    unit_bytes: int | None,
) -> RunConfig:
    """Return the configuration for the arguments of ``RemoteIterableDataset``.

    Raises:
        ConfigError: An argument is invalid, or two contradict each other.
    """
    values = data.model_dump(mode="json") if isinstance(data, RunConfig) else _from_locations(data)
    section: dict[str, Any] = values["data"]
    section["mode"] = "streaming"
    section.setdefault("growth", {}).update(mode="strict", later_passes="segments")
    given: list[tuple[dict[str, Any], str, Any]] = [
        (section, "sequence_length_tokens", sequence_length_tokens),
        (section, "shuffle", shuffle),
        (section.setdefault("cache", {}), "directory", None if cache_directory is None else str(cache_directory)),
        (section.setdefault("streaming", {}), "retention_bytes", retention_bytes),
        (section["cache"], "unit_bytes", unit_bytes),
        (values.setdefault("run", {}), "seed", seed),
    ]
    for target, key, value in given:
        if value is not None:
            target[key] = value
    if tokenizer is not None:
        values["tokenizer"] = {"kind": "byte"} if tokenizer == "byte" else {"kind": "file", "path": tokenizer}
    if transforms is not None:
        section["transforms"] = [{"name": one} if isinstance(one, str) else dict(one) for one in transforms]
    _set_weights(section["sources"], weights)
    if shuffle_buffer_rows is not None:
        _set_window(section, shuffle_buffer_rows)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        listed = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"The arguments are invalid: {listed}") from error
    problems = find_problems(config)
    if problems:
        raise ConfigError("; ".join(problem.what for problem in problems))
    return config


def _from_locations(data: Sources) -> dict[str, Any]:
    if isinstance(data, Mapping):
        sources = [_source(name, value) for name, value in data.items()]
    else:
        sources = [_source("text", [str(data)] if isinstance(data, str | Path) else list(data))]
    return {
        "data": {
            "sources": sources,
            "sequence_length_tokens": 1024,
            "cache": {"unit_bytes": UNIT_BYTES},
            "validation": {"held_out_fraction": 0},
        },
        "train": {"num_steps": 1, "global_batch_sequences": 1, "micro_batch_sequences": 1},
        "eval": {"every_steps": None, "at_end": False},
    }


def _source(name: str, value: str | Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {"name": name, **value}
    paths = [value] if isinstance(value, str) else list(value)
    formats = sorted({_format_of(path) for path in paths})
    if len(formats) != 1:
        raise ConfigError(
            f"The locations of {name!r} have different formats: {', '.join(formats)}",
            hint="give each format its own source: {'first': [...], 'second': [...]}",
        )
    return {"name": name, "format": formats[0], "paths": paths}


def _format_of(path: str) -> str:
    known = format_of_path(path)
    if known is None and path.startswith("hf://"):
        known = "parquet"
    if known is None:
        raise ConfigError(
            f"The format of {path} cannot be inferred from its name",
            hint="state it: {'text': {'format': 'jsonl', 'paths': ['" + path + "']}}",
        )
    return known


def _set_weights(sources: Sequence[dict[str, Any]], weights: Mapping[str, float | str] | None) -> None:
    if weights is None:
        return
    names = [source["name"] for source in sources]
    unknown = sorted(weights.keys() ^ set(names))
    if unknown:
        raise ConfigError(
            f"The weights and the sources differ in {', '.join(unknown)}", hint=f"give weights to all of {names}"
        )
    for source in sources:
        source["weight"] = weights[source["name"]]


def _set_window(section: dict[str, Any], shuffle_buffer_rows: int) -> None:
    """Bound segments to about ``shuffle_buffer_rows``: rows are permuted within a segment."""
    if shuffle_buffer_rows < 1:
        raise ConfigError(f"A shuffle buffer of {shuffle_buffer_rows} rows is impossible", where="shuffle_buffer_rows")
    unit_bytes = int(section["cache"].get("unit_bytes", UNIT_BYTES))
    row_bytes = _ASSUMED_BYTES_PER_TOKEN * int(section["sequence_length_tokens"])
    units = max(1, shuffle_buffer_rows * row_bytes // unit_bytes)
    section["growth"] |= {"first_segment_units": 1, "max_segment_units": units}
