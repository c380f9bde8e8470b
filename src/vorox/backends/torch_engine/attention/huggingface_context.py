"""Context parallelism of a transformers model: what only transformers needs, its attention function and its masks.

A model runs on the positions of this rank, with their position ids. For attention, it calls the function that its
configuration names (``AttentionInterface`` of transformers). Ours exchanges positions for heads
(``context_parallel.py``) around the function that the model has otherwise. Masks are those that transformers makes for
whole rows, which every rank has read. Whole rows, as for samples, run as without context parallelism.

Shape legend: B rows, T positions of a row, P positions of this rank, N query heads, K key/value heads, S query heads
and X key/value heads of this rank for whole rows, H head width.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.attention.context_parallel import ContextParallel
from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.device.inputs import RowPositions

_numbers = itertools.count()


class AttentionExchange:
    """The attention of a transformers model of which this rank computes some positions.

    Args:
        module: The model.
        context: The exchange with the other ranks.
    """

    def __init__(self, module: Any, context: ContextParallel) -> None:
        self._context, self._config = context, module.config
        children: list[Any] = [child for child in module.modules() if hasattr(child, "config")]
        self._configs = {id(child.config): child.config for child in children}
        self._function: str = self._config._attn_implementation
        # The registry is global: each engine has a name of its own, and must not be kept alive by it.
        self._own_function, attend = f"vorox_context_parallel_{next(_numbers)}", weakref.WeakMethod(self._attend)
        importlib.import_module("transformers").AttentionInterface.register(
            self._own_function,
            lambda *given, **settings: attend()(*given, **settings),  # type: ignore[misc]
        )

    def select(self, *, is_divided: bool) -> None:
        """Choose between this rank's positions and whole rows; to be kept until the backward pass."""
        for config in self._configs.values():
            config._attn_implementation = self._own_function if is_divided else self._function

    def masks(self, rows: RowPositions, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the mask that the model makes for whole rows, or one for each kind of layers.

        Args:
            rows: The rows.
            device: Where the model is.
            dtype: Precision of the embedding.
        """
        assert rows.positions_BT is not None
        positions_BT = to_device(rows.positions_BT, device).long().expand(len(rows.tokens_BP), -1)
        self.select(is_divided=False)  # functions differ in their masks
        create_masks = importlib.import_module("transformers.masking_utils").create_masks_for_generate
        embeddings_BT0 = torch.empty((*positions_BT.shape, 0), dtype=dtype, device=positions_BT.device)
        given = {
            "config": self._config, "inputs_embeds": embeddings_BT0, "attention_mask": None, "past_key_values": None,
            "position_ids": positions_BT,
            # Named like this, and needed, in early versions of transformers 5.
            "input_embeds": embeddings_BT0,
            "cache_position": torch.arange(positions_BT.shape[1], device=positions_BT.device),
        }  # fmt: skip
        names = inspect.signature(create_masks).parameters
        return create_masks(**{name: value for name, value in given.items() if name in names})

    def _attend(
        self,
        layer: nn.Module,
        query_BNPH: Tensor,
        key_BKPH: Tensor,
        value_BKPH: Tensor,
        attention_mask: Tensor | None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        """Return the attention ``[B, P, N, H]`` of a layer; ``settings`` belong to its function."""
        eager: Any = getattr(sys.modules[type(layer).__module__], "eager_attention_forward", None)
        functions: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        function = functions.get(self._function, eager)

        def attend(query_BSTH: Tensor, key_BXTH: Tensor, value_BXTH: Tensor) -> Tensor:
            share = _Share(layer, query_BSTH.shape[1] // key_BXTH.shape[1])
            mixed_BTSH, _ = function(share, query_BSTH, key_BXTH, value_BXTH, attention_mask, **settings)
            return mixed_BTSH.transpose(1, 2)

        return self._context.exchange_heads(attend, query_BNPH, key_BKPH, value_BKPH).transpose(1, 2), None


class _Share:
    """An attention layer with the number of query heads for each key/value head that this rank has."""

    def __init__(self, layer: nn.Module, num_key_value_groups: int) -> None:
        self._layer, self.num_key_value_groups = layer, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
