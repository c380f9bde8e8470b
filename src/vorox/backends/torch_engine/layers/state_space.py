"""State-space layers of Mamba-2 (Dao and Gu, arXiv 2405.21060): the scan and its causal convolution.

Each head keeps a state, a matrix ``[H, S]``, that starts at zero in every document of a packed row:

    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t        y_t = state_t C_t + D x_t

``scan`` computes all positions. Within a chunk of Q positions it multiplies matrices, as attention does; between chunks
it carries the state. The result does not depend on the chunk, up to rounding. States and sums are fp32, or fp64 for
fp64 inputs, in any compute precision. On CUDA, the kernels of ``mamba_ssm`` and ``causal_conv1d`` replace it if they
are installed and determinism is not required.

Shape legend: B rows, T positions, C chunks, Q positions of a chunk, N heads, G groups, R = N / G heads of a group,
H head width, S state size, E channels of the convolution, K its taps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vorox.models.decoder.mamba import conv_channels
from vorox.models.decoder.spec import DecoderSpec


@dataclass(slots=True)
class MambaState:
    """What a layer remembers of earlier tokens.

    Attributes:
        inputs_BKE: Inputs of the convolution at the last K - 1 positions.
        state_BNHS: States of the heads, fp32.
    """

    inputs_BKE: Tensor
    state_BNHS: Tensor

    @classmethod
    def zeros(cls, spec: DecoderSpec, batch_size: int, device: torch.device, dtype: torch.dtype) -> MambaState:
        """Return the state before the first token."""
        assert spec.mamba_num_heads is not None
        taps, channels = spec.mamba_conv_tokens - 1, conv_channels(spec)
        shape = (batch_size, spec.mamba_num_heads, spec.mamba_head_dim, spec.mamba_state_size)
        return cls(
            torch.zeros((batch_size, taps, channels), device=device, dtype=dtype), torch.zeros(shape, device=device)
        )


def scan(
    x_BTNH: Tensor,
    dt_BTN: Tensor,
    a_N: Tensor,
    b_BTGS: Tensor,
    c_BTGS: Tensor,
    d_N: Tensor,
    *,
    chunk_tokens: int,
    documents_BT: Tensor | None = None,
    initial_BNHS: Tensor | None = None,
    isolated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[B, T, N, H]`` and the state behind the last position, ``[B, N, H, S]``.

    Args:
        x_BTNH: Inputs of the heads.
        dt_BTN: Time steps, positive.
        a_N: Decay rate of each head, negative.
        b_BTGS: What an input adds to the state; the heads of a group share it.
        c_BTGS: What is read from the state.
        d_N: Factor of the input in the output.
        chunk_tokens: Positions of a chunk.
        documents_BT: Number of the document of each position; the state starts at zero where it changes.
        initial_BNHS: State before the first position; zero by default.
        isolated: Sum decays within documents instead of chunks, so that not even rounding depends on other documents.
            The native decoder sums within chunks, and its runs keep their bits.
    """
    kernel = _kernel("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", x_BTNH)
    if kernel is not None:
        return kernel(
            x_BTNH, dt_BTN, a_N, b_BTGS, c_BTGS, chunk_size=chunk_tokens, D=d_N, initial_states=initial_BNHS,
            seq_idx=None if documents_BT is None else documents_BT.int(), return_final_states=True,
        )  # fmt: skip
    with torch.autocast(x_BTNH.device.type, enabled=False):
        return _scan_in_chunks(
            x_BTNH, dt_BTN, a_N, b_BTGS, c_BTGS, d_N, chunk_tokens, documents_BT, initial_BNHS, isolated
        )


