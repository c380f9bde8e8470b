"""Models of transformers that read images: packed rows, positions, pixels, and training against plain transformers.

The oracle is transformers in a plain loop: its image processor, its tokenizer, its multimodal positions, one document
in a forward pass, ``torch.optim.AdamW``. Losses agree to 1e-5 (relative, fp32) over 20 steps, so packing, positions
and pixels agree, and no document of a packed row sees another.
"""

from __future__ import annotations

import dataclasses
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from backends.torch_engine.transformers_models import plain_adamw
from image_text_models import (
    MODELS,
    image_configuration,
    packed_documents,
    plain_inputs,
    records_of,
    write_image_model,
)
from pictures import picture
from vorox.backends.torch_engine.engine import TorchEngine, create
from vorox.backends.torch_engine.networks.huggingface_images import multimodal_positions, pixel_values
from vorox.core.batch import Batch, BatchPatches, DataShard
from vorox.core.errors import DataError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.core.schema.image_processor import ImageProcessorConfig
from vorox.data.corpus.corpus import prepare
from vorox.data.images.decoding import PatchInput, decode_patches
from vorox.data.images.layout import PatchGrid, image_layout
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.config import huggingface_files
from vorox.planned_run import resolve_model
from vorox.training.export.adapter import peft_config
from vorox.training.steps.dataloading import preview_batches

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.hf]
STEPS, LR = 20, 1e-3


def batches_of(config: RunConfig, num_steps: int) -> tuple[list[Batch], int]:
    """The first batches of a run, and the size of its vocabulary."""
    corpus = prepare(config)
    with preview_batches(config, corpus, DataShard(), num_steps) as stream:
        return [next(stream) for _ in range(num_steps)], corpus.tokenizer.vocab_size


def engine_of(config: RunConfig, vocab_size: int) -> TorchEngine:
    engine = create(config, resolve_model(config, vocab_size), DistributedContext())
    engine.import_pretrained(Path(str(config.model.name_or_path)))
    return engine


def plain_losses(config: RunConfig, engine: TorchEngine, batches: list[Batch], inputs: dict[Any, Any]) -> list[float]:
    model = Path(str(config.model.name_or_path))
    module = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).train()
    decayed = {row.name for row in engine._spec.rows if row.decay and row.kind != "embedding"}
    return losses_of(module, plain_adamw(module, decayed, LR), batches, inputs)


def losses_of(
    module: Any, optimizer: torch.optim.Optimizer, batches: list[Batch], inputs: dict[Any, Any]
) -> list[float]:
    """The losses of a plain loop, one document in a forward pass."""
    losses: list[float] = []
    for batch in batches:
        total, count = torch.zeros(()), 0
        for document in packed_documents(batch):
            given = dict(inputs[document])
            labels = given.pop("labels")[0, 1:]
            logits = module(**given, use_cache=False).logits[0, :-1].float()
            total = total + functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
            count += int((labels != -100).sum())
        assert count == batch.num_target_tokens
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", [MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])])
def test_training_on_packed_rows_equals_a_plain_loop_over_documents(name: str, tmp_path: Path) -> None:
    config = image_configuration(tmp_path, name=name)
    batches, vocab_size = batches_of(config, STEPS)
    assert max(int(batch.segment_ids_ABT.max()) for batch in batches) > 1, "rows hold several documents"
    engine = engine_of(config, vocab_size)
    assert engine._network.separates_documents
    model = tmp_path / name
    records = records_of(tmp_path / "text/captions.jsonl")
    inputs = [plain_inputs(model, *record) for record in records]
    by_ids = {tuple(found["input_ids"][0].tolist()): found for found in inputs}
    assert len(by_ids) == len(records)
    before = dict(engine.export_weights())
    losses = [engine.train_step(batch, lr=LR, weight_decay=0.1).fetch().loss for batch in batches]
    assert losses == pytest.approx(plain_losses(config, engine, batches, by_ids), rel=1e-5)
    unchanged = [key for key, array in engine.export_weights() if np.array_equal(array, before[key])]
    assert unchanged == [], "gradients reach every parameter"

    with StagedDirectory(tmp_path / "checkpoint") as staged:
        engine.snapshot(detached=True).write_metadata(staged)
        for file, content in huggingface_files(engine._spec, end_of_text_id=0).items():
            staged.write(file, content)
        staged.commit({})
    module, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "checkpoint", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    pictured = next(found for found in inputs if "pixel_values" in found and len(found["image_grid_thw"]) == 2)
    pictured = {key: value for key, value in pictured.items() if key != "labels"}
    theirs = module.eval()(**pictured, use_cache=False).logits.detach().numpy()
    ours = decoded_logits(engine, config, pictured, records)
    np.testing.assert_allclose(ours, theirs[0, -1], rtol=1e-4, atol=1e-5)
    again = engine_of(config, vocab_size)
    again.load(tmp_path / "checkpoint")
    assert again.fingerprint() == engine.fingerprint()


