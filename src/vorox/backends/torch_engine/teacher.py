"""The frozen teacher of a distillation, on this rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vorox.backends.torch_engine import checkpoint
from vorox.backends.torch_engine.decoder_network import DecoderNetwork
from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.loss import TeacherOutput
from vorox.backends.torch_engine.parameters import FlatParameters
from vorox.core.batch import Batch
from vorox.core.engine import NamedArray
from vorox.core.schema import OptimizerConfig, RunConfig
from vorox.models.decoder_spec import DecoderSpec
from vorox.models.fingerprint import array_fingerprint


class Teacher:
    """A native decoder without gradients, in evaluation mode. Every rank holds all of it.

    Args:
        config: The run of the student; precision and kernels are the same.
        spec: The teacher.
        compute: The device.
        weights: Its parameters.

    Attributes:
        fingerprint: Hash of its weights.
    """

    def __init__(self, config: RunConfig, spec: DecoderSpec, compute: Compute, weights: Iterable[NamedArray]) -> None:
        config = config.model_copy(update={"optimizer": OptimizerConfig()})
        self._network = DecoderNetwork(config, spec, compute, Ranks())
        parameters = self._network.parameters
        assert isinstance(parameters, FlatParameters)  # one rank shards nothing
        checkpoint.set_parameters(parameters, weights, spec)
        for parameter in parameters.modules.values():
            parameter.requires_grad_(False)
            parameter.grad = None
        parameters.drop_gradients()
        arrays = ((name, value.cpu().numpy()) for name, value in parameters.whole(parameters.values))
        self.fingerprint = array_fingerprint(arrays, {})

    @torch.no_grad()
    def output(self, batch: Batch, index: int) -> TeacherOutput:
        """Return the final hidden state of a micro-batch, with the head."""
        return TeacherOutput(*self._network.hidden(batch, index))