def _scan_in_chunks(
    x_BTNH: Tensor, dt_BTN: Tensor, a_N: Tensor, b_BTGS: Tensor, c_BTGS: Tensor, d_N: Tensor, chunk_tokens: int,
    documents_BT: Tensor | None, initial_BNHS: Tensor | None, isolated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, num_positions, num_heads, head_dim = x_BTNH.shape
    num_groups, state_size = b_BTGS.shape[2:]
    size = min(chunk_tokens, num_positions)
    num_chunks, padding = -(-num_positions // size), -num_positions % size
    dtype = torch.promote_types(x_BTNH.dtype, torch.float32)
    x_BTNH, dt_BTN, b_BTGS, c_BTGS = (x.to(dtype) for x in (x_BTNH, dt_BTN, b_BTGS, c_BTGS))
    heads = (num_groups, num_heads // num_groups)

    def chunks(x: Tensor, *shape: int) -> Tensor:
        """Divide the positions into chunks ``[B, C, Q, ...]``; padding has time step 0, which keeps the state."""
        padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding)) if padding else x
        return padded.view(num_rows, num_chunks, size, *shape)

    dt_BCQGR = chunks(dt_BTN, *heads)
    value_BCQGRH = chunks(x_BTNH, *heads, head_dim) * dt_BCQGR[..., None]
    b_BCGQS = chunks(b_BTGS, num_groups, state_size).transpose(2, 3)
    c_BCGQS = chunks(c_BTGS, num_groups, state_size).transpose(2, 3)
    documents_BCQ = _documents(documents_BT, x_BTNH, padding).view(num_rows, num_chunks, size)
    step_BCQGR = dt_BCQGR * a_N.to(dtype).view(heads)
    # log of the decay since the chunk, or the document in it, began
    decay_BCQGR = _sum_in_documents(step_BCQGR, documents_BCQ) if isolated else step_BCQGR.cumsum(2)
    last_BC = documents_BCQ[:, :, -1]
    before_BC = torch.cat([documents_BCQ[:, :1, 0], last_BC[:, :-1]], dim=1)

    def visible(a: Tensor, b: Tensor) -> Tensor:
        """Whether both are the same document, as a factor of ``[B, C, Q, G, R]``."""
        return (a == b).to(dtype)[..., None, None]

    # within chunks
    decay_BCGRQ = decay_BCQGR.permute(0, 1, 3, 4, 2)
    reaches_BCQQ = (documents_BCQ[..., :, None] == documents_BCQ[..., None, :]).tril()
    exponent_BCGRQQ = decay_BCGRQ[..., :, None] - decay_BCGRQ[..., None, :]
    exponent_BCGRQQ = exponent_BCGRQQ.masked_fill(~reaches_BCQQ[:, :, None, None], float("-inf"))
    weights_BCGRQQ = (c_BCGQS @ b_BCGQS.transpose(-1, -2))[:, :, :, None] * exponent_BCGRQQ.exp()
    y_BCQGRH = (weights_BCGRQQ @ value_BCQGRH.permute(0, 1, 3, 4, 2, 5)).permute(0, 1, 4, 2, 3, 5)

    # between chunks
    to_end_BCQGR = decay_BCQGR[:, :, -1:] - decay_BCQGR
    is_last_BCQ = documents_BCQ == last_BC[:, :, None]
    if isolated:  # may be positive between documents, and its exponential infinite
        to_end_BCQGR = to_end_BCQGR.masked_fill(~is_last_BCQ[..., None, None], float("-inf"))
    to_end_BCQGR = to_end_BCQGR.exp() * is_last_BCQ.to(dtype)[..., None, None]
    kept_BCGQX = (value_BCQGRH * to_end_BCQGR[..., None]).flatten(-2).transpose(2, 3)  # X = R x H
    added_BCGSX = b_BCGQS.transpose(-1, -2) @ kept_BCGQX
    carry_BCGR = decay_BCQGR[:, :, -1].exp() * visible(before_BC, last_BC)
    starts_BCGSX, final_BGSX = _carry_states(added_BCGSX, carry_BCGR.repeat_interleave(head_dim, dim=-1), initial_BNHS)
    from_start_BCQGR = decay_BCQGR.exp() * visible(documents_BCQ, before_BC[:, :, None])
    read_BCQGRH = (c_BCGQS @ starts_BCGSX).transpose(2, 3).unflatten(-1, (heads[1], head_dim))
    y_BCQGRH = y_BCQGRH + read_BCQGRH * from_start_BCQGR[..., None]
    y_BTNH = y_BCQGRH.reshape(num_rows, -1, num_heads, head_dim)[:, :num_positions]
    final_BNHS = final_BGSX.transpose(-1, -2).reshape(num_rows, num_heads, head_dim, state_size)
    return y_BTNH + x_BTNH * d_N.to(dtype)[:, None], final_BNHS


def _carry_states(added_BCGSX: Tensor, carry_BCGX: Tensor, initial_BNHS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk and behind the last one, ``[B, C, G, S, X]`` and ``[B, G, S, X]``.

    Args:
        added_BCGSX: What each chunk adds to the state at its end; X are the values of all heads of a group.
        carry_BCGX: What remains of the state before it.
        initial_BNHS: The state before the first chunk.
    """
    state_BGSX = torch.zeros_like(added_BCGSX[:, 0])
    if initial_BNHS is not None:
        by_group_BGXS = initial_BNHS.to(state_BGSX.dtype).reshape(*state_BGSX.shape[:2], -1, state_BGSX.shape[2])
        state_BGSX = by_group_BGXS.transpose(-1, -2)
    starts: list[Tensor] = []
    for added_BGSX, carry_BGX in zip(added_BCGSX.unbind(1), carry_BCGX.unbind(1), strict=True):
        starts.append(state_BGSX)
        state_BGSX = state_BGSX * carry_BGX[:, :, None] + added_BGSX
    return torch.stack(starts, dim=1), state_BGSX


def _sum_in_documents(x_BCQGR: Tensor, documents_BCQ: Tensor) -> Tensor:
    """Return the sum of each position and those before it in its document and chunk, in log2(Q) additions."""
    distance = 1
    while distance < documents_BCQ.shape[2]:
        same_BCQ = documents_BCQ[:, :, distance:] == documents_BCQ[:, :, :-distance]
        earlier_BCQGR = x_BCQGR[:, :, :-distance] * same_BCQ[..., None, None]
        x_BCQGR = torch.cat([x_BCQGR[:, :, :distance], x_BCQGR[:, :, distance:] + earlier_BCQGR], dim=2)
        distance *= 2
    return x_BCQGR


def _documents(documents_BT: Tensor | None, x_BTNH: Tensor, padding: int) -> Tensor:
    """Return the document of each position, with padding in the last one."""
    if documents_BT is None:
        return x_BTNH.new_zeros((x_BTNH.shape[0], x_BTNH.shape[1] + padding), dtype=torch.int32)
    return torch.cat([documents_BT, documents_BT[:, -1:].expand(-1, padding)], dim=1)


def scan_step(
    state_BNHS: Tensor, x_BNH: Tensor, dt_BN: Tensor, a_N: Tensor, b_BGS: Tensor, c_BGS: Tensor, d_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, N, H]`` and state of one more position: ``scan`` in its recurrent form."""
    dtype, num_heads = state_BNHS.dtype, x_BNH.shape[1]
    with torch.autocast(x_BNH.device.type, enabled=False):
        x_BNH, dt_BN = x_BNH.to(dtype), dt_BN.to(dtype)
        b_BNS, c_BNS = (x.to(dtype).repeat_interleave(num_heads // x.shape[1], dim=1) for x in (b_BGS, c_BGS))
        decay_BN = (dt_BN * a_N.to(dtype)).exp()
        added_BNHS = (x_BNH * dt_BN[..., None])[..., None] * b_BNS[:, :, None]
        state_BNHS = state_BNHS * decay_BN[..., None, None] + added_BNHS
        y_BNH = (state_BNHS @ c_BNS[..., None]).squeeze(-1)
        return y_BNH + x_BNH * d_N.to(dtype)[:, None], state_BNHS


def selective_scan(
    x_BTE: Tensor, dt_BTE: Tensor, a_ES: Tensor, b_BTS: Tensor, c_BTS: Tensor, d_E: Tensor, documents_BT: Tensor
) -> Tensor:
    """Return the outputs ``[B, T, E]`` of Mamba-1 (Gu and Dao, arXiv 2312.00752): a decay per channel and column.

    A loop over positions, as in transformers. The state of a channel is a vector ``[S]``; its decay is zero where a
    document starts.
    """
    with torch.autocast(x_BTE.device.type, enabled=False):
        dtype = torch.promote_types(x_BTE.dtype, torch.float32)
        x_BTE, dt_BTE, b_BTS, c_BTS = (x.to(dtype) for x in (x_BTE, dt_BTE, b_BTS, c_BTS))
        continues_BT = F.pad(documents_BT[:, 1:] == documents_BT[:, :-1], (1, 0))
        decay_BTES = (dt_BTE[..., None] * a_ES).exp() * continues_BT[..., None, None]
        added_BTES = (dt_BTE * x_BTE)[..., None] * b_BTS[:, :, None]
        state_BES, outputs = torch.zeros_like(added_BTES[:, 0]), []
        for decay_BES, added_BES, c_BS in zip(decay_BTES.unbind(1), added_BTES.unbind(1), c_BTS.unbind(1), strict=True):
            state_BES = decay_BES * state_BES + added_BES
            outputs.append((state_BES @ c_BS[..., None]).squeeze(-1))
        return torch.stack(outputs, dim=1) + x_BTE * d_E.to(dtype)


def causal_convolution(
    x_BTE: Tensor,
    weight_EK: Tensor,
    bias_E: Tensor | None,
    *,
    documents_BT: Tensor | None = None,
    before_BKE: Tensor | None = None,
) -> Tensor:
    """Return the SiLU of a depthwise convolution of each position with the K - 1 before it in its document.

    Args:
        x_BTE: Inputs.
        weight_EK: Factor of each tap; the last one is the position itself.
        bias_E: Added to each channel.
        documents_BT: Number of the document of each position.
        before_BKE: The K - 1 inputs before the first position; zero by default.
    """
    kernel = _kernel("causal_conv1d", "causal_conv1d_fn", x_BTE) if before_BKE is None else None
    if kernel is not None:
        bias_E = None if bias_E is None else bias_E.to(x_BTE.dtype)
        documents = None if documents_BT is None else documents_BT.int()
        weight_EK = weight_EK.to(x_BTE.dtype)
        return kernel(x_BTE.transpose(1, 2), weight_EK, bias_E, seq_idx=documents, activation="silu").transpose(1, 2)
    taps = weight_EK.shape[1] - 1
    padded_BUE = F.pad(x_BTE, (0, 0, taps, 0)) if before_BKE is None else torch.cat([before_BKE, x_BTE], dim=1)
    y_BTE: Tensor = _Convolution.apply(padded_BUE, weight_EK.to(x_BTE.dtype), documents_BT)
    return F.silu(y_BTE if bias_E is None else y_BTE + bias_E.to(x_BTE.dtype))


class _Convolution(torch.autograd.Function):
    """The convolution of padded inputs ``[B, U, E]``, U = T + K - 1; saves its inputs only."""

    @staticmethod
    def forward(ctx: Any, padded_BUE: Tensor, weight_EK: Tensor, documents_BT: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded_BUE, weight_EK, documents_BT)
        num_taps = weight_EK.shape[1]
        num_positions = padded_BUE.shape[1] - num_taps + 1
        y_BTE = padded_BUE[:, num_taps - 1 :] * weight_EK[:, -1]
        for tap in range(num_taps - 1):
            y_BTE += (
                _hide(padded_BUE[:, tap : tap + num_positions], documents_BT, num_taps - 1 - tap) * weight_EK[:, tap]
            )
        return y_BTE

    @staticmethod
    def backward(ctx: Any, d_y_BTE: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        padded_BUE, weight_EK, documents_BT = ctx.saved_tensors
        num_taps, num_positions = weight_EK.shape[1], d_y_BTE.shape[1]
        d_padded_BUE, d_weights = torch.zeros_like(padded_BUE), []
        for tap in range(num_taps):
            d_hidden_BTE = _hide(d_y_BTE, documents_BT, num_taps - 1 - tap)
            d_padded_BUE[:, tap : tap + num_positions].addcmul_(d_hidden_BTE, weight_EK[:, tap])
            d_weights.append((d_hidden_BTE * padded_BUE[:, tap : tap + num_positions]).sum((0, 1)))
        return d_padded_BUE, torch.stack(d_weights, dim=1), None


def _hide(x_BTE: Tensor, documents_BT: Tensor | None, distance: int) -> Tensor:
    """Zero the positions whose neighbour ``distance`` earlier belongs to another document."""
    if documents_BT is None or distance == 0:
        return x_BTE
    same_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    same_BT[:, distance:] = documents_BT[:, distance:] == documents_BT[:, :-distance]
    return x_BTE * same_BT[..., None]


def gated_norm(y_BTI: Tensor, gate_BTI: Tensor, weight_I: Tensor, num_groups: int, eps: float) -> Tensor:
    """Return the RMS norm, in each of ``num_groups`` parts of the width, of ``y silu(gate)``, in fp32."""
    dtype = torch.promote_types(y_BTI.dtype, torch.float32)
    gated = (y_BTI.to(dtype) * F.silu(gate_BTI.to(dtype))).unflatten(-1, (num_groups, -1))
    return (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight_I.to(dtype)


def _kernel(module: str, name: str, x: Tensor) -> Callable[..., Any] | None:
    """Return the CUDA kernel if it is installed and determinism is not required, else ``None``."""
    if not x.is_cuda or torch.are_deterministic_algorithms_enabled():
        return None
    return _load(module, name)


@cache
def _load(module: str, name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, OSError, RuntimeError):  # without a GPU, or built for another version of PyTorch
        return None
