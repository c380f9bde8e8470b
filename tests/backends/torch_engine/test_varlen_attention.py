"""Documents by the variable-length kernel, through PyTorch's own operator: a CPU gets a plain kernel for it here.

The kernel follows the documentation of ``torch.nn.attention.varlen``, one document at a time, in any precision. The
kernel of a GPU is compared with a dense mask in ``test_cuda.py``.

Shape legend: M positions of all rows, N query heads, K key/value heads, H head width, L positions of a document.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from backends.torch_engine.small_models import LLAMA, LR, QWEN3, engine_of, make, randomise
from backends.torch_engine.test_document_attention import ROWS, check_equals_a_dense_mask
from packed_rows import loss_of_documents, packed
from small_configurations import configuration
from vorox.backends.torch_engine.attention import attention
from vorox.backends.torch_engine.device import devices, document_attention

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
WINDOWS = {"sliding_window_tokens": 4, "layer_types": ("sliding_attention", "full_attention")}


def weights(query_MNH: Tensor, key_MNH: Tensor, start: int, end: int, window: list[int], scale: float) -> Tensor:
    """The softmax of one document, ``[N, L, L]``."""
    assert query_MNH.shape[2] % 8 == 0, "the kernel refuses others"
    distance_LL = torch.arange(end - start)[:, None] - torch.arange(end - start)
    is_visible_LL = distance_LL >= -window[1]
    if window[0] >= 0:
        is_visible_LL &= distance_LL <= window[0]
    scores_NLL = torch.einsum("inh,jnh->nij", query_MNH[start:end], key_MNH[start:end]) * scale
    return scores_NLL.masked_fill(~is_visible_LL, -torch.inf).softmax(-1)


def forward(query_MNH: Tensor, key_MKH: Tensor, value_MKH: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num_groups, scale, window = query_MNH.shape[1] // key_MKH.shape[1], rest[4], rest[5]
    key_MNH, value_MNH = (x.repeat_interleave(num_groups, 1) for x in (key_MKH, value_MKH))
    mixed_MNH = torch.empty_like(query_MNH)
    for start, end in itertools.pairwise(offsets.tolist()):
        weights_NLL = weights(query_MNH, key_MNH, start, end, window, scale)
        mixed_MNH[start:end] = torch.einsum("nij,jnh->inh", weights_NLL, value_MNH[start:end])
    return mixed_MNH, torch.zeros(query_MNH.shape[1], len(query_MNH)), torch.zeros(2, dtype=torch.uint64)


def backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The derivatives written out, because autograd is not active inside an operator."""
    num_groups, offsets, scale, window = query.shape[1] // key.shape[1], rest[2], rest[-2], rest[-1]
    keys, values = (x.repeat_interleave(num_groups, 1) for x in (key, value))
    for_query, for_keys, for_values = (torch.empty_like(query) for _ in range(3))
    for start, end in itertools.pairwise(offsets.tolist()):
        here = slice(start, end)
        weights_NLL = weights(query, keys, start, end, window, scale)
        for_weights_NLL = torch.einsum("inh,jnh->nij", gradient[here], values[here])
        for_scores_NLL = weights_NLL * (for_weights_NLL - (for_weights_NLL * weights_NLL).sum(-1, keepdim=True))
        for_scores_NLL = for_scores_NLL * scale
        for_values[here] = torch.einsum("nij,inh->jnh", weights_NLL, gradient[here])
        for_query[here] = torch.einsum("nij,jnh->inh", for_scores_NLL, keys[here])
        for_keys[here] = torch.einsum("nij,inh->jnh", for_scores_NLL, query[here])
    grouped = (*key.shape[:2], num_groups, key.shape[2])
    return for_query, for_keys.view(grouped).sum(2), for_values.view(grouped).sum(2)


@pytest.fixture(autouse=True, scope="module")
def _kernel() -> None:
    """Give the operators a kernel for the CPU."""
    assert not document_attention._has_varlen(CPU, torch.bfloat16), "a CPU has no kernel of its own"
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


