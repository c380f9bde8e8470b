"""What an image encoder contradicts is refused before anything is built, with the setting to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from pictures import picture_configuration
from vorox.core.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("backend=jax", "model.vision.num_layers=2 has no effect"),
        ("tokenizer.special_tokens=[]", "tokenizer.special_tokens=['<|image|>']"),
        ("data.packing=concat", "data.packing=best_fit"),
        ("data.mode=streaming", "data.mode=cached"),
        ("data.transforms=[{name: length, args: {min_characters: 2}}]", "data without transforms"),
        ("parallel.fsdp_size=2", "parallel.fsdp_size=1"),
        ("parallel.tensor_parallel_size=2", "parallel.tensor_parallel_size=1"),
        ("parallel.context_parallel_size=2", "parallel.context_parallel_size=1"),
        ("parallel.pipeline_parallel_size=2", "parallel.pipeline_parallel_size=1"),
        ("parallel.kind=deepspeed", "parallel.kind=native"),
        ("train.forward_backward=mine.py:step", "train.forward_backward=null"),
        ("data.stages=[{start_tokens: 0, sequence_length_tokens: 32}]", "data.stages"),
        ("model.vision.num_layers=0", "images_field"),
        ("model.vision.image_size_pixels=20", "patch_size_pixels x merge_size = 8"),
        ("model.vision.image_size_pixels=8", "fewer than 4"),
        ("data.sequence_length_tokens=5", "data.sequence_length_tokens"),
        ("model.vision.num_heads=3", "model.vision.num_heads=3"),
        ("model.image_processor.max_pixels=401408", "needs model.kind=huggingface"),  # dynamic resolution
    ],
)
def test_contradictions_name_the_setting(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        picture_configuration(tmp_path, [override])
    assert named in str(caught.value)


def test_settings_of_an_encoder_need_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vision\.merge_size"):
        picture_configuration(
            tmp_path, ["model.vision.num_layers=0", "model.vision.merge_size=1", "data.sources.0.images_field=null"]
        )  # fmt: skip
