"""Taps see and change the residual stream at the right places; statistics are those of what passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.torch_engine.small_models import GPT2, LR, POSITIONS, batch_of, configuration, make, random_rows, train
from small_configurations import HYBRID
from vorox.backends.torch_engine.taps import Taps
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.engine import TapPoint
from vorox.core.errors import ConfigError
from vorox.models.decoder.tap_points import POINTS

pytestmark = pytest.mark.torch
WIDTH = 32


def test_what_is_seen_follows_from_the_model() -> None:
    """The stream behind each part is the stream before it plus what the part adds."""
    engine, seen = make(GPT2), {}
    for layer in range(2):
        for point in POINTS:
            engine.taps.attach(point, layer, lambda x, key=(point, layer): seen.update({key: x.detach().clone()}))
    tokens = random_rows(3)[:, :-1]
    engine.logits(tokens)
    assert all(x.shape == (3, POSITIONS, WIDTH) for x in seen.values())
    weights = {name: torch.from_numpy(array) for name, array in engine.export_weights()}
    start = weights["embedding.weight"][tokens] + weights["position_embedding.weight"][:POSITIONS]
    torch.testing.assert_close(seen["block_input", 0], start)
    assert torch.equal(seen["block_input", 1], seen["after_mlp", 0])
    for layer in range(2):
        block = engine.model.blocks[layer]
        middle = seen["after_attention", layer]
        expected = middle + block.mlp(block.mlp_norm(middle.view(-1, WIDTH))).view(middle.shape)
        torch.testing.assert_close(seen["after_mlp", layer], expected.detach())
        assert not torch.equal(middle, seen["block_input", layer])


@pytest.mark.parametrize("point", POINTS)
def test_a_returned_tensor_replaces_the_stream(point: TapPoint) -> None:
    engine = make()
    tokens = random_rows(2)[:, :-1]
    before = engine.logits(tokens)
    detach = engine.taps.attach(point, 1, torch.zeros_like)
    zeroed = engine.logits(tokens)
    if point == "after_mlp":
        assert not zeroed.any(), "the last stream is zero, and so is its norm"
    assert not np.allclose(zeroed, before, atol=1e-3)
    detach()
    assert np.array_equal(engine.logits(tokens), before)


def test_a_perturbation_reaches_the_gradient() -> None:
    engine = make()
    engine.taps.attach("block_input", 1, lambda x: x.detach())
    engine.train_step(batch_of(random_rows(2)), lr=0.0, weight_decay=0.0)
    gradients = dict(engine.parameters.whole(engine.parameters.gradients))
    assert not gradients["blocks.0.mlp.up.weight"].any(), "nothing flows past a detached stream"
    assert gradients["blocks.1.mlp.up.weight"].any()


def test_functions_are_called_in_order_and_each_sees_the_result_of_the_one_before() -> None:
    engine = make()
    tokens = random_rows(2)[:, :-1]
    engine.taps.attach("after_attention", 0, lambda x: x * 2)
    engine.taps.attach("after_attention", 0, lambda x: x + 1)
    first = engine.logits(tokens)
    other = make()
    other.taps.attach("after_attention", 0, lambda x: x * 2 + 1)
    np.testing.assert_allclose(first, other.logits(tokens), atol=1e-6)


def test_watching_changes_no_bit() -> None:
    watched, plain = make(), make()
    for point in POINTS:
        watched.taps.attach(point, 0, lambda x: None)
    assert train(watched, 3) == train(plain, 3)
    assert watched.fingerprint() == plain.fingerprint()


def test_nothing_attached_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    detach = engine.taps.attach("after_mlp", 0, lambda x: None)
    detach()

    def fail(*_: object) -> Tensor:
        raise AssertionError("asked")

    monkeypatch.setattr(Taps, "apply", fail)
    train(engine, 1)


@pytest.mark.parametrize(
    ("point", "layer", "message"),
    [("before_mlp", 0, "available: block_input, after_attention, after_mlp"),
     ("after_mlp", 2, "layer 2 does not exist"),
     ("after_mlp", -1, "layer -1 does not exist")],
)  # fmt: skip
def test_unknown_places_are_refused(point: TapPoint, layer: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make().taps.attach(point, layer, lambda x: None)


def test_points_of_a_layer_pattern() -> None:
    """Every point of every layer (M*-MM) is called, in training and decoding, or refused."""
    engine, seen = make(HYBRID), {}
    for layer in range(5):
        for point in POINTS:
            key = (point, layer)
            if point == "after_attention" and layer != 1:
                with pytest.raises(ConfigError) as refused:
                    engine.taps.attach(point, layer, lambda x: None)
                assert f"Layer {layer} has no tap point '{point}'; it has block_input, after_mlp" in str(refused.value)
                assert refused.value.hint == "layers with after_attention: 1"
            else:
                engine.taps.attach(point, layer, lambda x, key=key: seen.update({key: x.detach().clone()}))
    tokens = random_rows(2)[:, :-1]
    for run in (lambda: train(engine, 1), lambda: engine.logits(tokens)):
        seen.clear()
        run()
        assert len(seen) == 5 * 2 + 1
    assert torch.equal(seen["after_attention", 1], seen["block_input", 2])
    assert not torch.equal(seen["after_attention", 1], seen["block_input", 1])
    plain = make(HYBRID)
    detach = plain.taps.attach("after_attention", 1, torch.zeros_like)
    zeroed = plain.logits(tokens)
    detach()
    plain.taps.attach("block_input", 2, torch.zeros_like)
    assert np.array_equal(plain.logits(tokens), zeroed)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_statistics(recompute: str) -> None:
    """Over all micro-batches, in the registry's names, whether or not blocks run twice."""
    engine = make(log__activation_statistics=True, train__activation_checkpointing=recompute)
    seen: dict[tuple[str, int], list[np.ndarray]] = {}
    for layer in range(2):
        for point in POINTS:
            where = seen.setdefault((point, layer), [])
            engine.taps.attach(point, layer, lambda x, where=where: where.append(x.detach().numpy().copy()))
    result = engine.train_step(batch_of(random_rows(6), 3), lr=LR, weight_decay=0.1).fetch()
    assert len(result.extra) == 2 * 3 * 3
    for (point, layer), parts in seen.items():
        assert len(parts) == (6 if recompute == "block" and point != "after_mlp" else 3), "the end is not needed again"
        values = np.concatenate(parts).astype(np.float64)
        found = [result.extra[f"activation/{layer}/{point}/{kind}"] for kind in ("mean", "std", "absmax")]
        assert found == pytest.approx([values.mean(), values.std(), np.abs(values).max()], rel=1e-4, abs=1e-6)


