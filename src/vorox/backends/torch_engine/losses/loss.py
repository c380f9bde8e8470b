"""Fused output head and cross-entropy loss, in chunks, so that the full logits are never materialised.

For each chunk of positions, the logits are turned in place into probabilities and then into their gradient, which is
multiplied into the gradients of hidden state and head. The backward pass only passes these gradients on; the head's
product is not repeated. Sums are over target positions; the caller divides by the global count through ``scale``.

The objective of a position is ``(1 - s) nll + s mean_V(-log p) + z lse^2`` with label smoothing ``s`` and z-loss
weight ``z``; the reported cross entropy is the plain ``nll``. With a teacher (``train.distillation``), it is
``(1 - w)`` times that plus ``w T^2 KL(teacher || student)``; logits of the teacher exist per chunk as well. With
``top_k``, the teacher's distribution covers its K largest logits only. A user function (``loss.name``) replaces
the objective. Without either, the chunks of a compiled model are compiled as well (``compiled_loss.py``).

Shape legend: M positions of a micro-batch, C positions of a chunk, D width, V vocabulary, K tokens of a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vorox.backends.torch_engine.device.labels import Labels, TeacherOutput, TopLogits
from vorox.backends.torch_engine.device.matrix_products import Products
from vorox.backends.torch_engine.losses.compiled_loss import compiled_chunk_loss
from vorox.core.batch import IGNORED_LABEL
from vorox.core.schema import DistillationConfig, LossConfig, RunConfig
from vorox.core.user_code.extensions import is_extension, load_function
from vorox.planning.memory_estimate import loss_chunk_positions


class LossSums(NamedTuple):
    """Sums over the targets, on the device.

    Attributes:
        cross_entropy: Nats.
        squared_log_partition: Squared log-sum-exp of the logits, for the z-loss.
        objective: The objective of a user function, or with a teacher; else 0.
        num_correct: Targets that are the arg max of their logits; of equal logits, the first is.
    """

    cross_entropy: Tensor
    squared_log_partition: Tensor
    num_correct: Tensor
    objective: Tensor

    @property
    def loss(self) -> Tensor:
        return self.cross_entropy

    def metrics(self, config: RunConfig, count: int) -> dict[str, Tensor]:
        """Return the means over ``count`` targets, by metric name."""
        found: dict[str, Tensor] = {}
        if config.log.accuracy:
            found["accuracy"] = self.num_correct / count
        if config.loss.z_loss_weight:
            found["z_loss"] = self.squared_log_partition * (config.loss.z_loss_weight / count)
        if config.loss.name != "cross_entropy" or config.train.distillation.is_active:
            found["objective"] = self.objective / count
        return found


class Partition(NamedTuple):
    """The softmax of a chunk.

    Attributes:
        probabilities: ``[C, V]``.
        log_partition: Log-sum-exp of the logits of each position.
        target: Logit of the target.
        is_correct: Whether the target is the arg max, if that is counted.
    """

    probabilities: Tensor
    log_partition: Tensor
    target: Tensor
    is_correct: Tensor | None


UserLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits_CV, labels_C) -> loss summed over the positions; labels are ``IGNORED_LABEL`` where there is no target."""


def user_loss(name: str) -> UserLoss | None:
    """Return the user function that ``loss.name`` names; ``None`` for the built-in loss."""
    return load_function(name, kind="loss", where="loss.name") if is_extension(name) else None


