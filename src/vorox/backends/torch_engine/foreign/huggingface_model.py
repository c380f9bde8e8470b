"""Transformers models: from ``config.json`` to modules, their parameter table and initial weights.

Parameters are created on the meta device; buffers, such as rotary frequencies, have their values. Code of a repository
is never run.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from vorox.backends.torch_engine.foreign import huggingface_dimensions
from vorox.backends.torch_engine.foreign.module_table import check_modules, named_tensors, parameters_on_meta, rows
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.atomic import canonical_json
from vorox.core.platform.installation import install_command
from vorox.core.platform.library_logs import silence_torchao
from vorox.models.arrays.weights_file import open_directory
from vorox.models.huggingface.spec import IMAGE_MODELS, VOLATILE_KEYS, HuggingFaceSpec, auto_class, without_kernels

_WITHOUT_LIMIT = 1 << 20
"""Positions of a model whose configuration sets no maximum, such as Mamba."""
_GROUPED_ELEMENTS = 8
"""The grouped product needs widths of a multiple of 16 bytes: of 8 elements in half precision."""
_KEY = "model.name_or_path"


def describe(
    values: Mapping[str, Any], *, revision: str | None, vocab_size: int | None = None
) -> tuple[HuggingFaceSpec, Any]:
    """Return the spec of a ``config.json``, and its model with parameters on the meta device.

    Args:
        values: Its content.
        revision: Commit of its repository.
        vocab_size: Rows of the embedding, if other than in the file.

    Raises:
        ConfigError: transformers is missing or has no causal language model for it, or a feature is not supported.
    """
    kept = {key: value for key, value in values.items() if key not in VOLATILE_KEYS}
    if vocab_size is not None:
        _text_values(kept)["vocab_size"] = vocab_size
    module = build(kept)
    text: Any = module.config.get_text_config()
    layers = huggingface_dimensions.layer_configs(text)
    attention_widths, layer_windows, has_chunks = huggingface_dimensions.attention(text)
    head = module.get_output_embeddings()
    table = tuple(rows(module, head, huggingface_dimensions.widths(text)))
    inner = max((int(huggingface_dimensions.value_of(layer, "intermediate_size") or 0) for layer in layers), default=0)
    spec = HuggingFaceSpec(
        config=kept,
        revision=revision,
        rows=table,
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=int(module.get_input_embeddings().weight.shape[0]),
        max_positions_tokens=int(getattr(text, "max_position_embeddings", None) or _WITHOUT_LIMIT),
        attention_width=max(attention_widths, default=0),
        attention_widths=attention_widths,
        intermediate_size=inner or 4 * int(text.hidden_size),
        layer_windows=layer_windows,
        has_chunks=has_chunks,
        active_experts=huggingface_dimensions.active_experts(text, table),
        scan_flops_per_position=huggingface_dimensions.scan_flops(module),
    )
    return spec, module


def build(values: Mapping[str, Any], *, attention: str | None = None) -> Any:
    """Build the causal language model of a ``config.json`` with parameters on the meta device.

    Args:
        values: Its content.
        attention: Attention implementation; ``None`` for the choice of transformers.

    Raises:
        ConfigError: transformers is missing or has no causal language model for it, or cannot build it.
    """
    transformers = _transformers()
    config = _configuration(transformers, values)
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with parameters_on_meta():
            module = _auto_class(transformers, values).from_config(
                config, dtype=torch.float32, trust_remote_code=False, **chosen
            )
    except Exception as error:  # transformers raises many types
        raise ConfigError(
            f"transformers cannot build this {values.get('model_type')} model: {_line(error)}", where=_KEY,
            hint="check config.json, and model.attention_kernel if it is set",
        ) from error  # fmt: skip
    check_modules(module, where=_KEY)
    return _with_experts_that_run(module)


def build_random(values: Mapping[str, Any], *, attention: str | None = None) -> Any:
    """Build the causal language model of a ``config.json`` in fp32 on the CPU, with the random weights of its library.

    The generators of PyTorch keep their state. Fails as transformers does.
    """
    transformers = _transformers()
    chosen = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng(devices=[]):
        module = _auto_class(transformers, values).from_config(
            _configuration(transformers, values), dtype=torch.float32, trust_remote_code=False, **chosen
        )
    return _with_experts_that_run(module)


def _with_experts_that_run(module: Any) -> Any:
    """Let experts whose widths PyTorch's grouped product does not take run one by one."""
    stacks = [
        parameter
        for child in module.modules() if isinstance(getattr(child, "num_experts", None), int)
        for parameter in child.parameters(recurse=False) if parameter.ndim == 3
    ]  # fmt: skip
    if any(size % _GROUPED_ELEMENTS for stack in stacks for size in stack.shape[1:]):
        module.set_experts_implementation("eager")
    return module


