"""The cause of a slow run is named with the setting that mends it, and only if it matters."""

from __future__ import annotations

from typing import Any

import pytest

from small_configurations import configuration
from vorox.core.config.schema_fields import leaf_keys
from vorox.runtime.throughput import slow_cause


def cause(data: float = 0.0, save: float = 0.0, evaluation: float = 0.0, **settings: Any) -> str | None:
    """The cause of 100 seconds of which so many are lost."""
    seconds = {"compute": 100.0 - data - save - evaluation, "data": data, "save": save, "eval": evaluation}
    return slow_cause(seconds, configuration(**settings))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data": 31}, "data 31% of the time: raise data.loader.num_threads 1 -> 2"),
        ({"data": 31, "save": 40, "checkpoint": {"every_steps": 50}},
         "save 40% of the time: raise checkpoint.every_steps 50 -> 200"),
        ({"save": 25, "checkpoint": {"asynchronous": False}}, "save 25% of the time: set checkpoint.asynchronous=true"),
        ({"evaluation": 50, "eval": {"every_steps": 100}}, "eval 50% of the time: raise eval.every_steps 100 -> 400"),
        ({"data": 19, "save": 19, "evaluation": 19}, None),
    ],
)  # fmt: skip
def test_the_largest_loss_is_named(settings: dict[str, Any], text: str | None) -> None:
    found = cause(**settings)
    assert found == text
    if found is not None:
        (key,) = [word.partition("=")[0] for word in found.split() if "." in word]
        assert key in leaf_keys()


def test_a_short_measurement_names_none() -> None:
    assert slow_cause({"compute": 1.0, "data": 3.0, "save": 0.0, "eval": 0.0}, configuration()) is None
    assert slow_cause({}, configuration()) is None
