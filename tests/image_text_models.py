"""Tiny transformers models that read images, written on the spot, and runs on pictures of many sizes."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pictures import caption, picture
from training_device import DEVICE
from vorox.core.schema import RunConfig
from vorox.training.origin.configuration import load_config as load_config_with_weights

SPECIALS = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SIZES = ((20, 12), (9, 31), (40, 24), (16, 16), (70, 50))
"""Widths and heights; with squares of 8 pixels per token, images of 4 to 16 tokens."""
MIN_PIXELS, MAX_PIXELS = 256, 1024
_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
_VISION = {
    "qwen2_vl": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 3, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}  # fmt: skip
MODELS = tuple(_VISION)


def write_tokenizer(directory: Path) -> dict[str, int]:
    """Write a tokenizer of bytes with the special tokens of Qwen-VL; return their ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIALS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["No. Text alone is red green blue white"], trainer)
    written = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    written.save_pretrained(directory)
    return {token: tokenizer.token_to_id(token) for token in SPECIALS}


def write_image_model(directory: Path, name: str) -> Path:
    """Write a model with weights far from their initial values, its tokenizer and its image processor."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    directory.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(directory)
    torch.manual_seed(7)
    text = {**_TEXT, "vocab_size": 320, "eos_token_id": ids["<|endoftext|>"]}
    config = transformers.AutoConfig.for_model(
        name,
        text_config=text | ({"head_dim": 8, "num_hidden_layers": 3} if name == "qwen3_vl" else {}),
        vision_config={**_PATCHES, **_VISION[name]},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    module = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    module.save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS
    ).save_pretrained(directory)
    return directory


def write_captions(directory: Path, *, records: int = 60) -> Path:
    """A jsonl file with the paths of its pictures, which have many sizes; return the file."""
    (directory / "pictures").mkdir(parents=True)
    lines: list[str] = []
    for number in range(records):
        text, colours = caption(number)
        paths = [f"pictures/{number}-{index}.png" for index in range(len(colours))]
        for index, (path, colour) in enumerate(zip(paths, colours, strict=True)):
            size = SIZES[(number + index) % len(SIZES)]
            (directory / path).write_bytes(picture(colour, 10 * number + index, size))
        lines.append(json.dumps({"text": f"{text} {number}", "images": paths}))
    file = directory / "captions.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def image_settings(directory: Path, name: str = "qwen2_vl") -> dict[str, Any]:
    """The configuration of a run of 12 steps, everything below ``directory``; writes model and pictures."""
    model, file = directory / name, directory / "text" / "captions.jsonl"
    if not model.exists():
        write_image_model(model, name)
    if not file.exists():
        write_captions(file.parent)
    return {
        "backend": "torch",
        "model": {"kind": "huggingface", "name_or_path": str(model)},
        "data": {
            "sources": [{"name": "captions", "format": "jsonl", "paths": [str(file)], "images_field": "images"}],
            "sequence_length_tokens": 96,
            "document_mask": True,
            "cache": {"directory": str(directory / "cache"), "chunk_rows": 16, "unit_bytes": 2000},
            "validation": {"held_out_fraction": 0.1},
        },
        "optimizer": {"lr": 0.001, "weight_decay": 0.1, "clip_norm": 1.0, "beta2": 0.95, "decay_embeddings": False},
        "train": {"num_steps": 12, "global_batch_sequences": 4, "micro_batch_sequences": 2},
        "checkpoint": {"every_steps": 4},
        "eval": {"every_steps": 6, "prompts": []},
        "log": {"every_steps": 2, "matmul_peak": False},
        "runtime": {"device": DEVICE, "num_threads": 1},
        "run": {"directory": str(directory / "runs"), "name": "captions"},
    }


def image_configuration(directory: Path, overrides: Sequence[str] = (), name: str = "qwen2_vl") -> RunConfig:
    """``image_settings`` as a configuration that has adopted the settings of its model."""
    file = directory / "captions.yaml"
    file.write_text(json.dumps(image_settings(directory, name)), encoding="utf-8")
    return load_config_with_weights(file, overrides)


@functools.cache
def _plain_readers(model: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return AutoTokenizer.from_pretrained(model), Qwen2VLImageProcessorPil.from_pretrained(model)


def plain_inputs(model: Path, text: str, images: Sequence[bytes]) -> dict[str, Any]:
    """The inputs of one document as transformers makes them: its image processor, its tokenizer, its token types."""
    import torch
    from PIL import Image

    tokenizer, processor = _plain_readers(model)
    inputs: dict[str, Any] = {}
    if images:
        inputs = dict(processor([Image.open(io.BytesIO(content)) for content in images], return_tensors="pt"))
    parts = text.split("<image>") if "<image>" in text else ["", text] if images else [text]
    whole = parts[0]
    for index, part in enumerate(parts[1:]):
        count = int(inputs["image_grid_thw"][index].prod()) // processor.merge_size**2
        whole += "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>" + part
    ids = torch.tensor([tokenizer(whole)["input_ids"] + [tokenizer.eos_token_id]])
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    inputs |= {"input_ids": ids, "mm_token_type_ids": (ids == pad).int()}
    special = [tokenizer.convert_tokens_to_ids(token) for token in SPECIALS[1:4]]
    labels = ids.clone()
    labels[torch.isin(ids, torch.tensor(special))] = -100
    return inputs | {"labels": labels}


def records_of(file: Path) -> list[tuple[str, list[bytes]]]:
    """The texts of a file, and the bytes of their images."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(record["text"], [(file.parent / path).read_bytes() for path in record["images"]]) for record in records]


def packed_documents(batch: Any) -> list[tuple[int, ...]]:
    """The token ids of every whole document of a batch; the last label of a full row is its last token."""
    found: list[tuple[int, ...]] = []
    for tokens, labels, segments in zip(
        *(array.reshape(-1, array.shape[-1]) for array in (batch.tokens_ABT, batch.labels_ABT, batch.segment_ids_ABT)),
        strict=True,
    ):
        for segment in range(1, int(segments.max()) + 1):
            place = np.flatnonzero(segments == segment)
            ids = tokens[place].tolist()
            if place[-1] == len(tokens) - 1 and labels[-1] != -100:
                ids.append(int(labels[-1]))
            found.append(tuple(ids))
    return found


def as_published(model: Path) -> Path:
    """Rewrite a Qwen2.5-VL directory in the form of the published files: a flat configuration, and older names."""
    from safetensors.numpy import load_file, save_file

    values = json.loads((model / "config.json").read_bytes())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    text.pop("layer_types", None)
    values = text | values | {"model_type": "qwen2_5_vl"}
    (model / "config.json").write_text(json.dumps(values), encoding="utf-8")
    arrays = load_file(model / "model.safetensors")
    names = {name: name.replace("model.visual.", "visual.").replace("language_model.", "") for name in arrays}
    save_file({names[name]: array for name, array in arrays.items()}, model / "model.safetensors", {"format": "pt"})
    return model