def random_weights(spec: HuggingFaceSpec, seed: int) -> Iterator[NamedArray]:
    """Yield the random initial weights that transformers gives the model, a function of spec and seed."""
    key = xxhash.xxh3_64_intdigest(canonical_json(["transformers weights", 1, seed])) >> 1
    transformers = _transformers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        module = _auto_class(transformers, spec.config).from_config(
            _configuration(transformers, spec.config), dtype=torch.float32, trust_remote_code=False
        )
    yield from _arrays(spec, named_tensors(module))


def pretrained_weights(spec: HuggingFaceSpec, directory: Path) -> Iterator[NamedArray]:
    """Yield the weights of a directory in table order; new rows of a larger vocabulary are the mean of the others.

    One tensor at a time if the file has the names of the modules. Otherwise transformers loads and converts the model.

    Raises:
        CheckpointError: The files are damaged, or belong to another model.
    """
    files = open_directory(directory)
    aliases = _aliases(build(spec.config))
    stored = {name: file for file in files for name in file.entries}
    found = {canonical: name for name, canonical in aliases.items() if name in stored}
    found |= {canonical: canonical for canonical in aliases.values() if canonical in stored}
    if stored.keys() <= aliases.keys() and found.keys() == {row.name for row in spec.rows}:
        read = ((name, torch.from_numpy(stored[found[name]].read(found[name]))) for name in _names(spec))
        yield from _arrays(spec, read)
        return
    yield from _arrays(spec, named_tensors(_load(spec, directory)))


def _load(spec: HuggingFaceSpec, directory: Path) -> Any:
    transformers = _transformers()
    try:
        module, report = _auto_class(transformers, spec.config).from_pretrained(
            str(directory), dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # transformers' converters raise many types
        raise CheckpointError(f"transformers cannot load the weights: {_line(error)}", where=str(directory)) from error
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if problems:
        kind, names = next(iter(problems.items()))
        raise CheckpointError(
            f"The weights do not match the model: {kind.replace('_', ' ')} {', '.join(names[:3])} ({len(names)} in "
            "total)",
            where=str(directory),
        )
    return module


def _names(spec: HuggingFaceSpec) -> Iterator[str]:
    return (row.name for row in spec.rows)


def _arrays(spec: HuggingFaceSpec, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[NamedArray]:
    shapes = {row.name: row.shape for row in spec.rows}
    for name, tensor in tensors:
        value = tensor.detach().float()
        shape = shapes.get(name, tuple(value.shape))
        if shape and len(value) < shape[0] and value.shape[1:] == shape[1:] and shape[0] == spec.vocab_size:
            mean = value.mean(0, keepdim=True)
            value = torch.cat([value, mean.expand(shape[0] - len(value), *shape[1:])])
        yield name, np.require(value.numpy(), requirements="C")  # a number stays one


def _configuration(transformers: Any, values: Mapping[str, Any]) -> Any:
    model_type = values.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        what = f"transformers {transformers.__version__} has no architecture {model_type!r}"
        if values.get("auto_map"):
            what = f"Model {model_type!r} needs code from its repository, which is never run"
        raise ConfigError(what, where=_KEY, hint="use a transformers architecture, or a newer version of it")
    if values.get("quantization_config"):
        raise ConfigError(
            "The model is quantised; training needs full weights", where=_KEY, hint="use the unquantised model"
        )
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(_decoded(without_kernels(values)))
    except Exception as error:  # transformers raises many types
        raise ConfigError(f"config.json is not valid: {_line(error)}", where=_KEY) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and model_type not in IMAGE_MODELS:
        raise ConfigError(f"transformers has no causal language model for {model_type!r}", where=_KEY)
    return config


def _auto_class(transformers: Any, values: Mapping[str, Any]) -> Any:
    return getattr(transformers, auto_class(values.get("model_type")))


def _decoded(value: Any) -> Any:
    """Decode infinities and NaN in a value of ``config.json``, which transformers writes as mappings."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value)
        if items.keys() == {"__float__"}:
            return float(items["__float__"])
        return {key: _decoded(item) for key, item in items.items()}
    return [_decoded(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _text_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a ``config.json`` that describes the language model."""
    nested = values.get("text_config")
    if nested is None:
        return values
    values["text_config"] = dict(nested)
    return values["text_config"]


def _aliases(module: nn.Module) -> dict[str, str]:
    """Return every name of every parameter and persistent buffer, with its canonical name."""
    canonical = {id(tensor): name for name, tensor in named_tensors(module)}
    every = (*module.named_parameters(remove_duplicate=False), *named_tensors(module))
    return {name: canonical[id(tensor)] for name, tensor in every}


def _transformers() -> Any:
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "model.kind=huggingface needs transformers, which is not installed", where="model.kind",
            hint=install_command("hf"),
        ) from error  # fmt: skip
    silence_torchao()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    module.logging.disable_progress_bar()
    return module


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
