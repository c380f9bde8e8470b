"""A causal language model of any ``nn.Module`` on this rank (implements ``network.py``).

``huggingface_network.py`` builds transformers models, ``user_model.py`` models of the user.

Documents of a packed row must not see each other. Whether a model separates them, attention by position ids and Mamba
layers by resets (``packed_mixers.py``), is measured when it is created (``separation_probe.py``). If it does not
(ALiBi, models without position ids), each document runs as a row of its own (``document_rows.py``), or in a forward
pass of its own if rows of other lengths change it. A model in which a token changes earlier logits is refused.

Shape legend: B rows, T positions, M = B x T, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.device.inputs import RowPositions
from vorox.backends.torch_engine.device.labels import Labels, labels_of, labels_to_device
from vorox.backends.torch_engine.foreign.document_rows import group_documents
from vorox.backends.torch_engine.foreign.module_table import move_buffers, named_tensors, replace_tensors
from vorox.backends.torch_engine.foreign.separation_probe import Separation, exact_products
from vorox.backends.torch_engine.layouts.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.layouts.zero_parameters import ZeroParameters
from vorox.backends.torch_engine.losses.dpo_loss import (
    PairSums,
    answer_log_probs,
    dpo_loss,
    log_probs_of_logits,
    targets_to_device,
)
from vorox.backends.torch_engine.losses.logits_loss import LogitsLoss
from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.backends.torch_engine.network import Network
from vorox.backends.torch_engine.networks.decoder import PrefixDecoder
from vorox.backends.torch_engine.optimizers.optimizer_in_backward import check_passes, flat_parameters
from vorox.backends.torch_engine.parallel import module_plan
from vorox.backends.torch_engine.parallel.share import Share, share_of
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.backends.torch_engine.taps import Taps
from vorox.core.batch import IGNORED_LABEL, AnyImages, Batch, Int32Array
from vorox.core.engine import NamedArray
from vorox.core.errors import ConfigError
from vorox.core.preference_pairs import Pairs, find_pairs
from vorox.core.schema import RunConfig
from vorox.models.module_spec import ModuleSpec
from vorox.models.optimizer_groups import optimizer_groups

_log = logging.getLogger("vorox.torch_engine")


class ModuleNetwork(Network):
    """See ``network.Network``.

    It has no points for taps: blocks of other models have no common form.
    """

    setting: str
    """The setting that names the model, for messages."""

    def __init__(self, config: RunConfig, spec: ModuleSpec, compute: Compute, ranks: Ranks) -> None:
        self._config, self._spec, self._compute, self._ranks = config, spec, compute, ranks
        self.taps = Taps(())
        self.module: Any = self._build()
        self._run: Callable[..., Any] = self.module
        with exact_products():
            self._separation = self._probe()  # before the parameters take their memory
        if self._separation != "packed" and config.data.document_mask:
            where = "in a forward pass of its own" if self._separation == "single" else "as its own row"
            _log.info("%s does not separate the documents of a row; each runs %s", type(self.module).__name__, where)
        self._place()
        if config.train.activation_checkpointing == "block":
            self._recompute_blocks()
        self.loss = LogitsLoss(config.loss, count_correct=config.log.accuracy)
        check_passes(config, self.separates_documents)

    @property
    def resets_states(self) -> bool:
        """Whether recurrent layers start at zero in every document of a row."""
        return False

    @property
    def separates_documents(self) -> bool:
        """Whether the documents of a row run in one forward pass, and do not see each other."""
        return self._separation == "packed"

    @property
    def is_random(self) -> bool:
        return True  # whether a model has dropout is not known

    @abstractmethod
    def _build(self) -> nn.Module:
        """Build the model with parameters on the meta device."""

    @abstractmethod
    def _recompute_blocks(self) -> None:
        """Save only the inputs of blocks for the backward pass."""

    @cached_property
    def _takes_positions(self) -> bool:
        """Whether the model accepts the position of every token."""
        return "position_ids" in inspect.signature(self.module.forward).parameters

    @abstractmethod
    def _call(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        is_token: Tensor | None,
        documents: Tensor | None,
        **images: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model.

        Args:
            tokens: Token ids, ``[B, T]``.
            positions: Position of each token in its document, ``[B, T]``; ``None`` for consecutive ones.
            is_token: Whether there is a token, ``[B, T]``; padding is at the end of rows. ``None`` without padding.
            documents: Document of each token, ``[B, T]``; ``None`` if every row is one document.
            images: Inputs of a model that reads images.

        Returns:
            Logits ``[B, T, V]``, and the auxiliary loss per target, if the model has one.
        """

    @abstractmethod
    def initial_weights(self, seed: int) -> Iterator[NamedArray]:
        """Yield initial weights, a function of the seed."""

    # -- placement ----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        config, spec, module = self._config, self._spec, self.module
        groups = optimizer_groups(spec, config.optimizer)
        is_zero = config.parallel.kind == "deepspeed"
        share = self._share_of(module)
        if self._ranks.num_fsdp_shards == 1 and not is_zero:
            flat = flat_parameters(config, spec, groups, device=self._compute.device, table=share.table)
            self.parameters = share.place(flat, groups)
            replace_tensors(module, flat.modules)
            share.divide(module, flat.modules)
            move_buffers(module, self._compute.device)
            return
        if is_zero:
            frozen = [row.name for row in spec.rows if not row.trainable]
            if frozen:
                raise ConfigError(
                    f"{frozen[0]} is not trainable, which DeepSpeed does not support", where="parallel.kind",
                    hint="set parallel.kind=native; FSDP2 supports it",
                )  # fmt: skip
            device, dtype = self._compute.device, self._compute.dtype
            self.parameters = zero = ZeroParameters(config, spec, groups, self._ranks, device, dtype)
            replace_tensors(module, zero.modules)
            move_buffers(module, device)
            self._run = zero.shard_by_zero(module, external={})
            return
        buffers = {name for name, _ in named_tensors(module)} - {name for name, _ in module.named_parameters()}
        constants = dict.fromkeys(sorted(buffers), self._compute.device)
        sharded = ShardedParameters(spec, groups, ranks=self._ranks, table=share.table, constants=constants)
        self.parameters = share.place(sharded, groups)
        replace_tensors(module, sharded.modules)
        share.divide(module, sharded.modules)
        move_buffers(module, self._compute.device)
        reshard = config.parallel.reshard_after_forward
        sharded.shard(module, self._sharded_units(), self._compute.dtype, reshard=reshard)

    def _share_of(self, module: nn.Module) -> Share:
        """Return this rank's share of a model, whose parameters are still whole."""
        plans = partial(module_plan.tensor_plan, module), partial(module_plan.expert_plan, module)
        return share_of(self._spec, self._ranks, *plans)

    def _sharded_units(self) -> list[nn.Module]:
        """Return the modules that FSDP2 gathers as a whole: all ranks run each of them in every forward pass."""
        return blocks(self.module)

    # -- losses and logits --------------------------------------------------------------------------------------------

    def train(
        self,
        batch: Batch,
        index: int,
        *,
        scale: float,
        loss_scale: Tensor | None,
        reference_H: Tensor | None = None,
        compiled: bool = True,
    ) -> LossSums | PairSums:
        del compiled
        self.module.train()
        if reference_H is not None:
            return self._train_on_pairs(batch, index, reference_H, scale, loss_scale)
        total: LossSums | None = None
        for inputs, labels in self._forward_passes(batch, index):
            logits_MV, auxiliary = self._forward(**inputs)
            objective, sums = self.loss.train(logits_MV, labels)
            if auxiliary is not None:
                objective = objective + auxiliary * _num_targets(labels)
            self.parameters.backward(objective * scale, loss_scale)
            total = sums if total is None else _added(total, sums)
        assert total is not None
        return total

    def is_single_pass(self, batch: Batch) -> bool:
        return batch.segment_ids_ABT is None or self.separates_documents

    def metrics(self, count: int) -> dict[str, Tensor]:
        del count
        return {}

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        self.module.eval()
        total: LossSums | None = None
        for inputs, labels in self._forward_passes(batch, index):
            sums = self.loss.evaluate(self._forward(**inputs)[0], labels)
            total = sums if total is None else _added(total, sums)
        self.parameters.release()
        assert total is not None
        return total

    def check_pairs(self) -> None:
        if not self.separates_documents:
            raise ConfigError(
                f"{type(self.module).__name__} carries state between the documents of a row, and loss.name=dpo needs "
                "both answers of a pair in one forward pass", where="loss.name",
                hint="choose a model that separates documents by their position ids",
            )  # fmt: skip

    def _train_on_pairs(
        self, batch: Batch, index: int, reference_H: Tensor, scale: float, loss_scale: Tensor | None
    ) -> PairSums:
        pairs = find_pairs(batch, index)
        policy_H, auxiliary = self._answer_log_probs(batch, index, pairs)
        loss, sums = dpo_loss(policy_H, reference_H, self._config.loss, pairs.masked_P)
        if auxiliary is not None:
            loss = loss + auxiliary * (len(policy_H) // 2)
        self.parameters.backward(loss * scale, loss_scale)
        return sums

    @torch.no_grad()
    def answer_log_probs(self, batch: Batch, index: int) -> Tensor:
        self.module.eval()
        found, _ = self._answer_log_probs(batch, index, find_pairs(batch, index))
        self.parameters.release()
        return found

    def _answer_log_probs(self, batch: Batch, index: int, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each answer, and the auxiliary loss of the model, if it has one."""
        ((inputs, _),) = self._forward_passes(batch, index)
        targets = targets_to_device(pairs, self._compute.device)
        logits_MV, auxiliary = self._forward(**inputs)
        return answer_log_probs(log_probs_of_logits(logits_MV, targets), targets), auxiliary

    @torch.no_grad()
    def logits(self, tokens_BT: Int32Array) -> Tensor:
        self.module.eval()
        logits_MV, _ = self._forward(to_device(tokens_BT, self._compute.device))
        self.parameters.release()
        return logits_MV.view(*tokens_BT.shape, -1)

    def decoder(self, batch_size: int, max_tokens: int, images: AnyImages | None = None) -> PrefixDecoder:
        assert images is None, "refused with the configuration"
        return PrefixDecoder(self.logits, batch_size, max_tokens)

    def _forward(
        self, tokens: Tensor, positions: Tensor | None = None, is_token: Tensor | None = None,
        documents: Tensor | None = None, **images: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the logits in fp32, ``[M, V]``, and the auxiliary loss of the model, if it has one."""
        with self._compute.autocast():
            logits, auxiliary = self._call(tokens.long(), positions, is_token, documents, **images)
        return logits.float().flatten(0, 1), auxiliary

    def _forward_passes(self, batch: Batch, index: int) -> Iterator[tuple[dict[str, Tensor], Labels]]:
        """Yield inputs and labels of the forward passes of a micro-batch: one, or one per group of documents."""
        device, part = self._compute.device, self._ranks.position_part
        rows = RowPositions.of(batch, index, part)
        if rows.segments_BT is None or self.separates_documents:
            inputs = {"tokens": to_device(rows.tokens_BP, device)}
            if rows.segments_BT is not None:
                inputs["documents"] = to_device(rows.segments_BT, device)
            if rows.positions_BP is not None:
                inputs["positions"] = to_device(rows.positions_BP, device).long().expand(rows.tokens_BP.shape)
            yield inputs, labels_of(batch, index, part, device)
            return
        most = 1 if self._separation == "single" else None
        groups = list(
            group_documents(batch.tokens_ABT[index], batch.labels_ABT[index], rows.segments_BT, max_documents=most)
        )
        for number in range(self._largest(len(groups))):
            group = groups[number] if number < len(groups) else None
            tokens_GL = np.zeros((1, 1), np.int32) if group is None else group.tokens_GL
            labels_GL = np.full((1, 1), IGNORED_LABEL, np.int32) if group is None else group.labels_GL
            is_token_GL = np.ones((1, 1), np.bool_) if group is None else group.is_token_GL
            mask = to_device(is_token_GL.astype(np.int32), device)
            yield {"tokens": to_device(tokens_GL, device), "is_token": mask}, labels_to_device(labels_GL, device)

    def _largest(self, count: int) -> int:
        """Return the largest count of all ranks: ranks that share a model run equally many forward passes."""
        is_whole = self._ranks.num_fsdp_shards == 1 and self._ranks.expert_parallel_size == 1
        return max(1, count) if is_whole else self._ranks.maximum_count(max(1, count))

    @abstractmethod
    def _probe(self) -> Separation:
        """Measure how documents are separated.

        Raises:
            ConfigError: A token changes earlier logits.
        """

    @property
    def _weights_dtype(self) -> torch.dtype:
        """Precision of the weights in a forward pass without autocast."""
        is_whole = self._ranks.num_fsdp_shards == 1 and self._config.parallel.kind == "native"
        return torch.float32 if is_whole else self._compute.dtype


def blocks(module: Any) -> list[nn.Module]:
    """Return the repeated blocks: of classes that transformers does not split, else the longest list of modules."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    found = [child for child in module.modules() if type(child).__name__ in names]
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child)]
    longest = list(max(lists, key=len)) if lists else []
    outer = [child for child in found if not any(child in other.modules() for other in found if other is not child)]
    return outer if len(outer) >= len(longest) else longest


def _added(first: LossSums, second: LossSums) -> LossSums:
    return LossSums(*(here + there for here, there in zip(first, second, strict=True)))


def _num_targets(labels: Labels) -> Tensor | int:
    return labels.index_M.numel() if labels.kept_M is None else labels.kept_M.sum()
