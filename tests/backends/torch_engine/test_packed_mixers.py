"""Mamba layers in transformers in packed rows.

The oracle is the forward pass of transformers on each document alone. In fp32, logits and gradients of packed rows
agree with it to 2e-5 of the largest value. Documents of a row that did not change have the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from backends.torch_engine.test_state_space import PACKED, documents, inputs
from backends.torch_engine.transformers_models import (
    DOCUMENTS,
    STATE_SPACE_MODELS,
    VOCAB,
    batch_of,
    engine_of,
    write_model,
)
from vorox.backends.torch_engine.layers.state_space import scan, selective_scan
from vorox.backends.torch_engine.networks.huggingface_network import HuggingFaceNetwork

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.hf]
TOLERANCE = 2e-5


def packed_logits(network: HuggingFaceNetwork, batch: Any) -> torch.Tensor:
    ((given, _),) = network._forward_passes(batch, 0)
    return network._forward(**given)[0].view(*batch.tokens_ABT[0].shape, -1)


def spans() -> list[tuple[int, int, int]]:
    """Row, start and end of each document."""
    return [
        (row, sum(lengths[:index]), sum(lengths[: index + 1]))
        for row, lengths in enumerate(DOCUMENTS)
        for index in range(len(lengths))
    ]


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


@pytest.mark.parametrize("name", STATE_SPACE_MODELS)
def test_packed_rows_equal_transformers_on_each_document_alone(name: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, name)
    engine = engine_of(directory)
    network = engine._network
    assert isinstance(network, HuggingFaceNetwork)
    assert network.separates_documents
    assert network.resets_states

    batch = batch_of(3)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    network.module.train()
    packed = packed_logits(network, batch)
    total, scale = torch.zeros(()), 0.0
    for row, start, end in spans():
        ids = torch.from_numpy(batch.tokens_ABT[0, row, start:end]).long()
        alone = oracle(input_ids=ids[None], use_cache=False).logits[0]
        scale = max(scale, float(alone.detach().abs().max()))
        assert float((packed[row, start:end] - alone).detach().abs().max()) <= TOLERANCE * scale
        total = total + loss_of(alone, ids)
    total.backward()
    result = engine.train_step(batch, lr=0.0, weight_decay=0.0).fetch()
    assert result.loss == pytest.approx(total.item() / batch.num_target_tokens, rel=1e-5)
    mine: Any = dict(network.module.named_parameters())
    packed_total = sum(
        (loss_of(packed[row, start:end], torch.from_numpy(batch.tokens_ABT[0, row, start:end]).long())
         for row, start, end in spans()), torch.zeros(())
    )  # fmt: skip
    names = [key for key, value in oracle.named_parameters() if value.grad is not None]
    found = torch.autograd.grad(packed_total, [mine[key] for key in names])
    largest = max(float(value.grad.abs().max()) for value in oracle.parameters() if value.grad is not None)
    for key, gradient in zip(names, found, strict=True):
        expected = oracle.get_parameter(key).grad
        assert expected is not None
        assert float((gradient - expected).abs().max()) <= TOLERANCE * largest, key


@pytest.mark.parametrize("name", STATE_SPACE_MODELS)
def test_other_documents_do_not_change_a_bit(name: str, tmp_path: Path) -> None:
    # a mixture of experts groups tokens by expert, so its rounding depends on all tokens of a batch
    layers = {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]} if name == "nemotron_h" else {}
    network = engine_of(write_model(tmp_path, name, **layers))._network
    assert isinstance(network, HuggingFaceNetwork)
    before, after = batch_of(0), batch_of(0)
    after.tokens_ABT[0, 0, :10] = (after.tokens_ABT[0, 0, :10] + 1) % VOCAB
    after.tokens_ABT[0, 2, 5:14] = (after.tokens_ABT[0, 2, 5:14] + 1) % VOCAB
    with torch.no_grad():
        first, second = (packed_logits(network, batch) for batch in (before, after))
    unchanged = [(0, 10, 24), (1, 0, 24), (2, 0, 5), (2, 14, 20)]
    for row, start, end in unchanged:
        assert torch.equal(first[row, start:end], second[row, start:end]), (row, start)
    assert float((first[0, :10] - second[0, :10]).abs().max()) > 0.01, "the comparison would be trivial"


def test_decays_of_other_documents_do_not_change_a_bit_of_the_scan() -> None:
    values = inputs(19, dtype=torch.float32)
    x, dt, a, b, c, d = values
    first, _ = scan(*values, chunk_tokens=8, documents_BT=PACKED, isolated=True)
    plain, _ = scan(*values, chunk_tokens=8, documents_BT=PACKED)
    assert torch.allclose(first, plain, rtol=0, atol=2e-6)
    dt = dt.clone()
    dt[0, 5:13] *= 300  # the third document; its states decay by far more than fp32 can represent
    second, _ = scan(x, dt, a, b, c, d, chunk_tokens=8, documents_BT=PACKED, isolated=True)
    assert bool(torch.isfinite(second).all())
    assert torch.equal(first[0, :5], second[0, :5])
    assert torch.equal(first[0, 13:], second[0, 13:])
    assert not torch.equal(first[0, 5:13], second[0, 5:13])


@pytest.mark.parametrize("lengths", [(9,), (4, 1, 4), (1, 1, 7)])
def test_selective_scan_is_the_recurrence(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, b, c = (torch.randn(1, 9, size, dtype=torch.float64) for size in (6, 3, 3))
    dt, a, d = torch.rand(1, 9, 6, dtype=torch.float64), -torch.rand(6, 3, dtype=torch.float64), torch.randn(6).double()
    found = selective_scan(x, dt, a, b, c, d, documents(lengths))
    position = 0
    for length in lengths:
        state = torch.zeros(6, 3, dtype=torch.float64)
        for t in range(position, position + length):
            state = torch.exp(dt[0, t, :, None] * a) * state + (dt[0, t] * x[0, t])[:, None] * b[0, t]
            assert torch.allclose(found[0, t], state @ c[0, t] + d * x[0, t], rtol=0, atol=1e-12)
        position += length


def test_a_hybrid_whose_attention_leaks_keeps_one_document_per_row(tmp_path: Path) -> None:
    network = engine_of(write_model(tmp_path, "granitemoehybrid"))._network
    assert isinstance(network, HuggingFaceNetwork)
    assert not network.separates_documents
    assert len(list(network._forward_passes(batch_of(0), 0))) > 1


def test_recomputed_blocks_reset_their_states_too(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "nemotron_h")
    norms = [
        engine_of(directory, *overrides).train_step(batch_of(1, micro_batches=2), lr=0.0, weight_decay=0.0).fetch()
        for overrides in ((), ("train.activation_checkpointing=block",))
    ]
    assert norms[1].grad_norm == pytest.approx(norms[0].grad_norm, rel=1e-6)


def test_rows_without_documents_are_computed_by_transformers(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "nemotron_h")
    engine = engine_of(directory)
    module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = np.random.default_rng(5).integers(0, VOCAB, (2, 24), np.int32)
    with torch.no_grad():
        expected = module(input_ids=torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
    np.testing.assert_array_equal(engine.logits(tokens), expected)
