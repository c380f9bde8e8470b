"""Taps of the JAX engine: the same points, names and numbers as the torch engine's, compiled or not yet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends.jax_engine.jax_models import make
from small_configurations import GPT2, HYBRID, batch_of, random_rows
from vorox.core.engine import TapPoint
from vorox.core.errors import ConfigError
from vorox.models.decoder.tap_points import POINTS

pytestmark = [pytest.mark.jax]
SCANNED = pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])


@pytest.mark.torch
@SCANNED
def test_statistics_are_those_of_the_torch_engine(scan_layers: bool) -> None:
    from backends.torch_engine.small_models import make as make_torch

    wanted = make_torch(GPT2, log__activation_statistics=True)
    engine = make(GPT2, log__activation_statistics=True, runtime__scan_layers=scan_layers)
    engine.import_weights((name, array * 3) for name, array in wanted.export_weights())
    wanted.import_weights((name, array * 3) for name, array in list(wanted.export_weights()))
    batch = batch_of(random_rows(8), 2)
    expected = wanted.train_step(batch, lr=1e-3, weight_decay=0.1).fetch().extra
    found = engine.train_step(batch, lr=1e-3, weight_decay=0.1).fetch().extra
    assert found.keys() == expected.keys()
    assert len(found) == 2 * 3 * 3
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@SCANNED
@pytest.mark.parametrize("point", POINTS)
def test_a_returned_array_replaces_the_stream_of_that_layer(point: TapPoint, scan_layers: bool) -> None:
    engine = make(runtime__scan_layers=scan_layers)
    tokens = random_rows(2)[:, :-1]
    before = engine.logits(tokens)
    detach = engine.taps.attach(point, 1, jnp.zeros_like)
    zeroed = engine.logits(tokens)
    if point == "after_mlp":
        assert not zeroed.any(), "the last stream is zero, and so is its norm"
    assert not np.allclose(zeroed, before, atol=1e-3)
    detach()
    assert np.array_equal(engine.logits(tokens), before)


def test_a_perturbation_reaches_the_gradient() -> None:
    engine = make()
    engine.taps.attach("block_input", 1, jax.lax.stop_gradient)
    engine.train_step(batch_of(random_rows(2)), lr=0.0, weight_decay=0.0)
    assert not np.asarray(engine.state.exp_avg["blocks.0.mlp.up.weight"]).any(), "nothing flows past a stopped stream"
    assert np.asarray(engine.state.exp_avg["blocks.1.mlp.up.weight"]).any()


def test_watching_sees_the_stream_and_changes_no_bit() -> None:
    seen: list[tuple[int, ...]] = []
    watched, plain = make(), make()

    def watch(x_BTD: jax.Array) -> None:
        jax.debug.callback(lambda x: seen.append(x.shape), x_BTD)

    watched.taps.attach("after_mlp", 0, watch)
    batch = batch_of(random_rows(4))
    losses = [engine.train_step(batch, lr=1e-3, weight_decay=0.1).fetch().loss for engine in (watched, plain)]
    assert losses[0] == losses[1]
    assert watched.fingerprint() == plain.fingerprint()
    assert seen == [(4, 24, 32)]


@pytest.mark.parametrize(
    ("point", "layer", "message"),
    [("before_mlp", 0, "available: block_input, after_attention"), ("after_mlp", 2, "layer 2 does not exist")],
)
def test_unknown_places_are_refused(point: TapPoint, layer: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make().taps.attach(point, layer, lambda x: None)


@pytest.mark.torch
def test_points_of_a_layer_pattern_see_what_those_of_the_torch_engine_see() -> None:
    """Of the layers M*-MM only the second has attention."""
    from backends.torch_engine.small_models import make as make_torch

    engine, torch_engine = make(HYBRID), make_torch(HYBRID)
    engine.import_weights((name, array * 3) for name, array in torch_engine.export_weights())
    torch_engine.import_weights((name, array * 3) for name, array in list(torch_engine.export_weights()))
    found, expected = dict[tuple[str, int], np.ndarray](), dict[tuple[str, int], np.ndarray]()
    for layer in range(5):
        for point in POINTS:
            key = (point, layer)
            if point == "after_attention" and layer != 1:
                with pytest.raises(ConfigError, match=f"Layer {layer} has no tap point 'after_attention'"):
                    engine.taps.attach(point, layer, lambda x: x)
                continue
            engine.taps.attach(
                point, layer, lambda x, key=key: jax.debug.callback(lambda y: found.update({key: np.array(y)}), x)
            )
            torch_engine.taps.attach(point, layer, lambda x, key=key: expected.update({key: x.detach().numpy().copy()}))
    tokens = random_rows(2)[:, :-1]
    torch_engine.logits(tokens)
    engine.logits(tokens)
    jax.effects_barrier()
    assert found.keys() == expected.keys()
    assert len(found) == 5 * 2 + 1
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, atol=1e-4, rtol=1e-4, err_msg=str(key))
    zeroed = make(HYBRID)
    zeroed.taps.attach("after_attention", 1, jnp.zeros_like)
    assert not np.allclose(zeroed.logits(tokens), make(HYBRID).logits(tokens), atol=1e-3)
