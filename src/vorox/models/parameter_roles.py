"""The role of a weight of a foreign module by its name and shape: biases, scales and states are never decayed.

``backends/torch_engine/foreign/module_roles.py`` adds what modules say of their own weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vorox.models.spec import Kind

_BIAS = re.compile(r"(^|_)bias(es)?(_|$)|bias$")
_SCALE = re.compile(r"(^|_)(scales?|scaling|gain|gamma|beta|alpha|lambda|temp|temperature|sinks?)(_|$|\d)")
_STATE = re.compile(r"^(A|A_log|a_log|D|dt)$|(^|_)(decay|dt)(_|$)|^time_(mix|first)")
_DECAYED = frozenset({"embedding", "matrix", "router", "head", "tensor"})


def role(name: str, shape: Sequence[int]) -> Kind:
    """Return the role of a weight that no module declares: by the last part of its name, and its shape.

    A weight of two dimensions above 1 is a ``matrix``, one of more dimensions a ``tensor``.

    Args:
        name: Name, with dots.
        shape: Stored shape.
    """
    leaf = name.rpartition(".")[2]
    if _BIAS.search(leaf):
        return "bias"
    if _STATE.search(leaf):
        return "state"
    sizes = [size for size in shape if size > 1]
    if len(sizes) < 2 or _SCALE.search(leaf):
        return "norm"
    return "matrix" if len(shape) == 2 else "tensor"


def is_decayed(kind: Kind) -> bool:
    """Whether weight decay applies to a role; ``optimizer.decay_embeddings`` decides for embeddings."""
    return kind in _DECAYED
