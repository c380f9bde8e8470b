"""Quantise a transformers model with torchao, and measure what transformers computes with it.

In: a directory with ``config.json`` and ``model.safetensors``. Out: the same with the linear layers of the blocks in 8
or 4 bits and a ``quantization_config``, which ``AutoModelForCausalLM.from_pretrained`` reads. The file is safetensors;
nothing is pickled.

Shape legend: M positions of a forward pass, V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.device.labels import Labels, labels_to_device
from vorox.backends.torch_engine.foreign.document_rows import group_documents
from vorox.backends.torch_engine.losses.logits_loss import LogitsLoss
from vorox.backends.torch_engine.low_precision import int4_linear
from vorox.backends.torch_engine.low_precision.affine_quantization import GROUP_INPUTS
from vorox.core.batch import Batch
from vorox.core.engine import EvalValues
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.core.platform.library_logs import silence_torchao
from vorox.core.schema import LossConfig

_KEY = "--quantize"


def check_quantization(scheme: str, device: str) -> None:
    """Check that this machine can quantise by a scheme, and compute with it.

    Args:
        scheme: How to quantise.
        device: Where the quantised model runs: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: torchao or transformers is missing, or 4 bits have no kernel for the device.
    """
    missing = [name for name in ("torchao", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"Quantising needs {missing[0]}", where=_KEY, hint=install_command("compress"))
    if scheme == "int4" and device == "cuda" and not has_cuda_int4():
        raise ConfigError(
            "int4 on CUDA needs a GPU and the kernels of mslk", where=_KEY,
            hint="pip install mslk, or run it with PyTorch's kernel on the CPU: --device cpu",
        )  # fmt: skip


def has_cuda_int4() -> bool:
    """Whether this machine has a CUDA device and the kernels for products with 4-bit weights."""
    return torch.cuda.is_available() and importlib.util.find_spec("mslk") is not None


def quantize(source: Path, target: Path, scheme: str) -> None:
    """Quantise the model in a directory and write it to another directory.

    Args:
        source: ``config.json`` and ``model.safetensors``.
        target: An existing directory.
        scheme: ``int8-weight-only``, ``int8-dynamic`` or ``int4``.

    Raises:
        ConfigError: The model has no linear layer to quantise.
    """
    silence_torchao()
    import transformers
    from torchao import quantization
    from transformers.quantizers.auto import AutoHfQuantizer

    settings: Mapping[str, Callable[[], Any]] = {
        "int8-weight-only": quantization.Int8WeightOnlyConfig,
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "int4": lambda: quantization.Int4WeightOnlyConfig(group_size=GROUP_INPUTS),
    }
    torchao_config = transformers.TorchAoConfig(settings[scheme]())
    with _quiet_transformers(transformers):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(source), quantization_config=None if scheme == "int4" else torchao_config, dtype="float32",
            local_files_only=True,
        )  # fmt: skip
        if scheme == "int4":  # torchao's own needs mslk, and thus CUDA
            int4_linear.quantize_linears(model)
            model.hf_quantizer = AutoHfQuantizer.from_config(torchao_config)
            model.config.quantization_config = torchao_config
        if not any(_is_quantized(child) for child in model.modules()):
            raise ConfigError(
                f"{type(model).__name__} has no linear layer that torchao quantises", where=_KEY,
                hint=_needs(scheme),
            )  # fmt: skip
        model.save_pretrained(str(target))


def _needs(scheme: str) -> str:
    groups = f" whose inputs are a multiple of {GROUP_INPUTS}" if scheme == "int4" else ""
    return f"GPT-2 stores transposed matrices; train a family with linear layers{groups}, such as llama"


def load_quantized(directory: Path, device: str) -> Any:
    """Load a quantised model with transformers; on a CPU, 4-bit weights get PyTorch's kernel."""
    silence_torchao()
    import transformers

    with _quiet_transformers(transformers):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), dtype="auto", local_files_only=True, device_map=device
        )
    if device == "cpu":
        int4_linear.use_cpu_kernel(model)
    return model.eval()


def _is_quantized(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and type(weight).__module__.startswith("torchao.")


class TransformersModel:
    """A model that transformers loads from a directory, quantised or not.

    Args:
        directory: The model.
        device: Where it runs: ``cpu`` or ``cuda``.
    """

    def __init__(self, directory: Path, device: str) -> None:
        self._device = torch.device(device)
        self._model = load_quantized(directory, device)
        self._loss = LogitsLoss(LossConfig(), count_correct=True)

    @torch.inference_mode()
    def eval_step(self, batch: Batch) -> EvalValues:
        """Sum the loss of a batch; each document of a packed row is a row of its own."""
        loss_sum, num_correct = 0.0, 0
        for index in range(batch.tokens_ABT.shape[0]):
            for inputs, labels in self._forward_passes(batch, index):
                logits_MV = self._model(**inputs, use_cache=False).logits.float().flatten(0, 1)
                sums = self._loss.evaluate(logits_MV, labels)
                loss_sum += float(sums.cross_entropy)
                num_correct += int(sums.num_correct)
        return EvalValues(loss_sum, batch.num_target_tokens, num_correct)

    def _forward_passes(self, batch: Batch, index: int) -> Iterator[tuple[dict[str, Tensor], Labels]]:
        tokens_BT, labels_BT = batch.tokens_ABT[index], batch.labels_ABT[index]
        if batch.segment_ids_ABT is None:
            yield {"input_ids": to_device(tokens_BT, self._device).long()}, labels_to_device(labels_BT, self._device)
            return
        for group in group_documents(tokens_BT, labels_BT, batch.segment_ids_ABT[index]):
            inputs = {
                "input_ids": to_device(group.tokens_GL, self._device).long(),
                "attention_mask": to_device(group.is_token_GL.astype("int32"), self._device),
            }
            yield inputs, labels_to_device(group.labels_GL, self._device)

    @torch.inference_mode()
    def decoding_seconds(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Decode greedily with the key/value cache and return the time."""
        tokens = torch.tensor([list(prompt)], device=self._device)
        started = time.perf_counter()
        self._model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
            min_new_tokens=num_tokens, max_new_tokens=num_tokens,
        )  # fmt: skip
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


@contextlib.contextmanager
def _quiet_transformers(transformers: Any) -> Generator[None]:
    """Hide the progress bars of reading and writing weights."""
    log = transformers.utils.logging
    was_enabled = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            log.enable_progress_bar()
