"""A causal language model of transformers on this rank (implements ``network.py``).

Documents of a packed row must not see each other. Whether a model separates them by their
position ids is measured when it is created: on random weights, a document in a packed row must have the logits that it
has alone. If it does not (Mamba, ALiBi, models without position ids), each document runs as a row of its own
(``document_rows.py``). A model in which a token changes earlier logits is refused.

Shape legend: B rows, T positions, M = B x T, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vorox.backends.torch_engine import huggingface_model
from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.document_rows import group_documents
from vorox.backends.torch_engine.inputs import labels_to_device, to_device
from vorox.backends.torch_engine.logits_loss import LogitsLoss
from vorox.backends.torch_engine.loss import Labels, LossSums
from vorox.backends.torch_engine.parameters import FlatParameters, Parameters
from vorox.backends.torch_engine.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.taps import Taps
from vorox.core.batch import IGNORED_LABEL, Batch, Int32Array
from vorox.core.engine import NamedArray
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.huggingface_spec import HuggingFaceSpec

ATTENTION = {"auto": None, "sdpa": "sdpa", "reference": "eager"}
"""``model.attention_kernel`` to the name in transformers; ``None`` for its choice."""
_PROBE_LENGTHS = (7, 9)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference of a document's logits alone and in a packed row, relative to the largest logit, by the precision
of the weights. A leak changes logits by about their own size."""
_log = logging.getLogger("vorox.torch_engine")


