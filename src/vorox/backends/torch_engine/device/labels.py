"""Targets of a micro-batch on the device.

Shape legend: B rows, T positions, M positions of this rank, C positions of a chunk, D and E widths, V vocabulary,
K tokens of a teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.device.inputs import PositionPart
from vorox.core.batch import IGNORED_LABEL, Batch, Int32Array


@dataclass(frozen=True, slots=True)
class Labels:
    """Targets of a micro-batch: ``index_M`` is 0 where there is none, ``kept_M`` is ``None`` when all are targets.

    ``teacher`` is set in training with ``train.distillation``.
    """

    index_M: Tensor
    kept_M: Tensor | None
    teacher: TeacherOutput | TopLogits | None = None


@dataclass(frozen=True, slots=True)
class TeacherOutput:
    """Final hidden state of the teacher at the same positions, and its head; E is its width."""

    hidden_ME: Tensor
    head_VE: Tensor

    def split(self, size: int) -> list[TeacherOutput]:
        return [TeacherOutput(hidden_CE, self.head_VE) for hidden_CE in self.hidden_ME.split(size)]


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest logits of a teacher at each position, less the largest, with their tokens."""

    ids_MK: Tensor
    logits_MK: Tensor

    @classmethod
    def of(cls, logits_MV: Tensor, top_k: int) -> TopLogits:
        values_MK, ids_MK = logits_MV.topk(top_k, dim=1)
        return cls(ids_MK, values_MK - values_MK[:, :1])

    def split(self, size: int) -> list[TopLogits]:
        return [TopLogits(*part) for part in zip(self.ids_MK.split(size), self.logits_MK.split(size), strict=True)]


def labels_to_device(labels_BT: Int32Array, device: torch.device) -> Labels:
    """Copy labels to the device as target indices and a mask of the positions that have a target."""
    kept_BT = labels_BT != IGNORED_LABEL
    if bool(kept_BT.all()):
        return Labels(to_device(labels_BT, device).view(-1).long(), None)
    index_M = to_device(np.where(kept_BT, labels_BT, 0).astype(np.int32), device).view(-1).long()
    return Labels(index_M, to_device(kept_BT.astype(np.int32), device).view(-1).bool())


def labels_of(batch: Batch, index: int, part: PositionPart, device: torch.device) -> Labels:
    """Return the labels of the same positions."""
    return labels_to_device(part.select(batch.labels_ABT[index]), device)
