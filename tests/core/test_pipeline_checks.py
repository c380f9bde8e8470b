"""Configurations of a pipeline that are refused, and the micro-batches that fill one."""

from __future__ import annotations

from typing import Any

import pytest

from small_configurations import configuration
from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.config.checks.parallel import layers_fault, micro_batches_fault
from vorox.core.schema import RunConfig
from vorox.core.schema.runtime import ParallelConfig


def config_of(model: dict[str, Any] | None = None, **settings: Any) -> RunConfig:
    """A pipeline of two with four layers, and two rows in each of four micro-batches."""
    defaults = {"train__micro_batch_sequences": 2, "parallel__pipeline_parallel_size": 2}
    return configuration({"num_layers": 4, **(model or {})}, **(defaults | settings))


def named_keys(config: RunConfig) -> set[str]:
    return {key for problem in find_problems(config) for key in problem.keys}


def test_a_pipeline_that_fits_has_no_problem() -> None:
    assert "parallel.pipeline_parallel_size" not in named_keys(config_of())
    for schedule in ("1f1b", "interleaved", "zero_bubble"):
        assert "parallel.pipeline_parallel_size" not in named_keys(config_of(parallel__pipeline_schedule=schedule))
        sharded = config_of(train__micro_batch_sequences=1, parallel__fsdp_size=2, parallel__pipeline_schedule=schedule)
        assert "parallel.pipeline_parallel_size" not in named_keys(sharded)
    for model in ({}, {"kind": "huggingface", "name_or_path": "x"}):
        for size in (1, 2):
            found = named_keys(config_of(model, parallel__tensor_parallel_size=size))
            assert "parallel.pipeline_parallel_size" not in found


@pytest.mark.parametrize(
    "config",
    [
        config_of(runtime__compile=True), config_of(optimizer__name="adamw_8bit"),
        config_of(train__forward_backward="step.py:run"), config_of(runtime__determinism="bitwise-any-world"),
        config_of({"kind": "model.py:build"}), config_of({"dropout_fraction": 0.1}),
        config_of({"block": "block.py:Block"}), config_of({"num_experts": 4}),
    ],
    ids=["compile", "8-bit", "step", "any world", "user model", "dropout", "block", "experts"],
)  # fmt: skip
def test_what_a_pipeline_does_not_support_is_refused(config: RunConfig) -> None:
    assert "parallel.pipeline_parallel_size" in named_keys(config)
    alone = config.parallel.model_copy(update={"pipeline_parallel_size": 1})
    assert "parallel.pipeline_parallel_size" not in named_keys(config.model_copy(update={"parallel": alone}))


def test_too_many_stages_for_the_layers_are_refused() -> None:
    config = config_of(parallel__pipeline_schedule="interleaved")
    assert layers_fault(config, 4) == ""
    assert layers_fault(config, 3) == (
        "3 layers cannot be divided into 2 x 2 stages (parallel.pipeline_parallel_size=2); set "
        "parallel.pipeline_parallel_size=1, or parallel.pipeline_schedule=1f1b"
    )
    assert "set parallel.pipeline_parallel_size=4 or less" in layers_fault(
        config_of(parallel__pipeline_parallel_size=8), 4
    )


def test_a_batch_that_does_not_fill_the_pipeline_is_refused() -> None:
    assert micro_batches_fault(config_of(), 1) == ""
    assert "needs at least 2; set train.micro_batch_sequences=4" in micro_batches_fault(
        config_of(train__micro_batch_sequences=8), 1
    )
    whole = config_of(parallel__data_parallel_size=8)
    assert "1 micro-batch of 2 rows for each replica" in micro_batches_fault(whole, 8)
    assert "set train.global_batch_sequences=32" in micro_batches_fault(whole, 8)
    uneven = config_of(parallel__pipeline_schedule="interleaved", train__global_batch_sequences=6)
    assert "needs a multiple of 2; set train.micro_batch_sequences=3" in micro_batches_fault(uneven, 1)
    assert "parallel.pipeline_parallel_size" in named_keys(uneven)
    for rows, is_filled in ((4, True), (2, False)):
        staged = config_of(train__batch_stages=[{"start_step": 5, "global_batch_sequences": rows}])
        assert ("parallel.pipeline_parallel_size" not in named_keys(staged)) == is_filled


def test_auto_chooses_micro_batches_that_fill_the_pipeline() -> None:
    """Eight rows on each of two replicas: four micro-batches at the largest limit that leaves so many."""
    parallel = ParallelConfig(pipeline_parallel_size=4)
    assert parallel.micro_batch_sequences(8, 16, 2) == 2
    assert parallel.num_micro_batches(8, 16, 2) == 4
    assert ParallelConfig().micro_batch_sequences(8, 16, 2) == 8
    assert parallel.num_devices == 4
    assert parallel.data_parallel_size_on(8) == 2