def decoded_logits(
    engine: TorchEngine, config: RunConfig, pictured: dict[str, Any], records: list[tuple[str, list[bytes]]]
) -> np.ndarray:
    layout = image_layout(config.model)
    assert layout is not None
    assert layout.grid is not None
    contents = next(images for _, images in records if len(images) == 2)
    reads = PatchInput(layout.grid, config.model.image_processor.image_token_id)
    ids = pictured["input_ids"].numpy().astype(np.int32)
    return engine.decoder(1, ids.shape[1], reads.read(contents, np.zeros(2, np.int64))).feed(ids)[0]


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_an_adapter_of_the_language_model_trains_as_peft_does(name: str, tmp_path: Path) -> None:
    """The oracle is peft around transformers. By default, all linear layers outside of the vision tower are adapted."""
    import peft

    config = image_configuration(tmp_path, ["adapter.kind=lora", "adapter.rank=4"], name)
    batches, vocab_size = batches_of(config, 8)
    engine = engine_of(config, vocab_size)
    spec = engine._spec
    assert isinstance(spec, AdapterSpec)
    layers = 3 if name == "qwen3_vl" else 2
    leaves = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    leaves += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    expected = {f"model.language_model.layers.{layer}.{leaf}" for layer in range(layers) for leaf in leaves}
    assert {layer for layer, _, _ in spec.layers} == expected

    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / name, dtype=torch.float32)
    settings = {key: value for key, value in peft_config(spec).items() if key not in ("peft_type", "inference_mode")}
    module = peft.get_peft_model(base, peft.LoraConfig(**settings)).train()
    initial = {f"base_model.model.{key}": torch.from_numpy(array) for key, array in engine.export_weights()}
    assert not peft.set_peft_model_state_dict(module, initial).unexpected_keys
    trained = [value for value in module.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    inputs = [plain_inputs(tmp_path / name, *record) for record in records_of(tmp_path / "text/captions.jsonl")]
    by_ids = {tuple(found["input_ids"][0].tolist()): found for found in inputs}
    losses = [engine.train_step(batch, lr=LR, weight_decay=0.1).fetch().loss for batch in batches]
    assert losses == pytest.approx(losses_of(module, optimizer, batches, by_ids), rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_positions_equal_those_of_transformers_and_start_again_in_each_document(name: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(write_image_model(tmp_path, name))
    first = ([5, 3, 9, 9, 9, 9, 9, 9, 4, 3, *[9] * 8, 4, 6], [(4, 6), (8, 4)])
    second = ([3, *[9] * 4, 4, 7, 8], [(4, 4)])
    expected: list[np.ndarray] = []
    for tokens, grids in (first, second):
        ids = torch.tensor([tokens])
        grid = torch.tensor([[1, *grid] for grid in grids])
        expected.append(model.model.get_rope_index(ids, (ids == 9).int(), image_grid_thw=grid)[0][:, 0].numpy())
    tokens_BT = np.array([[*first[0], *second[0], 0, 0]], np.int32)
    positions_BT = np.concatenate([np.arange(len(first[0])), np.arange(len(second[0])), np.arange(2)])[None]
    grids_I2 = np.array([*first[1], *second[1]], np.int64)
    images = BatchPatches(np.zeros((72, 3, 4, 4), np.uint8), grids_I2, np.zeros(3, np.int64), 9)
    found = multimodal_positions(images, tokens_BT, positions_BT.astype(np.int32), 2)
    np.testing.assert_array_equal(found[0], positions_BT)
    np.testing.assert_array_equal(found[1:, 0, :-2], np.concatenate(expected, axis=1))
    tokens_BT[0, 0] = 9
    with pytest.raises(DataError, match="positions of images"):
        multimodal_positions(images, tokens_BT, positions_BT.astype(np.int32), 2)


@pytest.mark.parametrize("size", [(20, 12), (9, 31), (300, 200), (4, 3), (16, 16), (640, 7)])
def test_pixels_have_the_bits_of_the_image_processor(size: tuple[int, int]) -> None:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    content = picture("green", 3, size)
    settings = {"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 4096}
    theirs = Qwen2VLImageProcessorPil(**settings)(Image.open(io.BytesIO(content)), return_tensors="np")
    patches, grid = decode_patches(content, PatchGrid(4, 2, 256, 4096))
    assert [1, *grid] == theirs["image_grid_thw"][0].tolist()
    ours = pixel_values(torch.from_numpy(patches), ImageProcessorConfig(patch_size_pixels=4))
    np.testing.assert_array_equal(ours.numpy(), theirs["pixel_values"])


def test_an_image_changes_its_own_document_only_and_frozen_parts_stay(tmp_path: Path) -> None:
    frozen = ["optimizer.groups=[{match: 'model.visual.*', frozen: true}]", "train.activation_checkpointing=block"]
    config = image_configuration(tmp_path, frozen)
    batches, vocab_size = batches_of(config, 1)
    engine, batch = engine_of(config, vocab_size), batches[0]
    images = batch.images_A[0]
    row = next(row for row in images.rows_I.tolist() if batch.segment_ids_ABT[0, row].max() > 1)
    image = images.rows_I.tolist().index(row)
    segment = int(batch.segment_ids_ABT[0, row, np.argmax(batch.tokens_ABT[0, row] == images.token_id)])
    is_own = batch.segment_ids_ABT[0, row] == segment
    changed = images.patches_PCSS.copy()
    start = int(images.grids_I2[:image].prod(axis=1).sum())
    changed[start : start + int(images.grids_I2[image].prod())] ^= 255
    losses: dict[tuple[bool, bool], float] = {}
    for own in (True, False):
        labels = np.full_like(batch.labels_ABT[:1], -100)
        labels[0, row, is_own == own] = batch.labels_ABT[0, row, is_own == own]
        for is_changed in (True, False):
            found = dataclasses.replace(images, patches_PCSS=changed) if is_changed else images
            part = dataclasses.replace(
                batch, tokens_ABT=batch.tokens_ABT[:1], labels_ABT=labels, segment_ids_ABT=batch.segment_ids_ABT[:1],
                position_ids_ABT=batch.position_ids_ABT[:1], images_A=(found,),
                num_target_tokens=int((labels != -100).sum()),
            )  # fmt: skip
            losses[own, is_changed] = engine.eval_step(part).loss_sum
    assert losses[False, True] == losses[False, False] > 0
    assert losses[True, True] != pytest.approx(losses[True, False], rel=1e-3)
    before = dict(engine.export_weights())
    engine.train_step(batch, lr=LR, weight_decay=0.1).fetch()
    for name, array in engine.export_weights():
        assert np.array_equal(array, before[name]) == name.startswith("model.visual."), name
