"""Which parameters an optimizer decays and which Muon updates, by name, for a model with every kind of parameter."""

from __future__ import annotations

import pytest

from vorox.core.schema.model import ModelConfig
from vorox.models.decoder_spec import decoder_spec
from vorox.models.optimizer_groups import DECAYED, ORTHOGONAL, PLAIN, optimizer_group

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    positions="learned",
    norm="layer_norm",
    norm_bias=True,
    tie_embeddings=False,
)


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_groups(muon: bool, decay_embeddings: bool) -> None:
    spec = decoder_spec(MODEL, tokenizer_vocab_size=16, sequence_length_tokens=8)
    found = {
        parameter.name: optimizer_group(parameter, muon=muon, decay_embeddings=decay_embeddings)
        for parameter in spec.parameters
    }
    for name, group in found.items():
        if "norm" in name or name.endswith("bias"):
            assert group == PLAIN, name
        elif name.startswith("blocks."):
            assert group == (ORTHOGONAL if muon else DECAYED), name
        elif "embedding" in name or "position" in name:
            assert group == (DECAYED if decay_embeddings else PLAIN), name
        else:
            assert group == DECAYED, name  # the head
    assert len(set(found.values())) >= 2
