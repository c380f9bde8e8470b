"""Which function a transform is, and its draws: what makes a transformed row reproducible.

A function goes in, the JSON that stands for it in a cache's recipe comes out: its import path, its arguments and the
version that it declares or, where it declares none, the hash of the file that it is written in. Draws come from a
Philox generator keyed by the seed, the transform's place in the list and the place of the document. Invariant: equal
identities and equal places give equal results, on any thread, in any order.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vorox.core.atomic import canonical_json
from vorox.core.errors import ConfigError

_VERSION = "__transform_version__"
_DOMAIN = "transform/1"

Function = TypeVar("Function", bound=Callable[..., Any])


def version(number: int) -> Callable[[Function], Function]:
    """Declare which version of itself a function is; raise it whenever its results change.

    Without it the hash of the function's file stands for the version, so that any edit of the file makes new caches.
    """

    def declare(function: Function) -> Function:
        setattr(function, _VERSION, number)
        return function

    return declare


def identity_of(path: str, function: Callable[..., Any], args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a transform is in the recipe.

    Raises:
        ConfigError: The function declares no version and has no source file.
    """
    declared: int | None = getattr(function, _VERSION, None)
    if declared is not None:
        return {"function": path, "version": declared, "args": dict(args)}
    try:
        source = Path(inspect.getfile(inspect.unwrap(function))).read_bytes()
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"{path} has no source file, so nobody can tell whether it is still the same function", where=where,
            hint="declare its version: @version(1) from vorox.data.transforms.identity",
        ) from error  # fmt: skip
    return {"function": path, "source_sha256": hashlib.sha256(source).hexdigest(), "args": dict(args)}


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
