"""The recipe of Qwen2.5-VL 3B: the plan of the published size, and training of a tiny model on real files.

The oracle of training is transformers: its image processor, its tokenizer and its model, one document in a forward
pass.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from image_text_models import (
    as_published,
    packed_documents,
    plain_inputs,
    records_of,
    write_captions,
    write_image_model,
    write_tokenizer,
)
from training_device import DEVICE
from vorox.cli import main
from vorox.core.batch import DataShard
from vorox.core.config import load_config
from vorox.data.corpus.corpus import prepare
from vorox.records.replay_chain import number, read_chain
from vorox.training.steps.dataloading import preview_batches

pytest.importorskip("transformers")
pytestmark = [pytest.mark.hf, pytest.mark.torch]
ROOT = Path(__file__).parents[2]
RECIPE = "configs/qwen2_5_vl_3b.yaml"
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70,
    "model_type": "qwen2_5_vl", "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
"""The published ``config.json``."""
PROCESSOR = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
NUM_PARAMETERS = 3_754_622_976
"""The elements of the published weights."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


@pytest.mark.slow
def test_the_plan_of_the_published_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(PUBLISHED))
    (folder / "model/preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    write_tokenizer(folder / "model")
    arguments = ["plan", RECIPE, "--hardware", "h100", "--json", "model.name_or_path=model"]
    assert main([*arguments, "model.pretrained=false"]) == 0  # there are no weights here
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    trained = sum_of_language_parameters()
    memory = found["memory"]
    assert memory["parameter_bytes"] == pytest.approx(4 * NUM_PARAMETERS, rel=1e-6)
    assert memory["optimizer_bytes"] == pytest.approx(8 * trained, rel=1e-6)


def sum_of_language_parameters() -> int:
    """By hand: a tied embedding, and of each layer attention with biases, a gated MLP and two norms."""
    width, inner, keys, layers = 2048, 11008, 256, 36
    attention = 2 * width * width + width + 2 * (width * keys + keys)
    return 151936 * width + layers * (attention + 3 * width * inner + 2 * width) + width


@pytest.mark.slow
def test_a_tiny_model_in_the_published_form_trains_from_the_recipe(folder: Path) -> None:
    import torch
    import transformers

    model = as_published(write_image_model(folder / "model", "qwen2_5_vl"))
    captions = write_captions(folder / "text")
    arguments = [
        "train", RECIPE, "model.name_or_path=model", f"data.sources.0.paths=[{captions}]",
        "model.image_processor.max_pixels=1024", "data.sequence_length_tokens=96", "train.num_epochs=null",
        "train.num_steps=3", "train.global_batch_sequences=4", "train.micro_batch_sequences=2", "precision.dtype=fp32",
        f"runtime.device={DEVICE}", "data.validation.held_out_fraction=0.1", "eval.num_sequences=2",
        "log.matmul_peak=false",
        "eval.every_steps=3", "checkpoint.every_steps=3", "run.name=tiny", "schedule.warmup_steps=1",
    ]  # fmt: skip
    assert main([*arguments, "--dry-run"]) == 0
    assert not (folder / "runs").exists()
    assert main(arguments) == 0
    (run,) = (folder / "runs").glob("tiny-*")
    losses = [number(entry.loss) for entry in read_chain(run).values()]
    assert len(losses) == 3

    module = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    inputs = [plain_inputs(model, *record) for record in records_of(captions)]
    by_ids = {tuple(found["input_ids"][0].tolist()): found for found in inputs}
    config = load_config(run / "config.yaml")
    with preview_batches(config, prepare(config), DataShard(), 1) as stream:
        batch = next(stream)
    total, count, num_images = 0.0, 0, 0
    with torch.no_grad():
        for document in packed_documents(batch):
            given = dict(by_ids[document])
            labels = given.pop("labels")[0, 1:]
            logits = module(**given, use_cache=False).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100))
            count += int((labels != -100).sum())
            num_images += len(given.get("image_grid_thw", ()))
    assert num_images > 1
    assert losses[0] == pytest.approx(total / count, rel=1e-5)

    trained = transformers.AutoModelForImageTextToText.from_pretrained(
        run / "checkpoints/step-00000003", dtype=torch.float32
    )
    before = dict(module.named_parameters())
    for name, value in trained.named_parameters():
        is_equal = np.array_equal(value.detach().numpy(), before[name].detach().numpy())
        assert is_equal == ("visual" in name), name
