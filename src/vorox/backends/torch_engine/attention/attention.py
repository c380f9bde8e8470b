"""Attention masks, rotary embeddings and attention kernels.

``sdpa`` is PyTorch's fused kernel, ``reference`` the plain formula. A dense mask is made only where the causal flag is
not enough: for rows of several documents, for sliding windows shorter than the row, and for several new tokens behind a
key/value cache. Training computes the first two without a mask where it can (``document_attention.py``).

Shape legend: B rows, T query positions, S key positions, N query heads, K key/value heads, H head width, X any heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vorox.backends.torch_engine.attention.ring_mask import RingMask
from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.device.document_attention import (
    DocumentOffsets,
    DocumentSlices,
    attend_slices,
    attend_varlen,
    find_lengths,
)
from vorox.core.batch import Int32Array
from vorox.core.user_code.extensions import load_function
from vorox.models.decoder.rotary import RopeScaling, scale_frequencies
from vorox.models.decoder.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Which keys each query may attend to.

    Attributes:
        dense: ``[B or 1, 1, T, S]``, true where a query may attend to a key; ``None`` for all keys or a causal mask.
        is_causal: Whether the mask is causal and nothing else.
        sliding: The mask of layers with a sliding window; ``None`` if it is the same.
        documents: The documents, for ``sdpa``, instead of a dense mask.
        ring: Documents and window, for ring attention, instead of a dense mask.
    """

    dense: Tensor | None
    is_causal: bool
    sliding: AttentionMask | None = None
    documents: DocumentSlices | DocumentOffsets | None = None
    ring: RingMask | None = None


CAUSAL = AttentionMask(None, True)
FULL = AttentionMask(None, False)

Attend = Callable[[Tensor, Tensor, Tensor, AttentionMask, float], Tensor]
"""(query_BNTH, key_BKSH, value_BKSH, attention_mask, dropout) -> mixed_BNTH."""


def document_mask(
    segment_ids_BT: Int32Array | None, device: torch.device, *, always_mask: bool = False
) -> AttentionMask:
    """Return a causal mask within documents, or ``CAUSAL`` if every row holds one document (and padding).

    Computed on the host.

    Args:
        segment_ids_BT: Document of each position, 0 for padding.
        device: Device of the mask.
        always_mask: Make a dense mask even where ``CAUSAL`` is enough, so that a compiled graph sees one kind of mask.
    """
    if segment_ids_BT is None:
        return CAUSAL
    if not always_mask and _has_one_document(segment_ids_BT):
        return CAUSAL
    num_positions = segment_ids_BT.shape[1]
    same_BTT = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    mask_BTT = same_BTT & np.tril(np.ones((num_positions, num_positions), np.bool_))
    return AttentionMask(to_device(mask_BTT[:, None], device), False)


def _has_one_document(segment_ids_BT: Int32Array) -> bool:
    """Whether every row holds one document, and padding behind it."""
    return bool(((segment_ids_BT == segment_ids_BT[:, :1]) | (segment_ids_BT == 0)).all())


def separated_mask(
    segment_ids_BT: Int32Array | None,
    shape_BT: tuple[int, ...],
    window_tokens: int | None,
    device: torch.device | None = None,
    *,
    always_mask: bool = False,
) -> AttentionMask | None:
    """Return what ``document_mask`` and ``add_window`` return, without a dense mask.

    Args:
        segment_ids_BT: Document of each position, 0 for padding.
        shape_BT: Rows and positions.
        window_tokens: Positions that a position attends to in sliding layers, itself included.
        device: For offsets on this device; ``None``: for slices.
        always_mask: Separate documents even where ``CAUSAL`` is enough, and sliding layers where no document is longer
            than the window, so that a compiled graph sees one kind of mask.

    Returns:
        The mask; ``None`` if a document is not contiguous.
    """
    num_rows, num_positions = shape_BT
    lengths: tuple[int, ...] | None = (num_positions,) * num_rows
    has_documents = False
    if segment_ids_BT is not None and not _has_one_document(segment_ids_BT):
        has_documents, lengths = True, find_lengths(segment_ids_BT)
        if lengths is None:
            return None
    has_window = window_tokens is not None and (always_mask or max(lengths) > window_tokens)
    separates = has_documents or (always_mask and segment_ids_BT is not None)
    if not separates and not has_window:
        return CAUSAL
    documents = DocumentSlices(lengths)
    if device is not None:
        documents = DocumentOffsets.of_lengths(lengths, num_positions, device)
    mask = AttentionMask(None, False, documents=documents) if separates else CAUSAL
    if not has_window:
        return mask
    return replace(mask, sliding=replace(FULL, documents=replace(documents, window_tokens=window_tokens)))


