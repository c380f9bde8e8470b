"""A block as one autograd function gives the bits of its modules, and is used exactly where it has all their parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_engine.small_models import GPT2, LLAMA, LR, MODELS, batch_of, make, random_rows, randomise
from conformance.engines import packed_batch
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.layers import direct_block
from vorox.core.batch import Batch

pytestmark = pytest.mark.torch
DIRECT_LAYERS = {
    "gpt2": 2, "gpt2 exact gelu, untied": 2, "gpt2 no biases": 2, "llama": 2, "llama geglu, learned positions": 2,
    "llama layer norm": 2, "llama grouped, untied": 2, "llama multi-query, biases": 2, "phi3": 2,
    "qwen2, some windows": 1,
}  # fmt: skip
"""Layers of ``MODELS`` that run directly; the others have experts, norms of queries, windows or other activations."""


@pytest.fixture
def direct_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every block that ran as one function."""
    calls: list[str] = []
    function = direct_block.DirectBlock

    class Counted:
        @staticmethod
        def apply(*arguments: Any) -> Any:
            calls.append("direct")
            return function.apply(*arguments)

    monkeypatch.setattr(direct_block, "DirectBlock", Counted)
    return calls


def trained(batches: list[Batch], *, directly: bool, model: dict[str, Any], **overrides: Any) -> list[np.ndarray]:
    """Loss and gradient norm of each step and all weights and gradients after the last one."""
    engine = make(model, **overrides)
    randomise(engine)
    if not directly:
        engine._network._run_block = None  # pyright: ignore[reportAttributeAccessIssue]
    values = [engine.train_step(batch, lr=LR, weight_decay=0.1).fetch() for batch in batches]
    gradients = engine.parameters.whole(engine.parameters.gradients)
    return [
        np.array([[step.loss, step.grad_norm] for step in values]),
        *(array for _, array in engine.export_weights()),
        *(view.numpy() for _, view in gradients),
    ]


def assert_same_bits(batches: list[Batch], model: dict[str, Any], **overrides: Any) -> None:
    ours = trained(batches, directly=True, model=model, **overrides)
    theirs = trained(batches, directly=False, model=model, **overrides)
    assert all(np.array_equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_bit_is_that_of_the_modules(name: str, direct_calls: list[str]) -> None:
    batches = [batch_of(random_rows(8, step), micro_batches=2, step=step) for step in range(3)]
    assert_same_bits(batches, MODELS[name])
    assert len(direct_calls) == DIRECT_LAYERS.get(name, 0) * 3 * 2


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_rows_of_one_document_run_directly_and_others_do_not(model: dict[str, Any], direct_calls: list[str]) -> None:
    documents = [np.arange(3, 9, dtype=np.int32), np.arange(5, 10, dtype=np.int32)]
    assert_same_bits([packed_batch(documents)], model)
    assert not direct_calls
    assert_same_bits([packed_batch(documents[:1])], model)
    assert len(direct_calls) == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model__dropout_fraction", 0.1), ("model__attention_kernel", "reference"),
        ("train__activation_checkpointing", "block"), ("train__activation_checkpointing", "dots"),
        ("train__quantization_aware", "int8-dynamic"), ("log__activation_statistics", True),
        ("precision__dtype", "bf16"),
    ],
)  # fmt: skip
def test_settings_with_more_parts_run_the_modules(setting: str, value: object, direct_calls: list[str]) -> None:
    engine = make(GPT2, **{setting: value})
    engine.train_step(batch_of(random_rows(8)), lr=LR, weight_decay=0.1).fetch()
    assert not direct_calls


def test_taps_and_hooks_are_called(direct_calls: list[str]) -> None:
    engine, seen = make(GPT2), list[str]()

    def step() -> int:
        direct_calls.clear()
        engine.train_step(batch_of(random_rows(8)), lr=LR, weight_decay=0.1).fetch()
        return len(direct_calls)

    assert step() == 2
    detach = engine.taps.attach("after_mlp", 0, lambda _: seen.append("tap"))
    assert (step(), seen) == (0, ["tap"])
    detach()
    handle = engine.model.get_submodule("blocks.1.mlp.up").register_forward_hook(lambda *_: seen.append("hook"))
    assert (step(), seen) == (1, ["tap", "hook"])
    handle.remove()
    assert step() == 2


def test_frozen_parameters_get_no_gradient(direct_calls: list[str]) -> None:
    def gradients(engine: TorchEngine, names: set[str]) -> dict[str, torch.Tensor]:
        for name, parameter in engine.model.named_parameters():
            parameter.requires_grad_(name not in names)
        engine.parameters.zero_gradients()
        engine._train_micro_batch(batch_of(random_rows(8)), 0, 1, None)
        return {name: view.clone() for name, view in engine.parameters.whole(engine.parameters.gradients)}

    engine, frozen = make(GPT2), {"blocks.0.attention_norm.weight", "blocks.1.mlp.up.weight", "blocks.1.mlp_norm.bias"}
    whole, part = gradients(engine, set()), gradients(engine, frozen)
    assert len(direct_calls) == 4
    for name, gradient in part.items():
        assert torch.equal(gradient, torch.zeros_like(gradient) if name in frozen else whole[name]), name


def test_hooks_of_parameters_see_their_gradients(direct_calls: list[str]) -> None:
    engine, seen = make(GPT2), list[torch.Size]()
    weight = engine.model.get_parameter("blocks.0.mlp_norm.weight")
    weight.register_hook(lambda gradient: seen.append(gradient.shape))
    engine.train_step(batch_of(random_rows(8)), lr=LR, weight_decay=0.1).fetch()
    assert (seen, len(direct_calls)) == ([weight.shape], 1)


def test_a_second_backward_pass_is_refused(direct_calls: list[str]) -> None:
    engine = make(GPT2)
    tokens_M, context = engine._network._inputs(batch_of(random_rows(8)), 0, is_training=True)
    hidden_MD = engine._network._forward(tokens_M, context, lambda hidden_MD, _: hidden_MD, engine._network._run_block)
    hidden_MD.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        hidden_MD.sum().backward()
    assert len(direct_calls) == 2
