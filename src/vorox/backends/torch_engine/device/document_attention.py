"""Attention within the documents of packed rows without a dense mask.

Memory grows linearly with T.

- ``varlen``: one call of FlashAttention's variable-length kernel (Dao, arXiv 2307.08691), on GPUs in half precision.
- ``slices``: for the CPU, which has no kernel for document masks with a backward pass. Every document is one call of
  the fused causal kernel; in layers with a sliding window, a longer document is one call per window of queries, which
  sees two windows of keys.

Neither has dropout; that needs the dense mask.

Shape legend: B rows, T positions, M = B x T, N query heads, K key/value heads, X any heads, H head width, L positions
of a document, W positions of a window, D documents.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.core.batch import Int32Array
from vorox.models.decoder.document_separation import DocumentAttention

VARLEN_HEAD_MULTIPLE = 8
"""The kernel needs heads of a multiple of so many elements; others are filled with zeros."""


@dataclass(frozen=True, slots=True)
class DocumentSlices:
    """The documents of a micro-batch.

    Attributes:
        lengths: Positions of every document and every run of padding, over all rows, concatenated.
        window_tokens: Positions that a position attends to, itself included; ``None``: all earlier ones.
    """

    lengths: tuple[int, ...]
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DocumentOffsets:
    """The documents of a micro-batch, for the variable-length kernel.

    Attributes:
        offsets: int32 ``[D + 1]`` on the device: the first of the M positions of each document, and M.
        max_tokens: At least the length of the longest document.
        window_tokens: Positions that a position attends to, itself included; ``None``: all earlier ones.
    """

    offsets: Tensor
    max_tokens: int
    window_tokens: int | None = None

    @staticmethod
    def of_lengths(lengths: tuple[int, ...], max_tokens: int, device: torch.device) -> DocumentOffsets:
        """Return the offsets, filled with empty documents to a power of two, so that compiled graphs see few shapes."""
        num_documents = max(16, 1 << (len(lengths) - 1).bit_length())
        offsets = np.full(num_documents + 1, sum(lengths), np.int32)
        offsets[: len(lengths) + 1] = [0, *itertools.accumulate(lengths)]
        return DocumentOffsets(to_device(offsets, device), max_tokens)


def available_attention(device: torch.device, dtype: torch.dtype) -> DocumentAttention:
    """Return how a device separates documents best: what its kernels support."""
    if device.type == "cpu":
        return "slices"
    return "varlen" if device.type == "cuda" and _has_varlen(device, dtype) else "mask"


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs here, forward and backward: that depends on GPU, precision and version of PyTorch."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    x_1N8H = torch.zeros(1, 2, 8, 64, dtype=dtype, device=device, requires_grad=True)
    documents = DocumentOffsets.of_lengths((3, 5), 8, device)
    try:
        attend_varlen(x_1N8H, x_1N8H[:, :1], x_1N8H[:, :1], documents).sum().backward()
    except (ImportError, TypeError, NotImplementedError, RuntimeError):
        return False
    return True


def find_lengths(segment_ids_BT: Int32Array) -> tuple[int, ...] | None:
    """Return the lengths of the documents of all rows; ``None`` if a document is not contiguous."""
    lengths: list[int] = []
    for segments_T in segment_ids_BT:
        edges = [0, *(np.flatnonzero(np.diff(segments_T)) + 1).tolist(), len(segments_T)]
        if len(np.unique(segments_T)) != len(edges) - 1:
            return None
        lengths += [end - start for start, end in itertools.pairwise(edges)]
    return tuple(lengths)


def attend_varlen(query_BNTH: Tensor, key_BKTH: Tensor, value_BKTH: Tensor, documents: DocumentOffsets) -> Tensor:
    """Return causal attention within documents, ``[B, N, T, H]``, in the precision of the values."""
    from torch.nn.attention.varlen import varlen_attn  # takes a second to import

    num_rows, num_heads, num_positions, head_dim = query_BNTH.shape
    options: dict[str, Any] = {}
    if num_heads != key_BKTH.shape[1]:
        if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
            options["enable_gqa"] = True
        else:  # PyTorch 2.11
            num_groups = num_heads // key_BKTH.shape[1]
            key_BKTH, value_BKTH = (x.repeat_interleave(num_groups, dim=1) for x in (key_BKTH, value_BKTH))

    def joined(x_BXTH: Tensor) -> Tensor:
        """Return ``[M, X, H]`` in one precision, since rotated queries are fp32 under autocast, with H as needed."""
        x_MXH = x_BXTH.to(value_BKTH.dtype).transpose(1, 2).flatten(0, 1)
        return F.pad(x_MXH, (0, padding)) if padding else x_MXH

    offsets, longest, window = documents.offsets, documents.max_tokens, documents.window_tokens
    padding = -head_dim % VARLEN_HEAD_MULTIPLE
    mixed_MNH = varlen_attn(
        joined(query_BNTH), joined(key_BKTH), joined(value_BKTH), offsets, offsets, longest, longest,
        scale=head_dim**-0.5, window_size=(-1 if window is None else window - 1, 0), **options,
    )  # fmt: skip
    assert isinstance(mixed_MNH, Tensor)
    return mixed_MNH[..., :head_dim].view(num_rows, num_positions, num_heads, head_dim).transpose(1, 2)


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
