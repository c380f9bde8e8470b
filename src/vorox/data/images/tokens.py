"""Images in rows of tokens: the ids of an image, and how to find them again.

An image takes consecutive positions of a row (``images/layout.py``). Its first ids are its address, the hash of its
bytes in parts of 16 bits; the others continue it. So a row names its images, packing and plans need no special
case, and the digest of a row covers the bytes of its images. A model sees its image token instead.

Invariant: a document with images is never divided, so a row holds whole images only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FIRST_IMAGE_ID = 1 << 24
"""Larger than the ids of any vocabulary; the ids of images start here."""

ADDRESS_IDS = 4
"""Ids of an address; an image takes at least this many positions."""

_CONTINUATION_ID = FIRST_IMAGE_ID + (1 << 16)
END_OF_IMAGE_IDS = _CONTINUATION_ID + 1

_SHIFTS = np.arange(ADDRESS_IDS, dtype=np.uint64) * np.uint64(16)


def image_ids(digest: int, num_tokens: int) -> npt.NDArray[np.uint32]:
    """Return the ids of an image.

    Args:
        digest: The xxh3-64 of its bytes.
        num_tokens: Positions that it takes.
    """
    ids = np.full(num_tokens, _CONTINUATION_ID, np.uint32)
    ids[:ADDRESS_IDS] = ((np.uint64(digest) >> _SHIFTS) & np.uint64(0xFFFF)) + np.uint64(FIRST_IMAGE_ID)
    return ids


def find_images(tokens_NC: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the row of each image in stored rows, and the digest of its bytes, in the order of their positions."""
    rows, columns = np.nonzero((tokens_NC >= FIRST_IMAGE_ID) & (tokens_NC < _CONTINUATION_ID))
    parts = (tokens_NC[rows, columns] - FIRST_IMAGE_ID).astype(np.uint64).reshape(-1, ADDRESS_IDS)
    return rows[::ADDRESS_IDS], (parts << _SHIFTS).sum(axis=1, dtype=np.uint64).tolist()


def is_image(tokens: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return whether each stored token is a position of an image."""
    return tokens >= FIRST_IMAGE_ID


def replace_addresses(tokens_C: npt.NDArray[Any], addresses: Sequence[int]) -> None:
    """Replace the addresses of the images in a part of a row, in the order of their positions, in place."""
    places = np.flatnonzero((tokens_C >= FIRST_IMAGE_ID) & (tokens_C < _CONTINUATION_ID))
    ids = [image_ids(address, ADDRESS_IDS) for address in addresses]
    tokens_C[places] = np.concatenate([np.zeros(0, np.uint32), *ids])


def one_id_per_image(ids: npt.NDArray[Any], image_token_id: int) -> npt.NDArray[Any]:
    """Return token ids for people: each image becomes one image token."""
    is_text, is_address = ids < FIRST_IMAGE_ID, (ids >= FIRST_IMAGE_ID) & (ids < _CONTINUATION_ID)
    first = np.flatnonzero(is_address)[::ADDRESS_IDS]
    kept = is_text.copy()
    kept[first] = True
    return np.where(is_text, ids, image_token_id)[kept]
