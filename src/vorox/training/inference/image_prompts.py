"""Prompts with images: a text and image files in, token ids and pixels out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from vorox.core.batch import AnyImages
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.data.documents import Document, PlacedImage, UnreadableRecord
from vorox.data.images.decoding import measure_image
from vorox.data.images.layout import image_layout
from vorox.data.images.reading import place_images
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.training.steps.dataloading import image_input


def encode_image_prompt(
    config: RunConfig, tokenizer: Tokenizer, prompt: str, images: Sequence[str | Path | bytes], num_samples: int = 1
) -> tuple[list[list[int]], AnyImages]:
    """Return the token ids of a prompt, once per sample, and its images.

    Args:
        config: The run.
        tokenizer: Its tokenizer.
        prompt: A text with ``<image>`` where each image belongs; without any, they come first.
        images: Their files, or their encoded bytes.
        num_samples: Completions of the prompt.

    Raises:
        ConfigError: The model reads no images, an image cannot be read, or their number differs from the marks.
    """
    reads, layout = image_input(config, tokenizer), image_layout(config.model)
    if reads is None or layout is None:
        raise ConfigError(
            "The model reads text only",
            where="--image",
            hint="train one with an image encoder (model.vision.num_layers), or a Qwen-VL model on a source with "
            "images_field",
        )
    placed = tuple(PlacedImage(_content(image)) for image in images)
    try:
        document = place_images(Document(0, 0, 0, 0, prompt, images=placed))
        contents = [_content(image.content) for image in document.images or ()]
        lengths = [layout.num_tokens(measure_image(content)) for content in contents]
        found = reads.read(contents * num_samples, np.repeat(np.arange(num_samples), len(contents)))
    except UnreadableRecord as error:
        raise ConfigError(f"The prompt cannot be read: {error}", where="prompt") from error
    except ValueError as error:
        raise ConfigError(f"An image of the prompt cannot be read: {error}", where="--image") from error
    places = [0, *(image.character for image in document.images or ()), len(document.text)]
    parts = tokenizer.encode_batch([document.text[a:b] for a, b in pairwise(places)])
    ids = [*tokenizer.start_ids, *parts[0].tolist()]
    for part, length in zip(parts[1:], lengths, strict=True):
        ids += [*layout.start_ids, *[reads.token_id] * length, *layout.end_ids, *part.tolist()]
    return [ids] * num_samples, found


def _content(image: str | Path | bytes) -> bytes:
    if isinstance(image, bytes):
        return image
    try:
        return Path(image).read_bytes()
    except OSError as error:
        raise ConfigError(f"The image cannot be read: {error.strerror}", where=str(image)) from error
