"""Which parameters an optimizer decays and which Muon updates, by name, for a model with every kind of parameter."""

from __future__ import annotations

import pytest

from vorox.core.errors import ConfigError
from vorox.core.schema import OptimizerConfig
from vorox.core.schema.model import ModelConfig
from vorox.models.decoder.spec import decoder_spec
from vorox.models.optimizer_groups import DECAYED, ORTHOGONAL, PLAIN, Group, optimizer_groups

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
    name = "muon" if muon else "adamw"
    found = optimizer_groups(spec, OptimizerConfig(name=name, decay_embeddings=decay_embeddings))
    assert list(found) == [parameter.name for parameter in spec.parameters]
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


def scales(layers: int = 3, **settings: object) -> dict[str, float]:
    model = MODEL.model_copy(update={"num_layers": layers})
    spec = decoder_spec(model, tokenizer_vocab_size=16, sequence_length_tokens=8)
    groups = optimizer_groups(spec, OptimizerConfig.model_validate(settings))
    return {name: 0.0 if group.is_frozen else group.lr_scale for name, group in groups.items()}


def test_the_first_pattern_that_matches_applies() -> None:
    found = scales(groups=[{"match": "blocks.0.*.bias", "lr_scale": 3}, {"match": "blocks.0.*", "frozen": True}])
    for name, scale in found.items():
        assert scale == (1 if not name.startswith("blocks.0.") else 3 if name.endswith(".bias") else 0), name
    assert 3 in found.values()


def test_layers_decay_from_the_top() -> None:
    """Of 3 layers, the last has d, the first d^3, embeddings d^4; a group's factor multiplies them."""
    found = scales(layer_lr_decay=0.5, groups=[{"match": "blocks.1.mlp.*", "lr_scale": 8}])
    expected = {"embedding": 1 / 16, "position_embedding": 1 / 16, "final_norm": 1.0, "head": 1.0}
    expected |= {"blocks.0": 1 / 8, "blocks.1": 1 / 4, "blocks.2": 1 / 2}
    for name, scale in found.items():
        (stem,) = [stem for stem in expected if name.startswith(f"{stem}.")]
        assert scale == expected[stem] * (8 if name.startswith("blocks.1.mlp.") else 1), name


def test_matrices_and_head_learn_slower_in_a_wider_model() -> None:
    model = MODEL.model_copy(update={"hidden_size": 32, "mup_base_hidden_size": 8})
    spec = decoder_spec(model, tokenizer_vocab_size=16, sequence_length_tokens=8)
    settings = OptimizerConfig.model_validate({"groups": [{"match": "blocks.0.mlp.*", "lr_scale": 3}]})
    for name, group in optimizer_groups(spec, settings).items():
        is_scaled = name == "head.weight" or (name.endswith("weight") and ("attention." in name or "mlp." in name))
        assert group.lr_scale == (1 / 4 if is_scaled else 1) * (3 if name.startswith("blocks.0.mlp.") else 1), name


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ([{"match": "layers.0.*"}], r"match=layers\.0\.\* matches no parameter"),
        ([{"match": "blocks.*"}, {"match": "blocks.1.*"}], "matches no parameter that earlier groups do not match"),
        ([{"match": "*", "frozen": True}], "Every parameter is frozen"),
    ],
)
def test_what_has_no_effect_is_refused(groups: list[dict[str, object]], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        scales(groups=groups)
    assert caught.value.where.startswith("optimizer.groups")
    if "layers" in what:
        assert "embedding.weight" in caught.value.hint
        assert "head.weight" in caught.value.hint


def test_a_group_of_a_default_configuration_is_unscaled() -> None:
    assert set(scales().values()) == {1.0}
    assert Group("decayed") == DECAYED
