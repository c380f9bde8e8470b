"""What every engine keeps, whatever it is made of: the rules of ``core/engine.py`` as cases.

Tolerances: splitting a step into other micro-batches changes the order of sums, so losses agree to 1e-6 and parameters
after one step at a rate of 0.01 to 1e-5 in fp32, in JAX to 2e-5 (AdamW's first update of a gradient near its eps has
the sign of rounding). Everything that the contract calls "the same bits" is compared by fingerprint.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engines import LR, POSITIONS, VOCAB, batch, make_engine, packed_batch, rows
from vorox.core.batch import IGNORED_LABEL, Batch, DataShard
from vorox.core.engine import Engine, StepValues, Tap, attach_taps
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.staged_directory import StagedDirectory
from vorox.training.checkpoints.store import write_state

ENGINES = [
    "numpy",
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("torch-experts", marks=pytest.mark.torch),
    pytest.param("jax", marks=pytest.mark.jax),
    pytest.param("jax-experts", marks=[pytest.mark.jax, pytest.mark.slow]),
]
pytestmark = pytest.mark.parametrize("name", ENGINES)
PARAMETER_TOLERANCE = {"numpy": 1e-5, "torch": 1e-5, "torch-experts": 1e-5, "jax": 2e-5, "jax-experts": 2e-5}


def step(engine: Engine, given: Batch, lr: float = LR, weight_decay: float = 0.1) -> StepValues:
    return engine.train_step(given, lr=lr, weight_decay=weight_decay).fetch()


def weights(engine: Engine) -> dict[str, np.ndarray]:
    return {key: array.copy() for key, array in engine.export_weights()}


def save(engine: Engine, target: Path) -> Path:
    with StagedDirectory(target) as directory:
        write_state(engine.snapshot(detached=False), directory)
        return directory.commit({})


def test_says_what_it_is(name: str) -> None:
    engine = make_engine(name)
    assert engine.name == name.partition("-")[0]
    assert engine.data_shard == DataShard(0, 1)
    assert engine.environment()["determinism"] in {"none", "data", "bitwise"}
    assert all(isinstance(value, str | int | bool) for value in engine.environment().values())
    assert all(math.isfinite(value) for value in engine.device_stats().values())
    engine.synchronize()


OPTIONAL: dict[str, tuple[Any, ...]] = {
    "start_profiler": (Path("trace"),), "exchange_average": (), "import_pretrained": (Path("model"),),
    "merged_weights": (), "freeze_reference": (), "reference_fingerprint": (), "set_teacher": (None, ()),
    "set_stored_teacher": ("identity",),
}  # fmt: skip


def test_what_an_engine_does_not_have_is_refused_with_its_name(name: str) -> None:
    engine = make_engine(name)
    for feature, arguments in OPTIONAL.items():
        if getattr(type(engine), feature) is getattr(Engine, feature):
            with pytest.raises(ConfigError, match=f"The {engine.name} engine has no "):
                getattr(engine, feature)(*arguments)
    if type(engine).taps is Engine.taps:
        with pytest.raises(ConfigError, match="does not support taps"):
            attach_taps(engine, [Tap("block_input", 0, lambda x: x)])


def test_starts_at_the_entropy_of_the_vocabulary(name: str) -> None:
    values = step(make_engine(name), batch(rows(8)))
    assert values.loss == pytest.approx(math.log(VOCAB), abs=0.1)
    assert values.finite
    assert values.grad_norm > 0


def test_loss_falls(name: str) -> None:
    engine, given = make_engine(name), batch(rows(4), 2)
    losses = [step(engine, given).loss for _ in range(60)]
    assert losses[-1] < losses[0] - 0.5
    assert all(math.isfinite(loss) for loss in losses)


def test_same_seed_same_bits_other_seed_other_bits(name: str) -> None:
    first, second, other = make_engine(name), make_engine(name), make_engine(name, seed=1)
    assert first.fingerprint() == second.fingerprint() != other.fingerprint()
    for index in range(3):
        given = batch(rows(4, seed=index), 2, step=index)
        assert step(first, given) == step(second, given)
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_accumulation_does_not_matter(name: str, micro_batches: int) -> None:
    keep = np.random.default_rng(5).random((8, POSITIONS)) < np.linspace(0.1, 1, 8)[:, None]  # uneven on purpose
    whole, split = make_engine(name), make_engine(name)
    expected = step(whole, batch(rows(8), keep=keep))
    found = step(split, batch(rows(8), micro_batches, keep=keep))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for key, array in weights(whole).items():
        np.testing.assert_allclose(weights(split)[key], array, atol=PARAMETER_TOLERANCE[name], err_msg=key)


def test_masked_tokens_do_not_change_the_scale(name: str) -> None:
    plain, masked = make_engine(name), make_engine(name)
    expected = step(plain, batch(rows(4)))
    keep = np.repeat([True, False], 4)[:, None] & np.ones((8, POSITIONS), bool)
    found = step(masked, batch(np.concatenate([rows(4), rows(4, seed=9)]), 2, keep=keep))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for key, array in weights(plain).items():
        np.testing.assert_allclose(weights(masked)[key], array, atol=PARAMETER_TOLERANCE[name], err_msg=key)


def test_save_load_step_is_the_same_bits(name: str, tmp_path: Path) -> None:
    engine = make_engine(name)
    for index in range(3):
        step(engine, batch(rows(4, seed=index), step=index))
    before = engine.fingerprint()
    path = save(engine, tmp_path / "saved")
    assert engine.fingerprint() == before, "saving changes nothing"
    other = make_engine(name, seed=5)
    step(other, batch(rows(4, seed=8)))
    other.load(path)
    assert other.fingerprint() == before
    for index in range(3, 6):
        given = batch(rows(4, seed=index), step=index)
        assert step(other, given, LR / index) == step(engine, given, LR / index)
    assert other.fingerprint() == engine.fingerprint()


def test_says_how_many_bytes_a_save_takes(name: str, tmp_path: Path) -> None:
    """A full disk is reported with what is needed at least: the arrays, without headers and descriptions."""
    engine = make_engine(name)
    path = save(engine, tmp_path / "saved")
    written = sum(file.stat().st_size for file in path.iterdir() if file.name != MANIFEST_NAME)
    size_bytes = engine.snapshot(detached=False).size_bytes
    assert 1000 < size_bytes < written < 1.5 * size_bytes + 10_000


def test_a_detached_snapshot_is_of_its_moment(name: str, tmp_path: Path) -> None:
    """Steps, an import and a load behind it change no bit of it, and taking it changes no bit of the training."""
    engine, twin = make_engine(name), make_engine(name)
    for index in range(2):
        assert step(engine, batch(rows(4, seed=index), step=index)) == step(
            twin, batch(rows(4, seed=index), step=index)
        )
    before = save(engine, tmp_path / "before")
    moment = engine.fingerprint()
    snapshot = engine.snapshot(detached=True)
    with ThreadPoolExecutor(1) as thread:  # hashed while steps are made
        hashed = [thread.submit(snapshot.fingerprint) for _ in range(3)]
        for index in range(2, 5):
            given = batch(rows(4, seed=index), step=index)
            assert step(engine, given) == step(twin, given)
    assert {future.result() for future in hashed} == {moment}
    assert engine.fingerprint() == twin.fingerprint() != moment
    engine.import_weights(make_engine(name, seed=7).export_weights())
    engine.load(save(make_engine(name, seed=8), tmp_path / "other"))
    assert snapshot.fingerprint() == moment
    with StagedDirectory(tmp_path / "after") as directory:
        write_state(snapshot, directory)
        after = directory.commit({})
    for file in before.iterdir():
        assert (after / file.name).read_bytes() == file.read_bytes(), file.name


def test_refuses_the_state_of_another_architecture(name: str, tmp_path: Path) -> None:
    path = save(make_engine(name, width=16), tmp_path / "saved")
    with pytest.raises(CheckpointError):
        make_engine(name).load(path)


def test_a_nonfinite_step_touches_nothing(name: str) -> None:
    engine, good = make_engine(name), batch(rows(4))
    step(engine, good)
    kept = weights(engine)
    first = next(iter(kept))
    engine.import_weights([(key, array * np.float32(np.inf) if key == first else array) for key, array in kept.items()])
    before = engine.fingerprint()
    values = step(engine, good)
    assert not values.finite
    assert not (math.isfinite(values.loss) and math.isfinite(values.grad_norm))
    assert engine.fingerprint() == before
    engine.import_weights(kept.items())
    assert step(engine, good).finite


def test_a_loss_above_the_limit_changes_nothing_and_a_larger_limit_no_bit(name: str) -> None:
    engine, twin, given = make_engine(name), make_engine(name), batch(rows(4))
    step(engine, given)
    step(twin, given)
    before, given = engine.fingerprint(), batch(rows(4, seed=1), step=1)
    loss = float(np.float32(engine.train_step(given, lr=LR, weight_decay=0.1, max_loss=0.0).fetch().loss))
    assert engine.fingerprint() == before
    below = engine.train_step(given, lr=LR, weight_decay=0.1, max_loss=float(np.nextafter(np.float32(loss), 0))).fetch()
    assert below.finite
    assert engine.fingerprint() == before
    values = engine.train_step(given, lr=LR, weight_decay=0.1, max_loss=loss + 1e-4).fetch()
    assert values == below == step(twin, given)
    assert engine.fingerprint() == twin.fingerprint() != before


def test_the_bits_of_the_gradients_are_those_of_the_step(name: str) -> None:
    engine, plain, given = make_engine(name, recompute_every_steps=1), make_engine(name), batch(rows(4))
    before, skip = engine.fingerprint(), {"lr": LR, "weight_decay": 0.1, "max_loss": -math.inf}
    first = engine.train_step(given, **skip).fetch()
    assert engine.fingerprint() == before
    other = batch(np.concatenate([rows(4)[:3], rows(1, seed=1)]))
    assert engine.train_step(other, **skip).fetch().gradient_bits != first.gradient_bits != ()
    assert step(engine, given).gradient_bits == first.gradient_bits
    step(plain, given)
    assert engine.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize("bit", [0, 13, 22, 31])
def test_one_flipped_bit_changes_the_checksum_of_the_gradients(name: str, bit: int) -> None:
    gradients = {key: np.arange(6, dtype=np.float32).reshape(2, 3) + index for index, key in enumerate("ab")}
    flipped = {key: array.copy() for key, array in gradients.items()}
    flipped["b"].view(np.uint32)[1, 2] ^= np.uint32(1 << bit)
    if name.startswith("torch"):
        import torch

        from vorox.backends.torch_engine.device.results import gradient_bits

        found = [gradient_bits(map(torch.from_numpy, one.values())).tolist() for one in (gradients, flipped)]
    elif name.startswith("jax"):
        import jax.numpy as jnp

        from vorox.backends.jax_engine.device.results import gradient_bits

        sums = [gradient_bits({key: jnp.asarray(array) for key, array in one.items()}) for one in (gradients, flipped)]
        found = [[float(value) for value in one.values()] for one in sums]
    else:
        return  # a hash
    assert found[0] != found[1]


def test_evaluation_does_not_disturb(name: str) -> None:
    engine, twin = make_engine(name), make_engine(name)
    step(engine, batch(rows(4)))
    step(twin, batch(rows(4)))
    before = engine.fingerprint()
    engine.eval_step(batch(rows(4, seed=3)))
    engine.logits(rows(2)[:, :-1])
    engine.decoder(2, POSITIONS).feed(rows(2)[:, :3])
    assert engine.fingerprint() == before
    given = batch(rows(4, seed=1), step=1)
    assert step(engine, given) == step(twin, given)
    assert engine.fingerprint() == twin.fingerprint()


def test_evaluation_adds_up(name: str) -> None:
    engine = make_engine(name)
    for index in range(5):
        step(engine, batch(rows(4), step=index))
    keep = np.random.default_rng(1).random((6, POSITIONS)) < 0.7
    whole = engine.eval_step(batch(rows(6), keep=keep))
    parts = [engine.eval_step(batch(rows(6)[i : i + 2], keep=keep[i : i + 2])) for i in (0, 2, 4)]
    assert whole.num_target_tokens == int(keep.sum()) == sum(part.num_target_tokens for part in parts)
    assert whole.num_correct == sum(part.num_correct for part in parts)
    assert whole.loss_sum == pytest.approx(sum(part.loss_sum for part in parts), rel=1e-6)
    values = step(engine, batch(rows(6), 3, keep=keep, step=5))
    assert values.loss == pytest.approx(whole.loss_sum / whole.num_target_tokens, rel=1e-5), "loss before the update"


def test_logits_explain_the_loss(name: str) -> None:
    engine, tokens = make_engine(name), rows(3)
    for index in range(5):
        step(engine, batch(rows(4), step=index))
    logits = engine.logits(tokens[:, :-1]).astype(np.float64)
    assert logits.shape[:2] == (3, POSITIONS)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, tokens[:, 1:, None], -1).sum()
    values = engine.eval_step(batch(tokens))
    assert values.loss_sum == pytest.approx(expected, rel=1e-5)
    assert values.num_correct == (logits.argmax(-1) == tokens[:, 1:]).sum()


def test_decoding_in_pieces_is_the_same(name: str) -> None:
    engine, tokens = make_engine(name), rows(3)[:, :-1]
    expected = engine.logits(tokens)
    decoder, fed = engine.decoder(3, POSITIONS), 0
    for count in (3, 1, 1, 4, POSITIONS - 9):
        found = decoder.feed(tokens[:, fed : fed + count])
        fed += count
        np.testing.assert_allclose(found, expected[:, fed - 1], atol=1e-4)


def test_documents_of_a_row_do_not_see_each_other(name: str) -> None:
    engine = make_engine(name)
    for index in range(5):
        step(engine, batch(rows(4), step=index))
    documents = [rows(1, seed=1)[0, :6], rows(1, seed=2)[0, :7]]
    together = engine.eval_step(packed_batch(documents))
    alone = [engine.eval_step(packed_batch([document])) for document in documents]
    assert together.num_target_tokens == 11
    assert together.loss_sum == pytest.approx(sum(part.loss_sum for part in alone), rel=1e-5)
    unmasked = np.full((1, POSITIONS + 1), IGNORED_LABEL, np.int32)
    unmasked[0, :13] = np.concatenate(documents)
    keep = (unmasked[:, 1:] != IGNORED_LABEL) & (np.arange(POSITIONS) != 5)
    joined = engine.eval_step(batch(np.where(unmasked < 0, 0, unmasked), keep=keep))
    assert joined.loss_sum != pytest.approx(together.loss_sum, rel=1e-5), "without masking they do"


def test_weights_travel(name: str) -> None:
    engine, other = make_engine(name), make_engine(name, seed=1)
    step(engine, batch(rows(4)))
    exported = weights(engine)
    assert all(array.dtype == np.float32 for array in exported.values())
    other.import_weights(exported.items())
    assert {key: array.tobytes() for key, array in weights(other).items()} == {
        key: array.tobytes() for key, array in exported.items()
    }
    np.testing.assert_array_equal(other.logits(rows(2)[:, :-1]), engine.logits(rows(2)[:, :-1]))
    fresh = make_engine(name, seed=7)
    fresh.import_weights(exported.items())
    assert fresh.fingerprint() == other.fingerprint() != engine.fingerprint(), "the optimizer starts afresh"


def test_refuses_wrong_weights(name: str) -> None:
    engine = make_engine(name)
    exported = list(weights(engine).items())
    before = engine.fingerprint()
    wrong_shape = [(exported[0][0], exported[0][1][:-1]), *exported[1:]]
    for given in (exported[1:], [*exported, ("stranger.weight", exported[0][1])], wrong_shape):
        with pytest.raises(CheckpointError):
            engine.import_weights(given)
    assert engine.fingerprint() == before, "a refused import changes nothing"


def test_fingerprint_sees_every_bit(name: str) -> None:
    engine = make_engine(name)
    exported = weights(engine)
    engine.import_weights(exported.items())
    seen = {engine.fingerprint()}
    assert engine.fingerprint() in seen
    for key, array in exported.items():
        changed = array.copy()
        changed.view(np.uint32).reshape(-1)[-1] ^= 1
        engine.import_weights([(k, changed if k == key else a) for k, a in exported.items()])
        assert engine.fingerprint() not in seen, key
        seen.add(engine.fingerprint())


def test_no_learning_rate_no_change(name: str) -> None:
    engine = make_engine(name)
    before = weights(engine)
    result = engine.train_step(batch(rows(4)), lr=0.0, weight_decay=0.1)
    assert result.fetch() == result.fetch()
    for key, array in weights(engine).items():
        np.testing.assert_array_equal(array, before[key], err_msg=key)


def test_weight_decay_shrinks(name: str) -> None:
    plain, decayed = make_engine(name), make_engine(name)
    step(plain, batch(rows(4)), weight_decay=0.0)
    step(decayed, batch(rows(4)), weight_decay=10.0)
    norm = {engine: sum(float((a**2).sum()) for a in weights(engine).values()) for engine in (plain, decayed)}
    assert norm[decayed] < norm[plain]


def test_results_may_be_fetched_late(name: str) -> None:
    engine, twin = make_engine(name), make_engine(name)
    given = [batch(rows(4, seed=index), step=index) for index in range(4)]
    now = [step(engine, one) for one in given]
    pending = [twin.train_step(one, lr=LR, weight_decay=0.1) for one in given]
    assert [result.fetch() for result in reversed(pending)] == now[::-1]
    assert engine.fingerprint() == twin.fingerprint()
