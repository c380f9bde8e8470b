"""Optimizer groups of both engines: which parameters get weight decay, which ones Muon updates."""

from __future__ import annotations

from vorox.models.spec import ParameterSpec

DECAYED, PLAIN, ORTHOGONAL, FROZEN = "decayed", "plain", "orthogonal", "frozen"
"""AdamW with and without weight decay, the matrices that Muon updates, and constants."""


def optimizer_group(parameter: ParameterSpec, *, muon: bool, decay_embeddings: bool) -> str:
    """Return the group of a parameter.

    Norms and biases are never decayed (``ParameterSpec.decay``), embeddings only if ``optimizer.decay_embeddings`` is
    set. Muon updates the matrices of the blocks, embeddings and head excluded (``ParameterSpec.kind``).
    """
    if not parameter.trainable:
        return FROZEN
    if muon and parameter.kind == "matrix":
        return ORTHOGONAL
    exempt = parameter.kind == "embedding" and not decay_embeddings
    return DECAYED if parameter.decay and not exempt else PLAIN
