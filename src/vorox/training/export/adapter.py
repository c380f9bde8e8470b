"""Export an adapter: as a peft directory beside its base, or merged into the weights of its base.

In: a checkpoint of an adapter. Out: ``adapter_config.json``, ``adapter_model.safetensors`` and the tokenizer; or what
the export of a whole model has, with weights that an engine has merged.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vorox.core.engine import Engine, NamedArray
from vorox.core.errors import CheckpointError
from vorox.core.files import atomic
from vorox.core.files.staged_directory import StagedDirectory
from vorox.models.arrays.weights_file import write_weights
from vorox.models.huggingface.adapter_spec import ADAPTER_CONFIG_NAME, AdapterSpec
from vorox.models.huggingface.spec import auto_class, load_configuration
from vorox.models.stored.weights import stored_entries

ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix of every name in a peft file."""


def write_peft(directory: StagedDirectory, spec: AdapterSpec, adapter: Iterable[NamedArray], stored: str) -> None:
    """Write the adapter with its configuration."""
    directory.write(ADAPTER_CONFIG_NAME, atomic.pretty_json(peft_config(spec)))
    entries = [replace(entry, name=_PREFIX + entry.name, dtype=stored) for entry in stored_entries(spec)]
    arrays = ((_PREFIX + name, array) for name, array in adapter)
    with directory.open(ADAPTER_WEIGHTS_NAME) as writer:
        write_weights(writer, entries, arrays)


def merged(adapter: Iterable[NamedArray], engine: Engine) -> Iterable[NamedArray]:
    """Return the weights of the base with an adapter merged into them; the engine keeps this adapter."""
    engine.import_weights(adapter)
    return engine.merged_weights()


def peft_config(spec: AdapterSpec) -> dict[str, Any]:
    """Return ``adapter_config.json``."""
    adapter = spec.adapter
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _location(spec),
        "revision": spec.revision,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout_fraction,
        "target_modules": list(adapter.target_modules),
        "use_dora": adapter.kind == "dora",
        "fan_in_fan_out": spec.is_transposed,
        "bias": "none",
        "inference_mode": True,
    }


def load_peft(directory: Path, spec: AdapterSpec) -> Any:
    """Load the base with transformers and the exported adapter with peft, in fp32.

    Raises:
        CheckpointError: They cannot be loaded, or do not match.
    """
    peft: Any = importlib.import_module("peft")
    transformers: Any = importlib.import_module("transformers")
    options: dict[str, Any] = {"revision": spec.revision} if spec.revision is not None else {}
    configuration = load_configuration(transformers, _location(spec), **options)
    if spec.adapter.kind == "qlora":
        options["device_map"] = "cpu"
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype="float32",
        )  # fmt: skip
    try:
        base = getattr(transformers, auto_class(spec.config["model_type"])).from_pretrained(
            _location(spec), dtype="float32", config=configuration, **options
        )
        keep_layers_unpacked(base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft calls names that transformers renamed
            model = peft.PeftModel.from_pretrained(base, str(directory))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"Export cannot be loaded by peft: {error}", where=str(directory)) from error
    return model.eval()


def keep_layers_unpacked(model: Any) -> None:
    """Let layers of bitsandbytes compute as on every CPU: with AVX512-BF16 they repack weights of some shapes only."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _location(spec: AdapterSpec) -> str:
    """Return the base for other programs: a name on the hub, or an absolute path."""
    path = Path(spec.adapter.location).expanduser()
    return str(path.absolute()) if path.is_dir() else spec.adapter.location
