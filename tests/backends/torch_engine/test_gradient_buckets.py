"""Replicas sum gradients in buckets within the last backward pass of a step, once, in a fixed order.

A sum of two equal ranks, which doubles a bucket in place, is the all-reduce. The oracle is twice the gradients of an
engine without buckets: a sum that starts before a gradient is complete, or twice, gives other numbers. Sums over real
ranks are in ``ranks/test_overlapped_sums.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends.torch_engine import transformers_models
from backends.torch_engine.small_models import GPT2, LLAMA, batch_of, make, random_rows
from small_configurations import HYBRID
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.layouts import gradient_buckets
from vorox.backends.torch_engine.layouts.gradient_buckets import GradientBuckets
from vorox.backends.torch_engine.layouts.parameters import FlatParameters
from vorox.core.batch import Batch
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch
SMALL = 2048
EXPERTS = LLAMA | {"num_experts": 4, "tie_embeddings": False}


class Doubling:
    """The sum of two equal ranks; ``events`` are starts of sums and waits, and ends of backward passes."""

    def __init__(self, engine: TorchEngine, bucket_bytes: int = SMALL) -> None:
        parameters = engine.parameters
        assert isinstance(parameters, FlatParameters)
        self.events: list[str] = []
        self.untouched: list[int] = []
        self._gradients = [buffer for (buffer,) in parameters.gradients.values()]
        engine._buckets = self.buckets = GradientBuckets(parameters, self._start, bucket_bytes)
        backward: Callable[..., None] = parameters.backward

        def recorded(*arguments: Any) -> None:
            backward(*arguments)
            self.events.append("backward")

        parameters.backward = recorded  # type: ignore[method-assign]

    def _start(self, gradients: Tensor) -> Doubling:
        (number,) = [
            number for number, bucket in enumerate(self.buckets.buckets)
            if bucket.gradients.data_ptr() == gradients.data_ptr()
        ]  # fmt: skip
        self.events.append(f"start {number}")
        self.untouched.append(sum(int((buffer == 0).sum()) for buffer in self._gradients))
        gradients.mul_(2)
        return self

    def wait(self) -> None:
        self.events.append("wait")


def gradients_of(engine: TorchEngine, batch: Batch) -> list[Tensor]:
    engine._train_micro_batches(batch, batch.num_target_tokens, None)
    return [buffer.clone() for (buffer,) in engine.parameters.gradients.values()]


def assert_overlap(make_engine: Callable[[], TorchEngine], batch: Batch) -> None:
    """The sums are right, and each bucket starts once, in order, and before the last backward pass ends."""
    single, engine = make_engine(), make_engine()
    doubling = Doubling(engine)
    expected, found = gradients_of(single, batch), gradients_of(engine, batch)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, 2 * theirs)
    count, passes = len(doubling.buckets.buckets), len(batch.tokens_ABT)
    assert count > 3
    starts = [f"start {number}" for number in range(count)]
    assert doubling.events[: passes - 1] == ["backward"] * (passes - 1), "earlier micro-batches communicate nothing"
    assert doubling.events[passes - 1 :] == [*starts, "backward", *["wait"] * count]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (LLAMA | {"tie_embeddings": False}, {}),
        (GPT2, {}),
        (LLAMA, {"train__activation_checkpointing": "block"}),
        (GPT2, {"train__activation_checkpointing": "dots"}),
        (LLAMA, {"precision__dtype": "bf16", "optimizer__name": "muon"}),
        (EXPERTS, {"loss__load_balancing_weight": 0.1}),
        (EXPERTS, {"precision__dtype": "bf16", "train__activation_checkpointing": "block"}),
        (HYBRID, {}),
    ],
    ids=["untied", "tied", "recomputed", "kept products", "bf16", "experts", "experts, bf16", "hybrid"],
)
def test_sums_start_within_the_last_backward_pass(model: dict[str, Any], settings: dict[str, Any]) -> None:
    assert_overlap(lambda: make(model, **settings), batch_of(random_rows(6), 3))
    engine = make(model, **settings)
    doubling = Doubling(engine)
    gradients_of(engine, batch_of(random_rows(6)))
    assert doubling.untouched[0] > doubling.untouched[-1], "the first sum starts while gradients are incomplete"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_compiled_blocks() -> None:
    torch._dynamo.reset()
    settings = {"runtime__compile": True, "train__activation_checkpointing": "block"}
    assert_overlap(lambda: make(LLAMA | {"tie_embeddings": False}, **settings), batch_of(random_rows(6), 3))
    torch._dynamo.reset()


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba", "bloom"])
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    """If documents are rows of their own, a micro-batch has several backward passes, and sums start after the last."""
    pytest.importorskip("transformers")
    model = transformers_models.write_model(tmp_path / "model", name)

    batch = transformers_models.batch_of(0)
    if name != "bloom":
        assert_overlap(lambda: transformers_models.engine_of(model), batch)
        return
    engine = transformers_models.engine_of(model)
    doubling = Doubling(engine)
    expected, found = gradients_of(transformers_models.engine_of(model), batch), gradients_of(engine, batch)
    assert all(torch.equal(mine, 2 * theirs) for mine, theirs in zip(found, expected, strict=True))
    last_pass = len(doubling.events) - doubling.events[::-1].index("backward")
    assert last_pass > 1
    assert set(doubling.events[:last_pass]) == {"backward"}


def test_buckets_cover_every_gradient_once_and_end_with_the_first_layer() -> None:
    engine = make(LLAMA | {"tie_embeddings": False}, optimizer__name="muon")
    parameters = engine.parameters
    assert isinstance(parameters, FlatParameters)
    for size in (1, SMALL, 1 << 30):
        buckets = gradient_buckets.cut(parameters, size)
        for bucket in buckets:
            bucket.gradients.add_(1)
        assert all(bool((buffer == 1).all()) for (buffer,) in parameters.gradients.values())
        parameters.zero_gradients()
        names = [name for bucket in buckets for name in bucket.names]
        assert sorted(names) == sorted(parameters.modules)
        places = [list(parameters.modules).index(bucket.names[0]) for bucket in buckets]
        assert places == sorted(places, reverse=True)
    assert len(gradient_buckets.cut(parameters, 1)) == len(parameters.modules)
    assert len(gradient_buckets.cut(parameters, 1 << 30)) == len(parameters.gradients)


def test_a_gradient_that_nobody_computes_is_summed_after_the_backward_pass() -> None:
    """The order stays that of the other ranks, where the gradient may exist."""
    engine = make(LLAMA | {"tie_embeddings": False})
    doubling = Doubling(engine, bucket_bytes=1)
    last = doubling.buckets.buckets[0].names[0]
    doubling.buckets.open(overlaps=True)
    for bucket in doubling.buckets.buckets:
        for name in bucket.names:
            if name != last:
                doubling.buckets._complete(name)
    assert doubling.events == []
    doubling.buckets.finish()
    count = len(doubling.buckets.buckets)
    assert doubling.events == [f"start {number}" for number in range(count)] + ["wait"] * count


def test_a_gradient_that_grows_after_its_sum_is_refused() -> None:
    """As with checkpoints of PyTorch that run a backward pass of their own for each block, if blocks share weights."""
    engine = make(LLAMA | {"tie_embeddings": False})
    doubling = Doubling(engine)
    weight: nn.Parameter = engine.parameters.modules["final_norm.weight"]
    doubling.buckets.open(overlaps=True)
    weight.sum().backward()
    with pytest.raises(ConfigError, match=r"gradient of final_norm\.weight more than once"):
        weight.sum().backward()
    doubling.buckets.open(overlaps=True)
    weight.sum().backward()  # another step


def test_a_single_process_has_no_buckets() -> None:
    assert make(LLAMA)._buckets is None