@pytest.fixture
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the kernel on this CPU."""
    monkeypatch.setattr(devices, "available_attention", lambda device, dtype: "varlen")


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 3, 7, 20])
@pytest.mark.parametrize("always_mask", [False, True])
def test_equals_a_dense_mask(window: int | None, kv_heads: int, always_mask: bool) -> None:
    mask = attention.separated_mask(ROWS, ROWS.shape, window, CPU, always_mask=always_mask)
    assert mask is not None
    for given in (mask, mask.sliding or mask):
        assert isinstance(given.documents, document_attention.DocumentOffsets)
    check_equals_a_dense_mask(mask, window, kv_heads)


def test_the_kinds_of_masks_of_a_compiled_graph() -> None:
    """One document in each row and several give the same fields and shapes; without documents there is no mask."""
    one = np.ones((2, 16), np.int32)
    for window in (None, 3):
        masks = [attention.separated_mask(rows, (2, 16), window, CPU, always_mask=True) for rows in (one, ROWS)]
        shapes: list[Any] = []
        for mask in masks:
            assert mask is not None
            for part in (mask, mask.sliding):
                found = None if part is None else part.documents
                assert found is None or isinstance(found, document_attention.DocumentOffsets)
                shapes.append(found and (found.offsets.shape, found.max_tokens, found.window_tokens))
        assert shapes[:2] == shapes[2:]
    assert attention.separated_mask(None, (2, 16), None, CPU, always_mask=True) is attention.CAUSAL
    assert attention.separated_mask(one, (2, 16), None, CPU) is attention.CAUSAL
    assert attention.separated_mask(np.array([[1, 2, 1]], np.int32), (1, 3), None, CPU) is None


@pytest.mark.usefixtures("_chosen")
@pytest.mark.parametrize(
    "model", [LLAMA | {"num_kv_heads": 2}, LLAMA | WINDOWS, QWEN3], ids=["grouped", "windows", "heads of 12"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_trains_on_documents(model: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first loss is that of the documents alone in numpy, later ones those of dense masks; here none is made."""
    plain = make(model, precision__dtype=dtype)
    plain.adopt_environment({"engine": "torch", "document_attention": "mask"})
    engine = make(model, precision__dtype=dtype)
    assert engine.environment()["document_attention"] == "varlen"
    tolerance = 1e-5 if dtype == "fp32" else 0.01
    expected = loss_of_documents(engine._spec, randomise(engine), packed())
    randomise(plain)
    losses = [plain.train_step(packed(step), lr=LR, weight_decay=0.1).fetch().loss for step in range(3)]
    assert losses[0] == pytest.approx(expected, rel=tolerance)

    def dense(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a dense mask")

    monkeypatch.setattr(attention, "document_mask", dense)
    found = [engine.train_step(packed(step), lr=LR, weight_decay=0.1).fetch().loss for step in range(3)]
    assert found[0] == pytest.approx(expected, rel=tolerance)
    assert found == pytest.approx(losses, rel=tolerance)


@pytest.mark.usefixtures("_chosen")
def test_a_resume_keeps_the_masks_of_its_run() -> None:
    engine = engine_of(configuration(LLAMA))
    new = dict(engine.environment())
    for recorded, expected in (("mask", "mask"), ("slices", "mask"), ("varlen", "varlen")):
        engine.adopt_environment({**new, "document_attention": recorded})
        assert engine.environment()["document_attention"] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("_chosen")
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
@pytest.mark.parametrize("model", [LLAMA, LLAMA | WINDOWS | {"num_kv_heads": 2}], ids=["full", "windows"])
def test_compiled(model: dict[str, Any]) -> None:
    """The compiled engine computes the same and compiles a graph for each kind of layer and one for the loss."""
    import torch._dynamo.utils  # takes seconds, and only this test needs it

    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plain, compiled = make(model), make(model, runtime__compile=True)
    for step in range(3):
        losses = [one.train_step(packed(step), lr=LR, weight_decay=0.1).fetch().loss for one in (compiled, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    kinds = len(set(model.get("layer_types", ("full_attention",))))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == kinds + 1
    torch._dynamo.reset()
