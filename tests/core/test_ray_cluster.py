"""A start of Ray is tried again where its node was too slow, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from vorox.core.errors import StalledError
from vorox.core.ranks.ray_cluster import start_ray

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


class Ray:
    """A stand-in whose starts end as they are listed; after that they succeed."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.starts: list[dict[str, Any]] = []

    def init(self, **options: Any) -> None:
        self.starts.append(options)
        if self.errors:
            raise self.errors.pop(0)


def test_a_slow_node_is_started_again_with_the_same_options() -> None:
    ray = Ray(Exception(SLOW), Exception(SLOW))
    start_ray(ray, num_cpus=2)
    assert ray.starts == [{"num_cpus": 2}] * 3


def test_a_node_that_never_starts_says_where_its_logs_are() -> None:
    ray = Ray(*[Exception(SLOW)] * 99)
    with pytest.raises(StalledError, match="in 4 tries") as caught:
        start_ray(ray)
    assert len(ray.starts) == 4
    assert "session_latest/logs" in caught.value.hint


def test_another_error_is_raised_at_once() -> None:
    ray = Ray(ValueError("no such option"))
    with pytest.raises(ValueError, match="no such option"):
        start_ray(ray)
    assert len(ray.starts) == 1
