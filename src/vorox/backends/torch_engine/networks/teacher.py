"""The teacher of a distillation on this rank: a frozen model, or the logits of one that batches carry.

Shape legend: T positions, M positions of a micro-batch, K tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from vorox.backends.torch_engine import checkpoint
from vorox.backends.torch_engine.device import devices
from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.device.labels import TeacherOutput, TopLogits
from vorox.backends.torch_engine.layouts.parameters import FlatParameters
from vorox.backends.torch_engine.network import Network
from vorox.backends.torch_engine.networks.decoder_network import DecoderNetwork
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.batch import Batch, Int32Array
from vorox.core.engine import NamedArray
from vorox.core.schema import OptimizerConfig, RunConfig
from vorox.models.arrays.fingerprint import fingerprint
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.spec import ModelSpec


class Teacher:
    """A native decoder without gradients, in evaluation mode. Every rank holds all of it.

    Args:
        config: The run of the student; ``precision.dtype`` and kernels are the same.
        spec: The teacher.
        compute: The device.
        weights: Its parameters.

    Attributes:
        fingerprint: Hash of its weights.
    """

    def __init__(self, config: RunConfig, spec: DecoderSpec, compute: Compute, weights: Iterable[NamedArray]) -> None:
        train = config.train.model_copy(update={"quantization_aware": None})
        precision = config.precision.model_copy(update={"float8": None})
        config = config.model_copy(update={"optimizer": OptimizerConfig(), "train": train, "precision": precision})
        self._network = DecoderNetwork(config, spec, compute, Ranks())
        self._loss = self._network.loss
        parameters = self._network.parameters
        assert isinstance(parameters, FlatParameters)  # one rank shards nothing
        checkpoint.set_parameters(parameters, weights, spec)
        for parameter in parameters.modules.values():
            parameter.requires_grad_(False)
            parameter.grad = None
        parameters.drop_gradients()
        arrays = ((name, value.cpu().numpy()) for name, value in parameters.whole(parameters.values))
        self.fingerprint = fingerprint(arrays)

    @torch.no_grad()
    def output(self, batch: Batch, index: int) -> TeacherOutput:
        """Return the final hidden state of a micro-batch, with the head."""
        return TeacherOutput(*self._network.hidden(batch, index))

    @torch.no_grad()
    def top_logits(self, batch: Batch, index: int, top_k: int) -> tuple[Int32Array, npt.NDArray[np.float32]]:
        """Return the largest logits of a micro-batch and their tokens, ``[B, T, K]``, computed as the loss does."""
        parts = self._loss.teacher_logits(self.output(batch, index), top_k)
        shape = (*batch.tokens_ABT[index].shape, top_k)
        ids_MK, logits_MK = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
        return ids_MK.astype(np.int32).reshape(shape), logits_MK.reshape(shape)


def open_teacher(config: RunConfig, spec: ModelSpec, weights: Iterable[NamedArray]) -> tuple[Teacher, Compute]:
    """Open a teacher without a student, for its logits.

    Raises:
        ConfigError: This machine does not support a setting.
        DoesNotFitError: The teacher needs more memory than the device has.
    """
    assert isinstance(spec, DecoderSpec)
    compute = devices.prepare(config)
    with devices.memory_errors("loading the teacher", devices.memory_budget(config, spec, compute.device)):
        return Teacher(config, spec, compute, weights), compute


def attach(
    network: Network, config: RunConfig, spec: ModelSpec, compute: Compute, weights: Iterable[NamedArray]
) -> str:
    """Load a teacher for a student; return the hash of its weights."""
    assert isinstance(network, DecoderNetwork)
    assert isinstance(spec, DecoderSpec)
    teacher = Teacher(config, spec, compute, weights)
    network.teach = teacher.output
    return teacher.fingerprint


def attach_stored(network: Network, device: torch.device, identity: str) -> str:
    """Let a student learn from the logits that its batches carry; return the identity of these."""
    assert isinstance(network, DecoderNetwork)

    def stored(batch: Batch, index: int) -> TopLogits:
        assert batch.teacher is not None
        ids_BTK, logits_BTK = batch.teacher.ids_ABTK[index], batch.teacher.logits_ABTK[index]
        ids_MK = to_device(ids_BTK, device).flatten(0, 1).long()
        return TopLogits(ids_MK, to_device(logits_BTK, device).flatten(0, 1))

    network.teach = stored
    return identity