def ring_mask(segments_BT: Int32Array | None, window_tokens: int | None, device: torch.device) -> AttentionMask:
    """Return what ``document_mask`` and ``add_window`` return, for ring attention."""
    has_documents = segments_BT is not None and not _has_one_document(segments_BT)
    mask = RingMask.of_rows(segments_BT if has_documents else None, device)
    sliding = None
    if window_tokens is not None:
        sliding = AttentionMask(None, False, ring=replace(mask, window_tokens=window_tokens))
    return AttentionMask(None, False, sliding, ring=mask)


def decoding_mask(num_past: int, num_new: int, device: torch.device) -> AttentionMask:
    """Return the mask of new tokens behind ``num_past`` cached ones."""
    if num_past == 0:
        return CAUSAL
    if num_new == 1:
        return FULL
    query_T1 = torch.arange(num_past, num_past + num_new, device=device)[:, None]
    key_S = torch.arange(num_past + num_new, device=device)
    return AttentionMask((key_S <= query_T1)[None, None], False)


def add_window(
    mask: AttentionMask, window_tokens: int | None, num_past: int, num_new: int, device: torch.device
) -> AttentionMask:
    """Return a mask with the mask of sliding layers, where a row is longer than their window.

    Args:
        mask: The mask of full attention.
        window_tokens: Number of positions that a position attends to, itself included.
        num_past: Cached positions.
        num_new: Positions of the queries.
        device: Device of the mask.
    """
    num_keys = num_past + num_new
    is_complete = mask.documents is not None or mask.ring is not None or mask.sliding is not None
    if window_tokens is None or num_keys <= window_tokens or is_complete:
        return mask
    query_T1 = torch.arange(num_past, num_keys, device=device)[:, None]
    key_S = torch.arange(num_keys, device=device)
    visible = ((key_S <= query_T1) & (key_S > query_T1 - window_tokens))[None, None]
    visible = visible if mask.dense is None else visible & mask.dense
    return AttentionMask(mask.dense, mask.is_causal, AttentionMask(visible, False))


def rotary_tables(spec: DecoderSpec, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the rotary tables of a model: none, one, or one of full and one of sliding layers."""
    if spec.positions != "rope":
        return ()
    tables = [rotary_table(spec.rotary_dim, spec.max_positions_tokens, spec.rope_theta, spec.rope_scaling)]
    if spec.sliding_rope_theta is not None:
        tables.append(rotary_table(spec.rotary_dim, spec.max_positions_tokens, spec.sliding_rope_theta))
    return tuple((cosines.to(device), sines.to(device)) for cosines, sines in tables)


def rows_at(tables: tuple[Tensor, Tensor], positions: Tensor | None, here: slice) -> tuple[Tensor, Tensor]:
    """Return cosines and sines at the positions of tokens, or at consecutive ones, each ``[B or 1, T, 1, H / 2]``."""
    cosines, sines = (table[here][None] if positions is None else table[positions] for table in tables)
    return cosines[:, :, None], sines[:, :, None]


def rotary_table(
    rotary_dim: int, num_positions: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[positions, H / 2]`` in fp32, computed as in Hugging Face transformers."""
    frequencies = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
    scaled, factor = scale_frequencies(frequencies.numpy(), theta, scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), torch.from_numpy(scaled))
    return angles.cos() * factor, angles.sin() * factor


def sdpa(
    query_BNTH: Tensor, key_BKSH: Tensor, value_BKSH: Tensor, attention_mask: AttentionMask, dropout: float
) -> Tensor:
    """Compute attention with PyTorch's fused kernel."""
    documents = attention_mask.documents
    if documents is not None:
        assert dropout == 0
        if isinstance(documents, DocumentOffsets):
            return attend_varlen(query_BNTH, key_BKSH, value_BKSH, documents)
        return attend_slices(query_BNTH, key_BKSH, value_BKSH, documents)
    is_grouped = query_BNTH.shape[1] != key_BKSH.shape[1]
    is_flash = query_BNTH.is_cuda and attention_mask.dense is None and query_BNTH.dtype != torch.float32
    if is_grouped and not is_flash and query_BNTH.device.type != "cpu":
        # On accelerators, kernels for dense masks or fp32 need as many key heads as query heads.
        key_BKSH, value_BKSH = (_repeat_heads(x, query_BNTH.shape[1]) for x in (key_BKSH, value_BKSH))
        is_grouped = False
    return F.scaled_dot_product_attention(
        query_BNTH,
        key_BKSH,
        value_BKSH,
        attn_mask=attention_mask.dense,
        dropout_p=dropout,
        is_causal=attention_mask.is_causal,
        enable_gqa=is_grouped,
    )


