"""A causal language model in transformers on this rank (see ``module_network.py``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.attention.context_parallel import ContextParallel
from vorox.backends.torch_engine.attention.huggingface_context import AttentionExchange
from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.device.inputs import RowPositions, add_noise
from vorox.backends.torch_engine.device.labels import Labels
from vorox.backends.torch_engine.foreign import huggingface_model, huggingface_probe
from vorox.backends.torch_engine.foreign.packed_mixers import PackedMixers
from vorox.backends.torch_engine.foreign.separation_probe import Separation, check_causal, measure_separation
from vorox.backends.torch_engine.low_precision.fake_quantization import quantize_modules
from vorox.backends.torch_engine.low_precision.float8_linear import convert_modules
from vorox.backends.torch_engine.networks.decoder import PrefixDecoder
from vorox.backends.torch_engine.networks.huggingface_images import image_inputs, language_blocks, unused_tower
from vorox.backends.torch_engine.networks.module_network import ModuleNetwork
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.batch import AnyImages, Batch, Int32Array
from vorox.core.config.checks.parallel import CONTEXT_SIZE, PIPELINE_SIZE
from vorox.core.engine import NamedArray
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.huggingface.spec import IMAGE_MODELS, HuggingFaceSpec

_log = logging.getLogger("vorox.torch_engine")
ATTENTION = {"auto": None, "sdpa": "sdpa", "reference": "eager"}
"""``model.attention_kernel`` to the name in transformers; ``None`` for its choice."""


class HuggingFaceNetwork(ModuleNetwork):
    """See ``ModuleNetwork``."""

    setting = "model.name_or_path"
    _spec: HuggingFaceSpec

    def __init__(self, config: RunConfig, spec: HuggingFaceSpec, compute: Compute, ranks: Ranks) -> None:
        super().__init__(config, spec, compute, ranks)
        # After the probe of documents, whose tolerance rounded inputs would exceed.
        quantize_modules(self.module, config.train.quantization_aware)
        convert_modules(self.module, compute, config.precision)

    def _build(self) -> nn.Module:
        module = huggingface_model.build(self._spec.config, attention=ATTENTION[self._config.model.attention_kernel])
        self._mixers = PackedMixers(module)
        context = ContextParallel.of(self._ranks)
        self._exchange = None if context is None else AttentionExchange(module, context)
        part, alpha = self._ranks.position_part, self._config.train.embedding_noise
        if alpha is not None:

            def hook(layer: nn.Module, _: Any, x_BTD: Tensor) -> Tensor:
                if not layer.training:
                    return x_BTD
                return add_noise(x_BTD.flatten(0, 1), alpha, x_BTD.shape[1], part).view_as(x_BTD)

            module.get_input_embeddings().register_forward_hook(hook)
        return module

    @property
    def resets_states(self) -> bool:
        return bool(self._mixers)

    def _recompute_blocks(self) -> None:
        recompute_blocks(self.module)

    @property
    def _reads_images(self) -> bool:
        return self._spec.config["model_type"] in IMAGE_MODELS

    @cached_property
    def _auxiliary_weight(self) -> float:
        """What transformers multiplies the load-balancing loss by; models differ in where they keep it."""
        text: Any = self.module.config.get_text_config()
        holders = (
            (self.module, "router_aux_loss_coef"),
            (self.module, "aux_loss_coef"),
            (text, "router_aux_loss_coef"),
        )
        given = (getattr(holder, name, None) for holder, name in holders)
        return float(next((value for value in given if value is not None), 0.0))

    def _forward_passes(self, batch: Batch, index: int) -> Iterator[tuple[dict[str, Tensor], Labels]]:
        if self._exchange is None and batch.images_A is None:
            yield from super()._forward_passes(batch, index)
            return
        ((inputs, labels),) = super()._forward_passes(batch, index)
        if self._exchange is not None:
            rows = RowPositions.of(batch, index, self._ranks.position_part)
            masks = self._exchange.masks(rows, self._compute.device, self._weights_dtype)
            yield inputs | {"attention_mask": masks}, labels
            return
        assert batch.images_A is not None
        positions = None if batch.position_ids_ABT is None else batch.position_ids_ABT[index]
        yield inputs | self._image_inputs(batch.images_A[index], batch.tokens_ABT[index], positions), labels

    def _image_inputs(
        self, images: AnyImages, tokens_BT: Int32Array, positions_BT: Int32Array | None
    ) -> dict[str, Tensor]:
        if positions_BT is None:
            positions_BT = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
        processor = self._config.model.image_processor
        return image_inputs(images, tokens_BT, positions_BT, processor, self._compute.device)

    @torch.no_grad()
    def _logits_with_images(self, images: AnyImages, tokens_BT: Int32Array) -> Tensor:
        self.module.eval()
        inputs = self._image_inputs(images, tokens_BT, None)
        logits_MV, _ = self._forward(to_device(tokens_BT, self._compute.device), **inputs)
        self.parameters.release()
        return logits_MV.view(*tokens_BT.shape, -1)

    def decoder(self, batch_size: int, max_tokens: int, images: AnyImages | None = None) -> PrefixDecoder:
        if images is None:
            return super().decoder(batch_size, max_tokens)
        return PrefixDecoder(partial(self._logits_with_images, images), batch_size, max_tokens)

    def _call(
        self, tokens: Tensor, positions: Tensor | None, is_token: Tensor | None, documents: Tensor | None,
        **images: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        self._mixers.documents_BT = documents if self.resets_states else None
        if self._exchange is not None:
            self._exchange.select(is_divided="attention_mask" in images)
        output = self._run(**self._keywords(tokens, positions, is_token, **images), use_cache=False)
        auxiliary = output.get("aux_loss")
        has_images = self._config.model.image_processor.patch_size_pixels is not None
        if self._ranks.num_fsdp_shards > 1 and has_images and "pixel_values" not in images:
            return output.logits, unused_tower(self.module)
        return output.logits, None if auxiliary is None else self._auxiliary_weight * auxiliary

    def _keywords(
        self, tokens: Tensor, positions: Tensor | None, is_token: Tensor | None, **images: Tensor
    ) -> dict[str, Tensor]:
        """Return the arguments of a forward pass."""
        if self._reads_images and positions is not None and positions.ndim == 2:
            positions = positions.expand(4, *positions.shape)  # in the document, time, height, width
        positions = positions if self._takes_positions else None
        given = {"input_ids": tokens, "attention_mask": is_token, "position_ids": positions, **images}
        return {name: value for name, value in given.items() if value is not None}

    def _probe(self) -> Separation:
        """Measure a small copy of the model.

        Raises:
            ConfigError: A token changes earlier logits, or a micro-batch runs in one pass, and the model carries state
                between the documents of a row.
        """
        config, device = self._config, self._compute.device
        kernel = ATTENTION[config.model.attention_kernel]
        found = huggingface_probe.small_copy(
            self._spec, attention=kernel, length=config.data.sequence_length_tokens, device=device
        )
        if found is None:
            _log.warning("No small %s model can be built to measure it; documents run one by one", self._spec.label)
            return self._check_passes("single")
        copy, length = found
        mixers = PackedMixers(copy)

        def run(tokens: Tensor, positions: Tensor | None, is_token: Tensor | None, documents: Tensor | None) -> Tensor:
            mixers.documents_BT = documents if self.resets_states else None
            return copy(**self._keywords(tokens, positions, is_token), use_cache=False).logits

        vocab_size = int(copy.get_input_embeddings().weight.shape[0])
        name = type(self.module).__name__
        check_causal(run, vocab_size=vocab_size, length=length, device=device, name=name, where=self.setting)
        can_pack = self._takes_positions or self.resets_states
        return self._check_passes(
            measure_separation(run, can_pack=can_pack, vocab_size=vocab_size, length=length, device=device)
        )

    def _check_passes(self, found: Separation) -> Separation:
        """Check that a model whose documents need rows of their own may run a micro-batch in several passes."""
        parallel = self._config.parallel
        sizes = {PIPELINE_SIZE: parallel.pipeline_parallel_size, CONTEXT_SIZE: parallel.context_parallel_size}
        for key, size in sizes.items():
            if size > 1 and self._config.data.document_mask and found != "packed":
                raise ConfigError(
                    f"The {self._spec.label} model carries state between the documents of a row, and with {key} above "
                    "1, each micro-batch runs in one pass", where=f"{key}, data.document_mask",
                    hint="set data.document_mask=false, or use data_parallel_size and fsdp_size",
                )  # fmt: skip
        return found

    def _sharded_units(self) -> list[nn.Module]:
        return language_blocks(self.module)  # the vision tower is gathered with the root: some ranks have no images

    def initial_weights(self, seed: int) -> Iterator[NamedArray]:
        """Yield random weights; zeros if pretrained ones are imported before step 1."""
        if self._config.model.pretrained:
            return ((row.name, np.zeros(row.shape, np.float32)) for row in self._spec.rows)
        return huggingface_model.random_weights(self._spec, seed)

    def pretrained_weights(self, directory: Path) -> Iterator[NamedArray]:
        """Yield the weights of a transformers directory."""
        return huggingface_model.pretrained_weights(self._spec, directory)


def recompute_blocks(model: Any) -> None:
    """Save only the inputs of the blocks of a transformers model.

    Raises:
        ConfigError: The model does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} does not support activation checkpointing",
            where="train.activation_checkpointing", hint="set it to none",
        )  # fmt: skip
    enable = getattr(model, "activation_checkpointing_enable", None)  # named differently before 5.23
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