class HuggingFaceNetwork:
    """See ``network.Network``.

    Attributes:
        module: The model.
        parameters: Its parameters and gradients on this rank.
        taps: Without points: blocks of transformers have no common form.
        separates_documents: Whether position ids keep the documents of a row apart.
    """

    is_random = True  # whether a model has dropout is not known

    def __init__(self, config: RunConfig, spec: HuggingFaceSpec, compute: Compute, ranks: Ranks) -> None:
        self._config, self._spec, self._compute, self._ranks = config, spec, compute, ranks
        self.taps = Taps(0, compiled=False)
        self.parameters: Parameters
        self.module: Any = huggingface_model.build(spec.config, attention=ATTENTION[config.model.attention_kernel])
        self._place()
        self._checkpoint_blocks()
        self._loss = LogitsLoss(config.loss, count_correct=config.log.accuracy)
        text = self.module.config.get_text_config()
        self._auxiliary_weight = float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0)
        self._takes_positions = "position_ids" in inspect.signature(self.module.forward).parameters
        self.separates_documents = self._probe()

    # -- placement ----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        config, spec, module = self._config, self._spec, self.module
        groups = {"muon": config.optimizer.name == "muon", "decay_embeddings": config.optimizer.decay_embeddings}
        if self._ranks.fsdp_size == 1:
            self.parameters = FlatParameters(spec, **groups, device=self._compute.device)
            _replace(module, self.parameters.modules)
            for child in module.modules():
                for name, buffer in child._buffers.items():
                    child._buffers[name] = None if buffer is None else buffer.to(self._compute.device)
            return
        frozen = [row.name for row in spec.rows if not row.trainable]
        if frozen:
            raise ConfigError(
                f"{frozen[0]} is not trainable, which sharding does not support", where="parallel.fsdp_size",
                hint="set parallel.fsdp_size=1",
            )  # fmt: skip
        self.parameters = sharded = ShardedParameters(spec, **groups, ranks=self._ranks)
        _replace(module, sharded.modules)
        buffers = {name: buffer.to(self._compute.device) for name, buffer in module.named_buffers()}
        reshard = config.parallel.reshard_after_forward
        sharded.shard(module, blocks(module), self._compute.dtype, reshard=reshard)
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._buffers[leaf] = buffer

    def _checkpoint_blocks(self) -> None:
        if self._config.train.activation_checkpointing != "block":
            return
        if not self.module.supports_gradient_checkpointing:
            raise ConfigError(
                f"{type(self.module).__name__} does not support activation checkpointing",
                where="train.activation_checkpointing", hint="set it to none",
            )  # fmt: skip
        enable = getattr(self.module, "activation_checkpointing_enable", None)  # named differently before 5.23
        (enable or self.module.gradient_checkpointing_enable)({"use_reentrant": False})

    def initial_weights(self, seed: int) -> Iterator[NamedArray]:
        """Yield random weights; zeros if pretrained ones are imported before step 1."""
        if self._config.model.pretrained:
            return ((row.name, np.zeros(row.shape, np.float32)) for row in self._spec.rows)
        return huggingface_model.random_weights(self._spec, seed)

    def pretrained_weights(self, directory: Path) -> Iterator[NamedArray]:
        """Yield the weights of a directory of transformers."""
        return huggingface_model.pretrained_weights(self._spec, directory)

    # -- losses and logits --------------------------------------------------------------------------------------------

    def train(
        self, batch: Batch, index: int, *, scale: float, loss_scale: Tensor | None, compiled: bool = True
    ) -> LossSums:
        del compiled
        self.module.train()
        total: LossSums | None = None
        for inputs, labels in self._forward_passes(batch, index):
            logits_MV, auxiliary = self._forward(**inputs)
            objective, sums = self._loss.train(logits_MV, labels)
            if auxiliary is not None:
                objective = objective + auxiliary * _num_targets(labels)
            objective = objective * scale
            (objective if loss_scale is None else objective * loss_scale).backward()
            total = sums if total is None else _added(total, sums)
        assert total is not None
        return total

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        self.module.eval()
        total: LossSums | None = None
        for inputs, labels in self._forward_passes(batch, index):
            sums = self._loss.evaluate(self._forward(**inputs)[0], labels)
            total = sums if total is None else _added(total, sums)
        self.parameters.release()
        assert total is not None
        return total

    @torch.no_grad()
    def logits(self, tokens_BT: Int32Array) -> Tensor:
        self.module.eval()
        logits_MV, _ = self._forward(to_device(tokens_BT, self._compute.device))
        self.parameters.release()
        return logits_MV.view(*tokens_BT.shape, -1)

    def decoder(self, batch_size: int, max_tokens: int) -> PrefixDecoder:
        return PrefixDecoder(self, batch_size, max_tokens)

    def _forward(
        self, tokens: Tensor, positions: Tensor | None = None, is_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits in fp32, ``[M, V]``, and the weighted auxiliary loss of the model, if it has one."""
        given = {"input_ids": tokens.long(), "attention_mask": is_token, "position_ids": positions}
        inputs = {name: value for name, value in given.items() if value is not None}
        with self._compute.autocast():
            output = self.module(**inputs, use_cache=False)
        auxiliary = output.get("aux_loss")
        return output.logits.float().flatten(0, 1), None if auxiliary is None else self._auxiliary_weight * auxiliary

    def _forward_passes(self, batch: Batch, index: int) -> Iterator[tuple[dict[str, Tensor], Labels]]:
        """Yield inputs and labels of the forward passes of a micro-batch: one, or one per group of documents."""
        device = self._compute.device
        tokens_BT, labels_BT = batch.tokens_ABT[index], batch.labels_ABT[index]
        segments_ABT, positions_ABT = batch.segment_ids_ABT, batch.position_ids_ABT
        if segments_ABT is None:
            yield {"tokens": to_device(tokens_BT, device)}, labels_to_device(labels_BT, device)
            return
        if self.separates_documents:
            assert positions_ABT is not None
            positions = to_device(positions_ABT[index], device).long()
            yield {"tokens": to_device(tokens_BT, device), "positions": positions}, labels_to_device(labels_BT, device)
            return
        groups = list(group_documents(tokens_BT, labels_BT, segments_ABT[index]))
        for number in range(self._largest(len(groups))):
            group = groups[number] if number < len(groups) else None
            tokens_GL = np.zeros((1, 1), np.int32) if group is None else group.tokens_GL
            labels_GL = np.full((1, 1), IGNORED_LABEL, np.int32) if group is None else group.labels_GL
            is_token_GL = np.ones((1, 1), np.bool_) if group is None else group.is_token_GL
            mask = to_device(is_token_GL.astype(np.int32), device)
            yield {"tokens": to_device(tokens_GL, device), "is_token": mask}, labels_to_device(labels_GL, device)

    def _largest(self, count: int) -> int:
        """Return the largest count of all ranks: ranks that share a model run equally many forward passes."""
        if self._ranks.fsdp_size == 1:
            return max(1, count)
        largest = torch.tensor(max(1, count), device=self._compute.device)
        self._ranks.maximum(largest)
        return int(largest)

    # -- packed rows --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _probe(self) -> bool:
        """Measure on random weights whether position ids separate the documents of a row.

        Raises:
            ConfigError: A token changes earlier logits.
        """
        self._randomise()
        self.module.eval()
        generator = torch.Generator().manual_seed(0)
        first, second = (
            torch.randint(0, self._spec.vocab_size, (1, length), generator=generator) for length in _PROBE_LENGTHS
        )
        packed = torch.cat([first, second], dim=1)
        alone_LV, packed_TV = self._run_probe(second), self._run_probe(packed)
        tolerance = _TOLERANCE[torch.float32 if self._ranks.fsdp_size == 1 else self._compute.dtype]
        allowed = tolerance * float(alone_LV.abs().max())
        start = _PROBE_LENGTHS[0]
        if not float((packed_TV[:start] - self._run_probe(first)).abs().max()) <= allowed:
            raise ConfigError(
                f"{type(self.module).__name__} is not causal: a token changes earlier logits",
                where="model.name_or_path", hint="use a causal language model",
            )  # fmt: skip
        if not self._takes_positions:
            return False
        positions = torch.cat([torch.arange(length) for length in _PROBE_LENGTHS])[None]
        difference = float((self._run_probe(packed, positions)[start:] - alone_LV).abs().max())
        if difference > allowed and self._config.data.document_mask:
            _log.info("%s carries state between documents; each runs as its own row", type(self.module).__name__)
        return difference <= allowed

    def _run_probe(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        device = self._compute.device
        inputs = {"input_ids": tokens.to(device)}
        if positions is not None:
            inputs["position_ids"] = positions.to(device)
        logits = self.module(**inputs, use_cache=False).logits[0].float().cpu()
        self.parameters.release()
        return logits

    def _randomise(self) -> None:
        """Fill all parameters so that every layer affects the logits: vectors near 1, and matrices that keep scale."""
        generator = torch.Generator(self._compute.device).manual_seed(0)
        for piece in self.parameters.pieces(self.parameters.values):
            if piece.view.ndim < 2:
                piece.view.uniform_(0.5, 1.5, generator=generator)
            else:
                piece.view.normal_(std=piece.view.shape[-1] ** -0.5, generator=generator)


class PrefixDecoder:
    """Decoding that recomputes the whole prefix for each token, so that it equals ``logits`` for any model."""

    def __init__(self, network: HuggingFaceNetwork, batch_size: int, max_tokens: int) -> None:
        self._network, self._max_tokens = network, max_tokens
        self._tokens_BT = np.zeros((batch_size, 0), np.int32)

    def feed(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Append tokens to every sequence and return the logits that follow the last one, fp32 ``[B, V]``."""
        self._tokens_BT = np.concatenate([self._tokens_BT, tokens_BT], axis=1)
        if self._tokens_BT.shape[1] > self._max_tokens:
            end = self._tokens_BT.shape[1]
            raise ConfigError(f"The decoder holds {self._max_tokens} tokens, but got {end}", where="decoder")
        return self._network.logits(self._tokens_BT)[:, -1].cpu().numpy()


def blocks(module: Any) -> list[nn.Module]:
    """Return the repeated blocks: of the classes that transformers does not split, else the longest list of modules."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    found = [child for child in module.modules() if type(child).__name__ in names]
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child)]
    longest = list(max(lists, key=len)) if lists else []
    outer = [child for child in found if not any(child in other.modules() for other in found if other is not child)]
    return outer if len(outer) >= len(longest) else longest


def _replace(module: nn.Module, tensors: dict[str, nn.Parameter]) -> None:
    """Replace parameters and persistent buffers by tensors of the same names, in every module that uses them."""
    replaced = {id(tensor): tensors[name] for name, tensor in huggingface_model.named_tensors(module)}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = replaced[id(parameter)]
        for name, buffer in child._buffers.items():
            if id(buffer) in replaced:
                child._buffers[name] = replaced[id(buffer)].data


def _added(first: LossSums, second: LossSums) -> LossSums:
    return LossSums(*(here + there for here, there in zip(first, second, strict=True)))


def _num_targets(labels: Labels) -> Tensor | int:
    return labels.index_M.numel() if labels.kept_M is None else labels.kept_M.sum()