class FusedLinearLoss:
    """Output projection and loss from final hidden states, fused: the full logits never exist.

    Args:
        config: Label smoothing, z-loss and chunk size.
        vocab_size: Rows of the head.
        device: Device of the model.
        products: Matrix products.
        dtype: Precision of the products.
        count_correct: Whether training counts correct targets.
        distillation: Temperature and weight of a teacher.
        compiled: Whether chunks are compiled, where there is neither a user function nor a teacher.

    Attributes:
        sum_dtype: Number format of the loss sums.
    """

    def __init__(
        self,
        config: LossConfig,
        vocab_size: int,
        device: torch.device,
        products: Products,
        dtype: torch.dtype,
        *,
        count_correct: bool,
        distillation: DistillationConfig | None = None,
        compiled: bool = False,
    ) -> None:
        self._distillation = distillation or DistillationConfig()
        self._smoothing, self._z_weight = config.label_smoothing_fraction, config.z_loss_weight
        self._num_tokens = vocab_size
        self._function = user_loss(config.name)
        self._products, self._dtype, self._count_correct = products, dtype, count_correct
        self.sum_dtype = torch.float32 if device.type == "mps" else torch.float64
        self._chunk_positions = loss_chunk_positions(config.chunk_tokens, vocab_size, device.type)
        self._is_compiled = compiled
        self._compiled_chunk_loss = compiled_chunk_loss(
            smoothing=self._smoothing, z_weight=self._z_weight, count_correct=count_correct, sum_dtype=self.sum_dtype
        )

    @torch.no_grad()
    def evaluate(self, hidden_MD: Tensor, head_VD: Tensor, labels: Labels) -> LossSums:
        """Return the loss sums without gradients; correct targets are counted."""
        sums = _Sums(hidden_MD.device, self.sum_dtype)
        head_VD = head_VD.detach().to(self._dtype)
        for chunk, chunk_labels in self._chunks(hidden_MD.detach(), labels):
            logits_CV = self._products(chunk.to(self._dtype), head_VD).float()
            self._probabilities(logits_CV, chunk_labels, sums, count_correct=True)
        return sums.result()

    def train(
        self, hidden_MD: Tensor, head_VD: Tensor, labels: Labels, scale: float, loss_scale: Tensor | None = None
    ) -> tuple[Tensor, LossSums]:
        """Return a scalar to call ``backward`` on, and the loss sums.

        The gradients of the objective are computed here; ``backward`` passes them on. The value of the scalar is the
        scaled cross entropy. If ``head_VD.grad`` exists, the head's gradient is
        added to it directly. A frozen head has none.

        Args:
            hidden_MD: Final hidden state.
            head_VD: The output head.
            labels: Targets.
            scale: One over the global number of targets.
            loss_scale: Loss scale of fp16.
        """
        objective, *sums = _Objective.apply(hidden_MD, head_VD, self, labels, scale, loss_scale)
        return objective, LossSums(*sums)

    def gradients(
        self,
        hidden_MD: Tensor,
        head_VD: Tensor,
        head_gradient: Tensor | None,
        labels: Labels,
        scale: float,
        loss_scale: Tensor | None,
    ) -> tuple[LossSums, Tensor]:
        """Add the head's gradient to ``head_gradient``; return the loss sums and the gradient of ``hidden_MD``.

        A frozen head has no ``head_gradient``.
        """
        sums = _Sums(hidden_MD.device, self.sum_dtype)
        head_VD, d_hidden_MD = head_VD.to(self._dtype), torch.empty_like(hidden_MD)
        factor = scale if loss_scale is None else loss_scale * scale
        is_compiled = self._is_compiled and self._function is None and labels.teacher is None
        chunk_loss = self._compiled_chunk_loss if is_compiled else None
        if chunk_loss is not None and not isinstance(factor, Tensor):  # a number would be compiled in
            factor = torch.full((), factor, device=hidden_MD.device)
        # Half precision is scaled before it is rounded; in fp32 it is cheaper to scale the products.
        is_scaled = chunk_loss is not None or self._dtype != torch.float32
        start = 0
        for hidden_CD, chunk_labels in self._chunks(hidden_MD.detach(), labels):
            input_CD = hidden_CD.to(self._dtype)
            if chunk_labels.kept_M is not None:
                # Masking the gradient is not enough: 0 * inf is not 0.
                input_CD = input_CD.masked_fill(~chunk_labels.kept_M[:, None], 0.0)
            logits_CV = self._products(input_CD, head_VD)
            if chunk_loss is not None and isinstance(factor, Tensor):
                d_logits_CV, found = chunk_loss(logits_CV, chunk_labels.index_M, chunk_labels.kept_M, factor)
                sums.add_sums(found)
            else:
                d_logits_CV = self._gradient(logits_CV.float(), chunk_labels, sums)
                if is_scaled:
                    d_logits_CV = d_logits_CV.mul_(factor).to(self._dtype)
            if head_gradient is not None:
                self._products.add_to(head_gradient, d_logits_CV, input_CD, 1.0 if is_scaled else scale)
            end = start + hidden_CD.shape[0]
            d_hidden_MD[start:end] = self._products(d_logits_CV, head_VD.t())
            start = end
        return sums.result(), self._total(d_hidden_MD if is_scaled else d_hidden_MD.mul_(scale))

    def _chunks(self, hidden_MD: Tensor, labels: Labels) -> list[tuple[Tensor, Labels]]:
        size = self._chunk_positions
        hidden, index = hidden_MD.split(size), labels.index_M.split(size)
        kept = labels.kept_M.split(size) if labels.kept_M is not None else (None,) * len(index)
        teacher = labels.teacher.split(size) if labels.teacher is not None else (None,) * len(index)
        return [(h, Labels(i, k, t)) for h, i, k, t in zip(hidden, index, kept, teacher, strict=True)]

    def _gradient(self, logits_CV: Tensor, labels: Labels, sums: _Sums) -> Tensor:
        probabilities_CV, log_partition_C = self._probabilities(
            logits_CV, labels, sums, count_correct=self._count_correct
        )
        if self._function is not None:
            return self._function_gradient(self._function, logits_CV, labels, sums)
        if self._z_weight:
            probabilities_CV.mul_(log_partition_C.mul(2 * self._z_weight).add_(1)[:, None])
        if self._smoothing:
            probabilities_CV.sub_(self._smoothing / self._num_tokens)
        target_C1, weight = self._target(labels)
        at_target_C1 = probabilities_CV.gather(1, target_C1)
        probabilities_CV.scatter_(1, target_C1, at_target_C1.sub_(weight * (1 - self._smoothing)))
        if labels.teacher is not None:
            nll_C = log_partition_C - logits_CV.gather(1, target_C1)[:, 0]
            self._distill(probabilities_CV, logits_CV, nll_C, labels.kept_M, labels.teacher, sums)
        if labels.kept_M is not None:
            probabilities_CV.masked_fill_(~labels.kept_M[:, None], 0.0)
        return probabilities_CV

    def _distill(
        self,
        gradient_CV: Tensor,
        logits_CV: Tensor,
        nll_C: Tensor,
        kept_C: Tensor | None,
        teacher: TeacherOutput | TopLogits,
        sums: _Sums,
    ) -> None:
        """Mix the gradient, in place, with that of ``T^2 KL(teacher || student)``, and add up the objective."""
        temperature, weight = self._distillation.temperature, self._distillation.weight
        student_CV = torch.log_softmax(logits_CV / temperature, dim=1)
        if isinstance(teacher, TeacherOutput) and self._distillation.top_k is not None:
            teacher = TopLogits.of(self._logits_of(teacher), self._distillation.top_k)
        if isinstance(teacher, TopLogits):
            log_wanted_CK = torch.log_softmax(teacher.logits_MK / temperature, dim=1)
            wanted_CK, ids_CK = log_wanted_CK.exp(), teacher.ids_MK
            divergence_C = (wanted_CK * (log_wanted_CK - student_CV.gather(1, ids_CK))).sum(1)
            sums.add(divergence_C.mul_(weight * temperature**2).add_(nll_C, alpha=1 - weight), kept_C, "objective")
            gradient_CV.mul_(1 - weight).add_(student_CV.exp_(), alpha=weight * temperature)
            at_ids_CK = gradient_CV.gather(1, ids_CK).sub_(wanted_CK, alpha=weight * temperature)
            gradient_CV.scatter_(1, ids_CK, at_ids_CK)
            return
        teacher_CV = torch.log_softmax(self._logits_of(teacher).div_(temperature), dim=1)
        wanted_CV = teacher_CV.exp()
        divergence_C = (wanted_CV * (teacher_CV - student_CV)).sum(1).mul_(weight * temperature**2)
        sums.add(divergence_C.add_(nll_C, alpha=1 - weight), kept_C, "objective")
        gradient_CV.mul_(1 - weight).add_(student_CV.exp_().sub_(wanted_CV), alpha=weight * temperature)

    def _logits_of(self, teacher: TeacherOutput) -> Tensor:
        """Return the logits of a teacher, in fp32."""
        return self._products(teacher.hidden_ME.to(self._dtype), teacher.head_VE.to(self._dtype)).float()

    def teacher_logits(self, teacher: TeacherOutput, top_k: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens and largest logits of a teacher in the chunks of the loss, ``[C, K]``."""
        for part in teacher.split(self._chunk_positions):
            found = TopLogits.of(self._logits_of(part), top_k)
            yield found.ids_MK, found.logits_MK

    def _function_gradient(self, function: UserLoss, logits_CV: Tensor, labels: Labels, sums: _Sums) -> Tensor:
        kept_C = labels.kept_M
        labels_C = labels.index_M if kept_C is None else labels.index_M.masked_fill(~kept_C, IGNORED_LABEL)
        with torch.enable_grad():
            logits_CV.requires_grad_()
            objective = function(logits_CV, labels_C)
            (d_logits_CV,) = torch.autograd.grad(objective, logits_CV)
        sums.add(objective.detach()[None], None, "objective")
        return d_logits_CV if kept_C is None else d_logits_CV.masked_fill(~kept_C[:, None], 0.0)

    def _probabilities(
        self, logits_CV: Tensor, labels: Labels, sums: _Sums, *, count_correct: bool
    ) -> tuple[Tensor, Tensor]:
        probabilities_CV, log_partition_C, target_C, is_correct_C = self._partition(
            logits_CV, labels, count_correct=count_correct
        )
        sums.add(log_partition_C - target_C, labels.kept_M, "cross_entropy")
        if self._z_weight:
            sums.add(log_partition_C.square(), labels.kept_M, "squared_log_partition")
        if is_correct_C is not None:
            sums.add(is_correct_C.float(), labels.kept_M, "num_correct")
        return probabilities_CV, log_partition_C

    def _partition(self, logits_CV: Tensor, labels: Labels, *, count_correct: bool) -> Partition:
        highest_C = logits_CV.amax(dim=1)
        target_C = logits_CV.gather(1, labels.index_M[:, None])[:, 0]
        probabilities_CV = torch.softmax(logits_CV, dim=1)
        # The highest probability is at least 1 / V, so its logarithm is accurate.
        log_partition_C = highest_C - probabilities_CV.amax(dim=1).log_()
        is_correct_C = logits_CV.argmax(dim=1) == labels.index_M if count_correct else None
        return Partition(probabilities_CV, log_partition_C, target_C, is_correct_C)

    def _total(self, d_hidden_MD: Tensor) -> Tensor:
        """Return the gradient over the whole vocabulary."""
        return d_hidden_MD

    def _target(self, labels: Labels) -> tuple[Tensor, Tensor | float]:
        """Return the columns of the targets, ``[C, 1]``, and 1 where the target is in its column."""
        return labels.index_M[:, None], 1.0


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        head_VD: Tensor,
        loss: FusedLinearLoss,
        labels: Labels,
        scale: float,
        loss_scale: Tensor | None,
    ) -> tuple[Tensor, ...]:
        is_trained, has_gradient = ctx.needs_input_grad[1], head_VD.grad is not None
        d_head_VD = torch.zeros_like(head_VD, dtype=torch.float32) if is_trained and not has_gradient else None
        target_VD = d_head_VD if d_head_VD is not None or not is_trained else head_VD.grad
        sums, d_hidden_MD = loss.gradients(hidden_MD.detach(), head_VD.detach(), target_VD, labels, scale, loss_scale)
        ctx.save_for_backward(d_hidden_MD, d_head_VD)
        found = (sums.cross_entropy, sums.squared_log_partition, sums.num_correct, sums.objective)
        ctx.mark_non_differentiable(*found)
        return sums.cross_entropy * scale, *found

    @staticmethod
    def backward(ctx: Any, d_objective: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Pass the gradients on; ``d_objective`` is 1, because the objective is scaled already."""
        del d_objective
        d_hidden_MD, d_head_VD = ctx.saved_tensors
        return d_hidden_MD, d_head_VD, None, None, None, None


class _Sums:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._totals = {
            name: torch.zeros((), dtype=dtype, device=device)
            for name in ("cross_entropy", "squared_log_partition", "num_correct", "objective")
        }

    def add(self, values_C: Tensor, kept_C: Tensor | None, name: str) -> None:
        if kept_C is not None:
            values_C = torch.where(kept_C, values_C, 0.0)
        self._totals[name].add_(values_C.sum(dtype=self._dtype))

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self._totals[name].add_(value)

    def result(self) -> LossSums:
        return LossSums(**self._totals)