def test_statistics_are_of_training_only_and_of_one_step() -> None:
    engine = make(log__activation_statistics=True)
    given = batch_of(random_rows(2))
    first = engine.train_step(given, lr=0.0, weight_decay=0.0).fetch()
    engine.eval_step(batch_of(random_rows(4, 3)))
    engine.logits(random_rows(2, 4)[:, :-1])
    second = engine.train_step(given, lr=0.0, weight_decay=0.0).fetch()
    assert first.extra == second.extra
    assert not engine.taps.active


def test_statistics_names_are_in_the_registry() -> None:
    from vorox.experiments.metrics import metric

    engine = make(
        log__activation_statistics=True, log__accuracy=True, log__parameter_norms=True, loss__z_loss_weight=0.1,
        precision__dtype="fp16",
    )  # fmt: skip
    for name in engine.train_step(batch_of(random_rows(2)), lr=LR, weight_decay=0.1).fetch().extra:
        assert metric(name).name
    assert configuration(log__activation_statistics=True).log.activation_statistics


def test_statistics_of_a_step_on_pairs_are_those_of_the_policy() -> None:
    """The reference of DPO runs in the same modules, before the policy does; here it has other weights."""
    engine = make(log__activation_statistics=True, loss__name="dpo", log__accuracy=False)
    engine.freeze_reference()
    rng = np.random.default_rng()
    weights = [(name, rng.normal(size=array.shape).astype(np.float32)) for name, array in engine.export_weights()]
    engine.import_weights(weights)
    tokens = rng.integers(0, 50, (2, 1, 12)).astype(np.int32)
    segments = np.tile(np.repeat(np.array([1, 2], np.int32), 6), (2, 1, 1))
    positions = np.tile(np.tile(np.arange(6, dtype=np.int32), 2), (2, 1, 1))
    labels = np.where(positions < 5, np.roll(tokens, -1, -1), IGNORED_LABEL).astype(np.int32)
    count, cursor = int((labels != IGNORED_LABEL).sum()), DataCursor("", 0, 1, 0, 0)
    batch = Batch(0, tokens, labels, segments, positions, np.zeros((2, 1), np.uint64), count, cursor)
    extras = engine.train_step(batch, lr=0.0, weight_decay=0.0).fetch().extra
    seen = dict(weights)["embedding.weight"][tokens]
    assert extras["activation/0/block_input/absmax"] == pytest.approx(np.abs(seen).max(), rel=1e-6)
    assert extras["activation/0/block_input/mean"] == pytest.approx(seen.mean(), rel=1e-4, abs=1e-6)