def reference(
    query_BNTH: Tensor, key_BKSH: Tensor, value_BKSH: Tensor, attention_mask: AttentionMask, dropout: float
) -> Tensor:
    """Compute attention by the plain formula."""
    return weigh_values(
        query_BNTH, key_BKSH, value_BKSH, attention_mask, lambda weights: F.dropout(weights, dropout, dropout > 0)
    )


def attend_with_share(attend: Attend, index: int, size: int) -> Attend:
    """Return attention over one of ``size`` equal shares of the heads, with the dropout of one process.

    The mask of all heads is drawn on every rank, so that heads of different ranks differ and all generators stay in
    step. That takes the plain formula.
    """

    def run(
        query_BNTH: Tensor, key_BKSH: Tensor, value_BKSH: Tensor, attention_mask: AttentionMask, dropout: float
    ) -> Tensor:
        if dropout == 0:
            return attend(query_BNTH, key_BKSH, value_BKSH, attention_mask, 0.0)
        num_rows, num_heads, num_queries, _ = query_BNTH.shape
        shape = (num_rows, num_heads * size, num_queries, key_BKSH.shape[2])
        kept = F.dropout(query_BNTH.new_ones(shape), dropout).narrow(1, num_heads * index, num_heads)
        return weigh_values(query_BNTH, key_BKSH, value_BKSH, attention_mask, lambda weights: weights * kept)

    return run


def weigh_values(
    query_BNTH: Tensor,
    key_BKSH: Tensor,
    value_BKSH: Tensor,
    attention_mask: AttentionMask,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute attention by the plain formula; ``drop`` applies dropout to the weights ``[B, N, T, S]``."""
    num_heads, num_queries, head_dim = query_BNTH.shape[1:]
    num_keys = key_BKSH.shape[2]
    key_BNSH, value_BNSH = _repeat_heads(key_BKSH, num_heads), _repeat_heads(value_BKSH, num_heads)
    scores_BNTS = query_BNTH @ key_BNSH.transpose(-1, -2) / math.sqrt(head_dim)
    mask = attention_mask.dense
    if attention_mask.is_causal:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query_BNTH.device).tril()
    if mask is not None:
        scores_BNTS = scores_BNTS.masked_fill(~mask, float("-inf"))
    return drop(scores_BNTS.softmax(dim=-1).to(value_BNSH.dtype)) @ value_BNSH


def _repeat_heads(x_BKSH: Tensor, num_heads: int) -> Tensor:
    num_kv_heads = x_BKSH.shape[1]
    return x_BKSH if num_kv_heads == num_heads else x_BKSH.repeat_interleave(num_heads // num_kv_heads, dim=1)


ATTENTION: dict[str, Attend] = {"auto": sdpa, "sdpa": sdpa, "reference": reference}


def attention_kernel(name: str) -> Attend:
    """Return the kernel that ``model.attention_kernel`` names: a built-in one or a user function.

    A user function has the arguments of ``F.scaled_dot_product_attention``; keys have as many heads as queries.
    """
    if name in ATTENTION:
        return ATTENTION[name]
    function = load_function(name, kind="attention", where="model.attention_kernel")

    def attend(
        query_BNTH: Tensor, key_BKSH: Tensor, value_BKSH: Tensor, attention_mask: AttentionMask, dropout: float
    ) -> Tensor:
        key_BNSH, value_BNSH = (_repeat_heads(x, query_BNTH.shape[1]) for x in (key_BKSH, value_BKSH))
        return function(
            query_BNTH,
            key_BNSH,
            value_BNSH,
            attn_mask=attention_mask.dense,
            dropout_p=dropout,
            is_causal=attention_mask.is_causal,
        )

    return attend
