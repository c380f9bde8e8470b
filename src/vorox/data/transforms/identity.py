"""The draws of a transform: with its identity (``core/extensions.py``), what makes a transformed row reproducible.

Draws come from a Philox generator keyed by the seed, the transform's place in the list and the place of the document.
Invariant: equal identities and equal places give equal results, on any thread, in any order.
"""

from __future__ import annotations

import hashlib

import numpy as np

from vorox.core.atomic import canonical_json
from vorox.core.extensions import version

__all__ = ["generator_at", "version"]

_DOMAIN = "transform/1"


def generator_at(seed: int, purpose: str, file_version: str, ordinal: int, copy: int) -> np.random.Generator:
    """The draws of one transform for one document.

    Args:
        seed: ``data.transform_seed``.
        purpose: The transform's place in the list and its name.
        file_version: What pins the content of the document's file.
        ordinal: Number of the record within the file.
        copy: Number of the text among those that earlier transforms made of the record.
    """
    place = canonical_json([_DOMAIN, seed, purpose, file_version, ordinal, copy])
    digest = hashlib.blake2b(place, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8")))
