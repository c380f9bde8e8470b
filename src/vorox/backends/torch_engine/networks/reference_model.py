"""The reference of DPO: the frozen weights that a run starts from, or the base of an adapter

The reference computes in the modules of the policy: while ``active``, the parameters have its values. So it costs a
copy of the parameters, and none with an adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from vorox.backends.torch_engine.network import Network
from vorox.core.batch import Batch
from vorox.models.arrays.fingerprint import fingerprint

_PIECE_ELEMENTS = 1 << 22
"""Elements that are exchanged at a time, which bounds the memory."""


class ReferenceModel:
    """The frozen reference of a network.

    Args:
        network: The policy. Its current weights are the reference until ``freeze`` is called again.
    """

    def __init__(self, network: Network) -> None:
        self._network, self._parameters = network, network.parameters
        self._is_base = network.has_adapter
        self._values = {} if self._is_base else self._parameters.new_buffers(self._parameters.groups)
        self._copy()

    def freeze(self) -> None:
        """Make the current weights the reference; the base of an adapter stays it.

        Raises:
            ConfigError: The model does not compute both answers of a pair in one forward pass.
        """
        self._network.check_pairs()
        self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        for value, reference in self._pieces():
            reference.copy_(value)

    def fingerprint(self) -> str:
        """Return the hash of the frozen weights; empty for the base of an adapter, which has its own."""
        if self._is_base:
            return ""
        whole = self._parameters.whole(self._values)
        return fingerprint(((name, value.cpu().numpy()) for name, value in whole))

    @torch.no_grad()
    def answer_log_probs(self, batch: Batch) -> list[Tensor]:
        """Return the log-probability of each answer of each micro-batch."""
        with self._active():
            return [self._network.answer_log_probs(batch, index) for index in range(batch.tokens_ABT.shape[0])]

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        if self._is_base:
            with self._network.without_adapter():
                yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for value, reference in self._pieces():
            kept = value.clone()
            value.copy_(reference)
            reference.copy_(kept)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group, tensors in self._values.items():
            for reference, value in zip(tensors, self._parameters.values[group], strict=True):
                size = _PIECE_ELEMENTS
                yield from zip(value.view(-1).split(size), reference.view(-1).split(size), strict=True)
