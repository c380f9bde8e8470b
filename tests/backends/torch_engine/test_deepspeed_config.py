"""What DeepSpeed is configured with, and what is refused before anything is built."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import configuration
from vorox.core.config import load_config
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ZERO = ["parallel.kind=deepspeed", "backend=torch"]
REPOSITORY = Path(__file__).parents[3]


def config_of(folder: Path, *overrides: str) -> RunConfig:
    configuration(folder)
    return load_config(folder / "tiny.yaml", [*ZERO, *overrides])


def content_of(folder: Path, content: Any, *overrides: str) -> dict[str, Any]:
    """What a file of this content becomes for two ranks."""
    from vorox.backends.torch_engine.layouts.deepspeed_config import deepspeed_config

    file = folder / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return deepspeed_config(config_of(folder, f"parallel.deepspeed_config={file}", *overrides), 2)


@pytest.mark.parametrize(("name", "stage"), [("prototype", 2), ("production", 3)])
def test_the_files_of_the_repository_are_accepted(tmp_path: Path, name: str, stage: int) -> None:
    text = (REPOSITORY / "configs" / f"ds_config_{name}.json").read_text(encoding="utf-8")
    found = content_of(tmp_path, text, "precision.dtype=bf16", "optimizer.clip_norm=0.5")
    assert found["zero_optimization"]["stage"] == stage
    assert found["gradient_clipping"] == 0.5
    assert found["bf16"]["enabled"] is True
    assert "auto" not in json.dumps(found)


def test_equal_values_are_accepted(tmp_path: Path) -> None:
    found = content_of(
        tmp_path,
        {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        },
    )
    assert found["zero_optimization"]["reduce_bucket_size"] == 1000


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"train_batch_size": 64}, ["train_batch_size = 64", "train.global_batch_sequences = 4"]),
        ({"gradient_accumulation_steps": 8}, ["gradient_accumulation_steps = 8", "1 micro-batches"]),
        ({"gradient_clipping": 0.25}, ["gradient_clipping = 0.25", "optimizer.clip_norm"]),
        ({"bf16": {"enabled": True}}, ["bf16.enabled = true", "precision.dtype = fp32"]),
        ({"optimizer": {"params": {"lr": 3e-4}}}, ["optimizer.params.lr = 0.0003", "optimizer.lr = 0.01"]),
        ({"optimizer": {"type": "Lamb"}}, ["optimizer.type = Lamb", "optimizer.name = adamw"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler.type", "schedule.*"]),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, ["train.activation_checkpointing"]),
        ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, ["zero_quantized_weights"]),
        ({"zero_optimization": {"stage": 0}}, ["zero_optimization.stage = 0", "parallel.kind=native"]),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, ["overlap_comm", "stage 1"]),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, ["offload_param.device = nvme"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_file_that_contradicts_the_run_is_refused(tmp_path: Path, entries: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        content_of(tmp_path, {"zero_optimization": {"stage": 2}, **entries})
    assert refused.value.where == "parallel.deepspeed_config"
    said = f"{refused.value} {refused.value.hint}"
    assert [word for word in named if word not in said] == [], said


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_file_without_zero_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"ds\.json"):
        content_of(tmp_path, text)


@pytest.mark.parametrize(
    "override",
    ["optimizer.name=muon", "precision.dtype=fp16", "train.ema_decay=0.9", "runtime.compile=true",
     "train.spike_policy=skip", "parallel.fsdp_size=2", "parallel.zero_offload=parameters",
     "runtime.determinism=bitwise-any-world",
     "optimizer.groups=[{match: '*', frozen: true}]"],
)  # fmt: skip
def test_settings_that_zero_does_not_support_are_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.")):
        config_of(tmp_path, override)


def test_without_deepspeed_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vorox.backends.torch_engine.layouts import zero_parameters

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ConfigError) as refused:
        zero_parameters._load(torch.device("cpu"))
    assert "[deepspeed]" in str(refused.value.hint)
