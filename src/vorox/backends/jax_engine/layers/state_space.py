"""State-space layers of Mamba-2 (Dao and Gu, arXiv 2405.21060): the scan and its causal convolution.

Each head keeps a state, a matrix ``[H, S]``, that starts at zero in every document of a packed row:

    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t        y_t = state_t C_t + D x_t

``scan`` computes all positions. Within a chunk of Q positions it multiplies matrices, as attention does; between chunks
it carries the state. The result does not depend on the chunk, up to rounding. States and sums are fp32, or fp64 for
fp64 inputs, in any compute precision. The formulas equal those of ``torch_engine/layers/state_space.py``.

Shape legend: B rows, T positions, C chunks, Q positions of a chunk, N heads, G groups, R = N / G heads of a group,
H head width, S state size, E channels of the convolution, K its taps.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vorox.models.decoder.mamba import conv_channels
from vorox.models.decoder.spec import DecoderSpec

Array = jax.Array


class MambaState(NamedTuple):
    """What a layer remembers of earlier tokens.

    Attributes:
        inputs_BKE: Inputs of the convolution at the last K - 1 positions.
        state_BNHS: States of the heads, fp32.
    """

    inputs_BKE: Array
    state_BNHS: Array

    @classmethod
    def zeros(cls, spec: DecoderSpec, batch_size: int, dtype: jnp.dtype) -> MambaState:
        """Return the state before the first token."""
        assert spec.mamba_num_heads is not None
        shape = (batch_size, spec.mamba_num_heads, spec.mamba_head_dim, spec.mamba_state_size)
        return cls(
            jnp.zeros((batch_size, spec.mamba_conv_tokens - 1, conv_channels(spec)), dtype),
            jnp.zeros(shape, jnp.float32),
        )


def scan(
    x_BTNH: Array,
    dt_BTN: Array,
    a_N: Array,
    b_BTGS: Array,
    c_BTGS: Array,
    d_N: Array,
    *,
    chunk_tokens: int,
    documents_BT: Array | None = None,
    initial_BNHS: Array | None = None,
) -> tuple[Array, Array]:
    """Return the outputs ``[B, T, N, H]`` and the state behind the last position, ``[B, N, H, S]``.

    Args:
        x_BTNH: Inputs of the heads.
        dt_BTN: Time steps; 0 keeps the state.
        a_N: Decay rate of each head, negative.
        b_BTGS: What an input adds to the state; the heads of a group share it.
        c_BTGS: What is read from the state.
        d_N: Factor of the input in the output.
        chunk_tokens: Positions of a chunk.
        documents_BT: Number of the document of each position; the state starts at zero where it changes.
        initial_BNHS: State before the first position; zero by default.
    """
    num_rows, num_positions, num_heads, head_dim = x_BTNH.shape
    num_groups, state_size = b_BTGS.shape[2:]
    size = min(chunk_tokens, num_positions)
    padding = -num_positions % size
    dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    heads = (num_groups, num_heads // num_groups)
    if documents_BT is None:
        documents_BT = jnp.zeros((num_rows, num_positions), jnp.int32)

    def chunks(x: Array, *shape: int, mode: str = "constant") -> Array:
        """Divide the positions into chunks ``[B, C, Q, ...]``; padding has time step 0, which keeps the state."""
        padded = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)], mode=mode) if padding else x
        return padded.reshape(num_rows, -1, size, *shape)

    dt_BCQGR = chunks(dt_BTN.astype(dtype), *heads)
    value_BCQGRH = chunks(x_BTNH.astype(dtype), *heads, head_dim) * dt_BCQGR[..., None]
    b_BCQGS, c_BCQGS = (chunks(x.astype(dtype), num_groups, state_size) for x in (b_BTGS, c_BTGS))
    documents_BCQ = chunks(documents_BT, mode="edge")
    decay_BCQGR = jnp.cumsum(dt_BCQGR * a_N.astype(dtype).reshape(heads), axis=2)  # log of the decay in the chunk
    y_BCQGRH = _within_chunks(value_BCQGRH, b_BCQGS, c_BCQGS, decay_BCQGR, documents_BCQ)
    shape = (num_rows, *heads, head_dim, state_size)
    initial = jnp.zeros(shape, dtype) if initial_BNHS is None else initial_BNHS.astype(dtype).reshape(shape)
    read_BCQGRH, final = _between_chunks(value_BCQGRH, b_BCQGS, c_BCQGS, decay_BCQGR, documents_BCQ, initial)
    y_BCQGRH = y_BCQGRH + read_BCQGRH
    y_BTNH = y_BCQGRH.reshape(num_rows, -1, num_heads, head_dim)[:, :num_positions]
    y_BTNH = y_BTNH + x_BTNH.astype(dtype) * d_N.astype(dtype)[:, None]
    return y_BTNH, final.reshape(num_rows, num_heads, head_dim, state_size)


def _within_chunks(
    value_BCQGRH: Array, b_BCQGS: Array, c_BCQGS: Array, decay_BCQGR: Array, documents_BCQ: Array
) -> Array:
    """Return what each position reads of the inputs before it in its chunk and document, ``[B, C, Q, G, R, H]``."""
    size = documents_BCQ.shape[2]
    is_causal_QQ = jnp.tril(jnp.ones((size, size), bool))
    reaches_BCQQ = (documents_BCQ[..., :, None] == documents_BCQ[..., None, :]) & is_causal_QQ
    exponent_BCQQGR = decay_BCQGR[:, :, :, None] - decay_BCQGR[:, :, None]
    exponent_BCQQGR = jnp.where(reaches_BCQQ[..., None, None], exponent_BCQQGR, -jnp.inf)
    scores_BCQQG = jnp.einsum("bcqgs,bcpgs->bcqpg", c_BCQGS, b_BCQGS)
    weights_BCQQGR = scores_BCQQG[..., None] * jnp.exp(exponent_BCQQGR)
    return jnp.einsum("bcqpgr,bcpgrh->bcqgrh", weights_BCQQGR, value_BCQGRH)


def _between_chunks(
    value_BCQGRH: Array,
    b_BCQGS: Array,
    c_BCQGS: Array,
    decay_BCQGR: Array,
    documents_BCQ: Array,
    initial_BGRHS: Array,
) -> tuple[Array, Array]:
    """Return what each position reads of the state before its chunk, and the state behind the last chunk."""
    dtype, last_BC = decay_BCQGR.dtype, documents_BCQ[:, :, -1]
    before_BC = jnp.concatenate([documents_BCQ[:, :1, 0], last_BC[:, :-1]], axis=1)
    is_last_BCQ = (documents_BCQ == last_BC[:, :, None]).astype(dtype)
    to_end_BCQGR = jnp.exp(decay_BCQGR[:, :, -1:] - decay_BCQGR) * is_last_BCQ[..., None, None]
    added_BCGRHS = jnp.einsum("bcqgs,bcqgrh->bcgrhs", b_BCQGS, value_BCQGRH * to_end_BCQGR[..., None])
    continues_BC = (before_BC == last_BC).astype(dtype)
    carry_BCGR = jnp.exp(decay_BCQGR[:, :, -1]) * continues_BC[..., None, None]

    def carry(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        added, kept = chunk
        return state * kept[..., None, None] + added, state

    chunks = (jnp.moveaxis(added_BCGRHS, 1, 0), jnp.moveaxis(carry_BCGR, 1, 0))
    final_BGRHS, starts_CBGRHS = jax.lax.scan(carry, initial_BGRHS, chunks)
    is_first_BCQ = (documents_BCQ == before_BC[:, :, None]).astype(dtype)
    from_start_BCQGR = jnp.exp(decay_BCQGR) * is_first_BCQ[..., None, None]
    read_BCQGRH = jnp.einsum("bcqgs,cbgrhs->bcqgrh", c_BCQGS, starts_CBGRHS)
    return read_BCQGRH * from_start_BCQGR[..., None], final_BGRHS


def causal_convolution(
    x_BTE: Array,
    weight_EK: Array,
    bias_E: Array | None,
    *,
    documents_BT: Array | None = None,
    before_BKE: Array | None = None,
) -> Array:
    """Return the SiLU of a depthwise convolution of each position with the K - 1 before it in its document.

    Args:
        x_BTE: Inputs.
        weight_EK: Factor of each tap; the last one is the position itself.
        bias_E: Added to each channel.
        documents_BT: Number of the document of each position.
        before_BKE: The K - 1 inputs before the first position; zero by default.
    """
    num_taps, num_positions = weight_EK.shape[1], x_BTE.shape[1]
    weight_EK = weight_EK.astype(x_BTE.dtype)
    if before_BKE is None:
        before_BKE = jnp.zeros((x_BTE.shape[0], num_taps - 1, x_BTE.shape[2]), x_BTE.dtype)
    padded_BUE = jnp.concatenate([before_BKE, x_BTE], axis=1)
    y_BTE = x_BTE * weight_EK[:, -1]
    for tap in range(num_taps - 1):
        distance = num_taps - 1 - tap
        earlier_BTE = padded_BUE[:, tap : tap + num_positions]
        if documents_BT is not None and distance < num_positions:
            same_BT = documents_BT[:, distance:] == documents_BT[:, :-distance]
            same_BT = jnp.pad(same_BT, ((0, 0), (distance, 0)), constant_values=True)  # before the row is zero
            earlier_BTE = earlier_BTE * same_BT[..., None]
        y_BTE = y_BTE + earlier_BTE * weight_EK[:, tap]
    return jax.nn.silu(y_BTE if bias_E is None else y_BTE + bias_E.astype(x_BTE.dtype))


def gated_norm(y_BTI: Array, gate_BTI: Array, weight_I: Array, num_groups: int, eps: float) -> Array:
    """Return the RMS norm, in each of ``num_groups`` parts of the width, of ``y silu(gate)``, in fp32."""
    dtype = jnp.promote_types(y_BTI.dtype, jnp.float32)
    gated_BTI = y_BTI.astype(dtype) * jax.nn.silu(gate_BTI.astype(dtype))
    parts = gated_BTI.reshape(*gated_BTI.shape[:2], num_groups, -1)
    normed = parts * jax.lax.rsqrt(jnp.square(parts).mean(-1, keepdims=True) + eps)
    return normed.reshape(gated_BTI.shape) * weight_I.astype(dtype)
