"""Small corpora of pictures with captions, and runs on them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from training_device import DEVICE
from vorox.core.config import load_config
from vorox.core.schema import RunConfig

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}
VISION = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 2, "image_size_pixels": 16, "patch_size_pixels": 4,
    "merge_size": 2,
}  # fmt: skip
"""Images of 4 tokens."""


def picture(colour: str, seed: int, size: tuple[int, int] = (20, 12)) -> bytes:
    """A noisy picture of one colour, as PNG."""
    noise = np.random.default_rng(seed).normal(0, 10, (*size[::-1], 3))
    pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def caption(number: int) -> tuple[str, list[str]]:
    """The text of record ``number``, and the colours of its pictures: none, one, or two of them."""
    first, second = (list(COLOURS)[(number + shift) % 4] for shift in (0, 1))
    if number % 5 == 0:
        return f"Text {number} alone.", []
    if number % 5 == 1:
        return f"<image><image> {first}, {second}.", [first, second]
    return f"No. {number}: <image> is {first}.", [first]


def write_pictures(directory: Path, *, records: int = 80, first: int = 0, name: str = "captions.jsonl") -> Path:
    """A jsonl file with the paths of its pictures, whose records are numbered from ``first``; return the file."""
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for number in range(first, first + records):
        text, colours = caption(number)
        paths = [f"pictures/{number}-{index}.png" for index in range(len(colours))]
        for index, (path, colour) in enumerate(zip(paths, colours, strict=True)):
            (directory / path).write_bytes(picture(colour, 10 * number + index))
        lines.append(json.dumps({"text": text, "images": paths}))
    file = directory / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def picture_configuration(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A run of 12 steps on pictures, everything below ``directory``."""
    file = directory / "text" / "captions.jsonl"
    if not file.exists():
        write_pictures(file.parent)
    settings = {
        "model": {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vision": VISION},
        "data": {
            "sources": [{"name": "captions", "format": "jsonl", "paths": [str(file)], "images_field": "images"}],
            "sequence_length_tokens": 64,
            "cache": {"directory": str(directory / "cache"), "chunk_rows": 16, "unit_bytes": 2000},
            "validation": {"held_out_fraction": 0.1},
        },
        "tokenizer": {"kind": "byte", "special_tokens": ["<|image|>"]},
        "optimizer": {"lr": 0.003},
        "train": {"num_steps": 12, "global_batch_sequences": 4, "micro_batch_sequences": 2},
        "checkpoint": {"every_steps": 4},
        "eval": {"every_steps": 6, "prompts": []},
        "log": {"every_steps": 2, "matmul_peak": False},
        "runtime": {"device": DEVICE, "num_threads": 1},
        "run": {"directory": str(directory / "runs"), "name": "pictures"},
    }
    file = directory / "pictures.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return load_config(file, overrides)
