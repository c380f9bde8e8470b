"""Attention within the documents of packed rows, as causal slices without a dense mask.

Memory grows linearly with T. For the CPU, where PyTorch has no kernel for document masks with a backward pass. Every
document is one call of the fused causal kernel; in layers with a sliding window, a longer document is one call per
window of queries, which sees two windows of keys. Dropout needs the dense mask, because the fused kernel of the CPU has
none.

Shape legend: B rows, T positions, M = B x T, N query heads, K key/value heads, H head width, L positions of a document,
W positions of a window.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vorox.core.batch import Int32Array


@dataclass(frozen=True, slots=True)
class DocumentSlices:
    """The documents of a micro-batch.

    Attributes:
        lengths: Positions of every document and every run of padding, over all rows, concatenated.
        window_tokens: Positions that a position attends to, itself included; ``None``: all earlier ones.
    """

    lengths: tuple[int, ...]
    window_tokens: int | None = None


def find_lengths(segment_ids_BT: Int32Array) -> tuple[int, ...] | None:
    """Return the lengths of the documents of all rows; ``None`` if a document is not contiguous."""
    lengths: list[int] = []
    for segments_T in segment_ids_BT:
        edges = [0, *(np.flatnonzero(np.diff(segments_T)) + 1).tolist(), len(segments_T)]
        if len(np.unique(segments_T)) != len(edges) - 1:
            return None
        lengths += [end - start for start, end in itertools.pairwise(edges)]
    return tuple(lengths)


def attend_slices(query_BNTH: Tensor, key_BKTH: Tensor, value_BKTH: Tensor, slices: DocumentSlices) -> Tensor:
    """Return causal attention within documents, ``[B, N, T, H]``."""
    num_rows, num_heads, num_positions, _ = query_BNTH.shape
    lengths = list(slices.lengths)

    def documents(x_BXTH: Tensor) -> list[Tensor]:
        return [x_LXH.transpose(0, 1)[None] for x_LXH in x_BXTH.transpose(1, 2).flatten(0, 1).split(lengths)]

    pieces = zip(documents(query_BNTH), documents(key_BKTH), documents(value_BKTH), strict=True)
    mixed_MNH = torch.cat([_attend_document(query, key, value, slices) for query, key, value in pieces], 1)[0]
    return mixed_MNH.view(num_rows, num_positions, num_heads, -1).transpose(1, 2)


def _attend_document(query_1NLH: Tensor, key_1KLH: Tensor, value_1KLH: Tensor, slices: DocumentSlices) -> Tensor:
    """Return the mixed values of one document, ``[1, L, N, H]``."""
    window = slices.window_tokens
    if window is None or query_1NLH.shape[2] <= window:
        return _attend(query_1NLH, key_1KLH, value_1KLH, None)
    queries, keys, values = (x.split(window, dim=2) for x in (query_1NLH, key_1KLH, value_1KLH))
    position_W1, key_2W = torch.arange(window, 2 * window)[:, None], torch.arange(2 * window)
    is_visible_W2W = (key_2W <= position_W1) & (key_2W > position_W1 - window)
    # A mask of numbers: each call would convert and keep one of truth values by itself.
    mask_W2W = torch.zeros(window, 2 * window, dtype=query_1NLH.dtype).masked_fill_(~is_visible_W2W, -torch.inf)
    mixed = [_attend(queries[0], keys[0], values[0], None)]
    for index in range(1, len(queries)):
        size = queries[index].shape[2]
        near_keys, near_values = (torch.cat(x[index - 1 : index + 1], dim=2) for x in (keys, values))
        mixed.append(_attend(queries[index], near_keys, near_values, mask_W2W[:size, : window + size]))
    return torch.cat(mixed, dim=1)


def _attend(query_1NQH: Tensor, key_1KSH: Tensor, value_1KSH: Tensor, mask_QS: Tensor | None) -> Tensor:
    """Return ``[1, Q, N, H]``; causal without a mask."""
    return F.scaled_dot_product_attention(
        query_1NQH, key_1KSH, value_1KSH, attn_mask=mask_QS, is_causal=mask_QS is None,
        enable_gqa=query_1NQH.shape[1] != key_1KSH.shape[1],
    ).transpose(1, 2)  # fmt: skip
