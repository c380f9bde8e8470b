"""Random generators of transforms, which make augmented rows reproducible.

A Philox generator is keyed by the seed, the transform's index in the list and the location of the document. Invariant:
equal identities and locations give equal results, on any thread, in any order.
"""

from __future__ import annotations

import hashlib

import numpy as np

from vorox.core.files.atomic import canonical_json
from vorox.core.user_code.extensions import version

__all__ = ["generator_at", "version"]

_DOMAIN = "transform/1"


def generator_at(seed: int, purpose: str, file_version: str, ordinal: int, copy: int) -> np.random.Generator:
    """Return the random generator of a transform for a document.

    Args:
        seed: ``data.transform_seed``.
        purpose: The transform's index in the list and its name.
        file_version: Identifier of the content of the document's file.
        ordinal: Index of the record in the file.
        copy: Index of the text among the texts that earlier transforms made from the record.
    """
    place = canonical_json([_DOMAIN, seed, purpose, file_version, ordinal, copy])
    digest = hashlib.blake2b(place, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8")))
