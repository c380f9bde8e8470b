"""Check functions of the user inside the native decoder before step 1: they run, and see neither future nor others.

``model.attention_kernel``, ``model.activation``, ``model.mlp`` and ``model.block`` compute within the decoder. On
random weights, a later token must not change earlier logits, nor a document those of the next in its row. A function
that cannot be called is refused with what it is called with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vorox.backends.torch_engine.layouts.parameters import Parameters
from vorox.core.batch import Batch, DataCursor
from vorox.core.errors import ConfigError, VoroxError
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import call_error, is_extension, load_function, raised_in
from vorox.models.decoder.spec import DecoderSpec

PROBE_TOKENS = 32
_TOLERANCE = 1e-4
_ROUTED_TOLERANCE = 0.05
"""Where positions are sorted by expert, other positions change the rounding of half precision."""


class Part(NamedTuple):
    """A function of the user.

    Attributes:
        key: The setting.
        path: Its import path.
        signature: How it is called.
        arguments: What it is called with.
        returns: What it has to return.
        names: Arguments by position, and by keyword.
    """

    key: str
    path: str
    signature: str
    arguments: str
    returns: str
    names: tuple[int, tuple[str, ...]]


def user_parts(config: RunConfig) -> list[Part]:
    """Return the functions of the user that compute within the decoder."""
    model, found = config.model, list[Part]()
    if is_extension(model.attention_kernel):
        found.append(Part(
            "model.attention_kernel", model.attention_kernel,
            "f(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False)",
            "query, key and value [rows, heads, positions, width], and a mask that is true where a query may attend",
            "a tensor of the shape of the query", (3, ("attn_mask", "dropout_p", "is_causal")),
        ))  # fmt: skip
    if is_extension(model.activation):
        found.append(Part(
            "model.activation", model.activation, "f(x)", "x [positions, intermediate_size]",
            "a tensor of the shape of x", (1, ()),
        ))  # fmt: skip
    if model.mlp is not None:
        found.append(Part(
            "model.mlp", model.mlp, "f(x, weights)", "x [positions, hidden_size] and its weights by name",
            "a tensor of the shape of x", (2, ()),
        ))  # fmt: skip
    if model.block is not None:
        found.append(Part(
            "model.block", model.block, "f(spec, layer)(x, positions=..., attn_mask=...)",
            "x [rows, positions, hidden_size], and in packed rows the position in its document and a mask that is true "
            "where a query may attend", "the new residual stream, of the same shape", (2, ()),
        ))  # fmt: skip
    return found


def check_user_parts(
    config: RunConfig, spec: DecoderSpec, parameters: Parameters, run: Callable[[Batch], Tensor]
) -> None:
    """Check the functions of the user; the parameters are zero again afterwards.

    Args:
        config: The run.
        spec: The model.
        parameters: Those of the model, which have no values yet.
        run: Returns the logits ``[T, V]`` of the only row of a batch.

    Raises:
        ConfigError: A function cannot be called as it is, or what it sees is not its own past.
    """
    parts = user_parts(config)
    if not parts:
        return
    for part in parts:
        _check_signature(part)
    _fill(parameters)
    try:
        _check_row(config, spec, parts, run)
    finally:
        for tensors in parameters.values.values():
            for tensor in tensors:
                tensor.detach().zero_()
        parameters.store(parameters.values)


def _check_row(config: RunConfig, spec: DecoderSpec, parts: list[Part], run: Callable[[Batch], Tensor]) -> None:
    length = min(config.data.sequence_length_tokens, PROBE_TOKENS)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (1, 1, length)).astype(np.int32)
    is_half = config.precision.dtype != "fp32"
    tolerance = _ROUTED_TOLERANCE if is_half and spec.num_experts is not None else _TOLERANCE
    names = " or ".join(part.path for part in parts)

    def logits(changed: slice, ends: tuple[int, ...]) -> Tensor:
        given = tokens.copy()
        given[..., changed] = (given[..., changed] + 1) % spec.vocab_size
        try:
            return run(_batch(given, ends)).float()
        except VoroxError:
            raise
        except Exception as error:  # a user's function can raise anything
            guilty = next((part for part in parts if raised_in(part.path, error)), parts[0])
            raise _cannot_be_called(guilty, error) from error

    def differs(found: Tensor, expected: Tensor) -> bool:
        return not float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())

    nothing = slice(0, 0)
    whole = logits(nothing, (length,))
    for start in sorted({length - 1, length // 2} - {0}):
        if differs(logits(slice(start, None), (length,))[:start], whole[:start]):
            raise ConfigError(
                f"{names} is not causal: a later token changes the logits of earlier positions", where=parts[0].key,
                hint="let a position see earlier ones only: apply is_causal, or the mask that it is given",
            )  # fmt: skip
    middle = length // 2
    if not config.data.document_mask or not middle:
        return
    packed = logits(nothing, (middle, length))
    if differs(logits(slice(0, middle), (middle, length))[middle:], packed[middle:]):
        raise ConfigError(
            f"Documents of a row see each other in {names}: a token changes the logits of the next document",
            where=parts[0].key, hint="apply attn_mask, or set data.document_mask=false",
        )  # fmt: skip
    if differs(logits(slice(length - 1, None), (middle, length))[: length - 1], packed[: length - 1]):
        raise ConfigError(
            f"{names} is not causal in rows of several documents", where=parts[0].key, hint="apply attn_mask",
        )  # fmt: skip


def _batch(tokens: np.ndarray[Any, Any], ends: tuple[int, ...]) -> Batch:
    """Return a row of documents that end at some positions; one document has no segment ids."""
    length = tokens.shape[-1]
    segments = positions = None
    if len(ends) > 1:
        starts = np.searchsorted(ends, np.arange(length), side="right")
        segments = (starts + 1).astype(np.int32)[None, None]
        positions = (np.arange(length) - np.array([0, *ends])[starts]).astype(np.int32)[None, None]
    cursor, labels = DataCursor("", 0, 1, 0, 0), np.roll(tokens, -1, -1)
    return Batch(0, tokens, labels, segments, positions, np.zeros((1, 1), np.uint64), length, cursor)


def _check_signature(part: Part) -> None:
    function = load_function(part.path, kind="function", where=part.key)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in
        return
    count, keywords = part.names
    try:
        signature.bind(*(None,) * count, **dict.fromkeys(keywords))
    except TypeError as error:
        raise _cannot_be_called(part, error) from error


def _cannot_be_called(part: Part, error: Exception) -> ConfigError:
    return call_error(
        part.path, error, where=part.key, signature=part.signature, arguments=part.arguments, returns=part.returns
    )


def _fill(parameters: Parameters) -> None:
    """Fill all parameters so that every layer affects the logits; equal on ranks with the same part."""
    values = parameters.values
    generator = torch.Generator(next(iter(values.values()))[0].device)
    for number, part in enumerate(parameters.local_parts(values)):
        generator.manual_seed(number)
        if part.view.ndim < 2:
            part.view.uniform_(0.5, 1.5, generator=generator)
        else:
            part.view.normal_(std=part.view.shape[-1] ** -0.5, generator=generator)
    parameters.store(values)
