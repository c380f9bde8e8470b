"""The engine's own promises beyond the conformance suite: randomness, precision, documents, extras, refusals.

Tolerances: another split into micro-batches is another order of fp32 sums, 1e-6 in the loss and 1e-5 in parameters
after a step; bf16 has 8 bits and fp16 11, so losses agree to 1% and 0.2%.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_engine.small_models import (
    GPT2,
    LLAMA,
    LR,
    MODELS,
    POSITIONS,
    QWEN3,
    VOCAB,
    batch_of,
    make,
    random_rows,
    randomise,
    train,
)
from vorox.backends.torch_engine.device import matrix_products
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.engine import StepValues
from vorox.core.errors import DataError, DoesNotFitError

pytestmark = pytest.mark.torch
FAMILIES = pytest.mark.parametrize("model", [GPT2, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])


def step(engine: TorchEngine, given: Batch, lr: float = LR) -> StepValues:
    return engine.train_step(given, lr=lr, weight_decay=0.1).fetch()


def weights_of(engine: TorchEngine) -> dict[str, np.ndarray]:
    return dict(engine.export_weights())


def assert_close(first: TorchEngine, second: TorchEngine, tolerance: float) -> None:
    expected = weights_of(second)
    for name, array in weights_of(first).items():
        if name.endswith("key.bias"):
            continue  # shifts all scores of a query alike: its gradient is rounding, which AdamW blows up to full steps
        np.testing.assert_allclose(array, expected[name], atol=tolerance, rtol=0, err_msg=name)


@FAMILIES
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulation_1x8_2x4_8x1(model: dict[str, Any], optimizer: str) -> None:
    keep = np.random.default_rng(5).random((8, POSITIONS)) < np.linspace(0.1, 1, 8)[:, None]
    engines = {split: make(model, optimizer__name=optimizer) for split in (1, 2, 8)}
    for engine in engines.values():
        randomise(engine)
    values = {split: step(engine, batch_of(random_rows(8), split, keep=keep)) for split, engine in engines.items()}
    for split in (2, 8):
        assert values[split].loss == pytest.approx(values[1].loss, rel=1e-6)
        assert values[split].grad_norm == pytest.approx(values[1].grad_norm, rel=1e-5)
        assert_close(engines[split], engines[1], 1e-5)


@FAMILIES
def test_learns_one_batch(model: dict[str, Any]) -> None:
    engine, given = make(model), batch_of(random_rows(4))
    losses = [step(engine, given).loss for _ in range(60)]
    assert losses[0] == pytest.approx(np.log(VOCAB), abs=0.05)
    assert losses[-1] < 1.5


class TestDropout:
    MODEL = LLAMA | {"dropout_fraction": 0.3}

    def test_replays_whatever_else_draws(self) -> None:
        first, second = make(self.MODEL), make(self.MODEL)
        losses = train(first, 4)
        found: list[float] = []
        for index in range(4):
            torch.manual_seed(1000 + index)  # somebody else's randomness
            torch.rand(7)
            second.eval_step(batch_of(random_rows(2)))
            found += train(second, 1, start=index)
        assert found == losses
        assert first.fingerprint() == second.fingerprint()

    def test_leaves_the_generators_of_the_process_alone(self) -> None:
        engine = make(self.MODEL)
        before = torch.get_rng_state()
        train(engine, 1)
        assert torch.equal(torch.get_rng_state(), before)

    def test_is_another_one_each_step_seed_and_micro_batch(self) -> None:
        row = np.repeat(random_rows(1), 2, axis=0)

        def loss(seed: int, number: int) -> float:
            return step(make(self.MODEL, run__seed=seed), batch_of(row[:1], step=number)).loss

        assert len({loss(1, 0), loss(1, 1), loss(2, 0)}) == 3
        same = make(self.MODEL)
        split = step(same, batch_of(row, 2)).loss
        assert split != pytest.approx(step(make(self.MODEL), batch_of(row[:1])).loss, rel=1e-6)

    def test_is_off_in_evaluation(self) -> None:
        dropping, plain = make(self.MODEL), make(LLAMA)
        tokens = random_rows(2)
        assert np.array_equal(dropping.logits(tokens[:, :-1]), plain.logits(tokens[:, :-1]))
        assert dropping.eval_step(batch_of(tokens)) == plain.eval_step(batch_of(tokens))

    @pytest.mark.parametrize("kernel", ["auto", "reference"])
    def test_reaches_every_place(self, kernel: str) -> None:
        """Embedding, attention weights and both branches: each alone changes the result."""
        places: list[float] = []
        original = torch.nn.functional.dropout

        def counted(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            if p > 0:
                places.append(p)
            return original(x, p, training, inplace)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "dropout", counted)
            step(make(self.MODEL | {"attention_kernel": kernel}), batch_of(random_rows(2)))
        branches = 1 + 2 * 2
        assert places == [0.3] * (branches + (2 if kernel == "reference" else 0))


@FAMILIES
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputing_blocks_changes_no_bit(model: dict[str, Any], dropout: float) -> None:
    model = model | {"dropout_fraction": dropout}
    plain, recomputing = make(model), make(model, train__activation_checkpointing="block")
    calls = 0

    def count(_: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    assert train(plain, 3) == train(recomputing, 3)
    assert plain.fingerprint() == recomputing.fingerprint()
    for layer in range(2):
        recomputing.taps.attach("block_input", layer, count)
    train(recomputing, 1, start=3)
    assert calls == 4, "each block ran forward twice"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_documents_in_one_row_train_like_rows_of_their_own(name: str) -> None:
    """Loss and every gradient: packing with document masking is only a saving."""
    generator = np.random.default_rng(4)
    documents = [generator.integers(0, VOCAB, length, np.int32) for length in (9, 4, 10)]
    together, alone = make(MODELS[name]), make(MODELS[name])
    randomise(together)
    randomise(alone)
    first, second = step(together, packed([documents])), step(alone, packed([[document] for document in documents]))
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)
    expected = dict(alone.parameters.whole(alone.parameters.gradients))
    for key, gradient in together.parameters.whole(together.parameters.gradients):
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=2e-6, msg=key)


def test_a_document_does_not_notice_its_neighbours() -> None:
    engine = make(GPT2)
    randomise(engine)
    generator = np.random.default_rng(6)
    documents = [generator.integers(0, VOCAB, length, np.int32) for length in (9, 4, 10)]
    others = [documents[0], (documents[1] + 1) % VOCAB, (documents[2] + 1) % VOCAB]
    seen: list[np.ndarray] = []
    engine.taps.attach("after_mlp", 1, lambda x: seen.append(x[0, :9].numpy().copy()))
    for given in (documents, others):
        engine.eval_step(packed([given]))
    assert np.array_equal(seen[0], seen[1])


def test_logits_have_gradients_whatever_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gradients = make(LLAMA), []
    randomise(engine)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, 8), np.int32)
    for min_work in (1 << 60, 0):  # torch.mm, and oneDNN where the processor takes it
        monkeypatch.setattr(matrix_products, "ONEDNN_MIN_WORK", min_work)
        engine.parameters.zero_gradients()
        engine.forward(tokens).square().mean().backward()
        found = dict(engine.parameters.whole(engine.parameters.gradients))
        gradients.append({name: gradient.clone() for name, gradient in found.items()})
    assert all(bool(gradient.any()) for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def packed(rows: list[list[np.ndarray]]) -> Batch:
    """Rows of documents, with segments, positions that start anew, and padding."""
    shape = (1, len(rows), POSITIONS)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    labels = np.full(shape, IGNORED_LABEL, np.int32)
    for index, documents in enumerate(rows):
        offset = 0
        for number, document in enumerate(documents, start=1):
            place = slice(offset, offset + len(document))
            tokens[0, index, place], segments[0, index, place] = document, number
            positions[0, index, place] = np.arange(len(document))
            labels[0, index, offset : offset + len(document) - 1] = document[1:]
            offset += len(document)
    kept = int((labels != IGNORED_LABEL).sum())
    return Batch(
        0, tokens, labels, segments, positions, np.zeros(shape[:2], np.uint64), kept, DataCursor("", 0, 1, 0, 0)
    )


@FAMILIES
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.01), ("fp16", 0.002)])
def test_half_precision_is_close(model: dict[str, Any], dtype: str, tolerance: float) -> None:
    exact, half = make(model), make(model, precision__dtype=dtype)
    expected, found = train(exact, 12), train(half, 12)
    assert found == pytest.approx(expected, rel=tolerance)
    assert found != expected
    assert half.environment()["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    tokens = random_rows(2)
    assert half.eval_step(batch_of(tokens)).loss_sum == pytest.approx(
        exact.eval_step(batch_of(tokens)).loss_sum, rel=tolerance
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_replays(dtype: str) -> None:
    first, second = make(precision__dtype=dtype), make(precision__dtype=dtype)
    assert train(first, 3) == train(second, 3)
    assert first.fingerprint() == second.fingerprint()


def test_a_nonfinite_step_is_skipped_and_training_goes_on() -> None:
    engine, twin = make(), make()
    train(engine, 2)
    train(twin, 2)
    handle = engine.taps.attach("after_mlp", 0, lambda x: x * float("nan"))
    values = step(engine, batch_of(random_rows(8, 99), step=2))
    assert not values.finite
    handle()
    assert engine.fingerprint() == twin.fingerprint()
    assert train(engine, 2, start=3) == train(twin, 2, start=3)


class TestExtras:
    def test_accuracy(self) -> None:
        engine = make(log__accuracy=True)
        randomise(engine)
        rows, keep = random_rows(6), np.random.default_rng(2).random((6, POSITIONS)) < 0.7
        rows[:, 1:] = np.where(  # make some of them right
            np.random.default_rng(3).random((6, POSITIONS)) < 0.5, engine.logits(rows[:, :-1]).argmax(-1), rows[:, 1:]
        )
        right = (engine.logits(rows[:, :-1]).argmax(-1) == rows[:, 1:])[keep].mean()
        found = step(engine, batch_of(rows, 3, keep=keep)).extra
        assert set(found) == {"accuracy"}
        assert found["accuracy"] == pytest.approx(right)
        assert found["accuracy"] > 0

    def test_parameter_norm(self) -> None:
        engine = make(log__parameter_norms=True)
        found = step(engine, batch_of(random_rows(2))).extra["parameter_norm"]
        squares = sum(float(np.square(array, dtype=np.float64).sum()) for array in weights_of(engine).values())
        assert found == pytest.approx(squares**0.5, rel=1e-6)

    def test_z_loss(self) -> None:
        engine, plain = make(loss__z_loss_weight=0.01), make()
        randomise(engine)
        randomise(plain)
        rows = random_rows(2)
        log_partition = torch.from_numpy(engine.logits(rows[:, :-1])).double().logsumexp(-1)
        values, expected = step(engine, batch_of(rows)), step(plain, batch_of(rows))
        assert values.extra["z_loss"] == pytest.approx(0.01 * float(log_partition.square().mean()), rel=1e-5)
        assert values.loss == expected.loss, "the reported loss is without auxiliary terms"
        assert values.grad_norm != expected.grad_norm

    def test_label_smoothing_is_not_in_the_reported_loss(self) -> None:
        engine, plain = make(loss__label_smoothing_fraction=0.2), make()
        given = batch_of(random_rows(2))
        values, expected = step(engine, given), step(plain, given)
        assert values.loss == expected.loss
        assert values.grad_norm != expected.grad_norm

    def test_nothing_unless_asked(self) -> None:
        assert step(make(), batch_of(random_rows(2))).extra == {}

    def test_asking_does_not_change_training(self) -> None:
        asked = make(log__accuracy=True, log__parameter_norms=True, log__activation_statistics=True)
        plain = make()
        assert train(asked, 3) == train(plain, 3)
        assert asked.fingerprint() == plain.fingerprint()


def test_fetch_can_wait_and_be_repeated() -> None:
    engine, twin = make(), make()
    late = [engine.train_step(batch_of(random_rows(4, i), step=i), lr=LR, weight_decay=0.1) for i in range(3)]
    assert [result.fetch().loss for result in late] == train_small(twin, 3)
    assert late[0].fetch() is late[0].fetch()


def train_small(engine: TorchEngine, steps: int) -> list[float]:
    return [step(engine, batch_of(random_rows(4, i), step=i)).loss for i in range(steps)]


def test_chunking_the_loss_changes_only_rounding() -> None:
    whole, chunked = make(), make(loss__chunk_tokens=5)
    assert train(chunked, 3) == pytest.approx(train(whole, 3), rel=1e-6)
    assert_close(chunked, whole, 1e-5)


def test_a_learning_rate_of_zero_changes_no_parameter() -> None:
    engine = make()
    before = weights_of(engine)
    step(engine, batch_of(random_rows(2)), lr=0.0)
    assert all(np.array_equal(array, before[name]) for name, array in weights_of(engine).items())


def test_a_batch_without_targets_is_no_error() -> None:
    engine = make()
    values = step(engine, batch_of(random_rows(2), keep=np.zeros((2, POSITIONS), bool)))
    assert (values.loss, values.grad_norm, values.finite) == (0.0, 0.0, True)


def test_exported_weights_are_copies() -> None:
    engine = make()
    before = engine.fingerprint()
    for _, array in engine.export_weights():
        array.fill(7)
    assert engine.fingerprint() == before


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("tokens_ABT", VOCAB, "A token id"),
        ("tokens_ABT", -1, "A token id"),
        ("labels_ABT", VOCAB, "A label is outside"),
        ("labels_ABT", -3, "A label is outside"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(array: str, value: int, message: str) -> None:
    engine, given = make(), batch_of(random_rows(4), 2, step=17)
    before = engine.fingerprint()
    getattr(given, array)[1, 1, 5] = value
    for call in (lambda: step(engine, given), lambda: engine.eval_step(given)):
        with pytest.raises(DataError, match=message) as caught:
            call()
        assert caught.value.where == "step 17"
    assert engine.fingerprint() == before


def test_rows_longer_than_the_model_are_refused() -> None:
    with pytest.raises(DataError, match="Rows have 25 positions; the model has 24"):
        step(make(), batch_of(random_rows(2, positions=POSITIONS + 1)))


def test_positions_outside_the_model_are_refused() -> None:
    given = packed([[np.arange(5, dtype=np.int32)]])
    assert given.position_ids_ABT is not None
    given.position_ids_ABT[0, 0, 3] = POSITIONS
    with pytest.raises(DataError, match="A position is outside the model's 24"):
        step(make(GPT2), given)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError(),
     RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
     RuntimeError("CUDA error: out of memory"), RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"),
     RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")],
)  # fmt: skip
def test_running_out_of_memory_says_what_to_do(error: Exception) -> None:
    engine = make()

    def fail(_: torch.Tensor) -> None:
        raise error

    engine.taps.attach("after_mlp", 0, fail)
    with pytest.raises(DoesNotFitError, match="Out of memory while training") as caught:
        step(engine, batch_of(random_rows(2)))
    assert caught.value.exit_code == 3
    first, *_ = caught.value.hint.split(", ")
    assert first.startswith("set train.micro_batch_sequences=4 (more accumulation)"), "half of what grew"
    assert "GiB" in caught.value.what
    assert "alloc" not in caught.value.what.lower(), "the allocator's own words help nobody"


def test_other_errors_pass_unchanged() -> None:
    engine = make()

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("something else")

    engine.taps.attach("after_mlp", 0, fail)
    with pytest.raises(RuntimeError, match="something else"):
        step(engine, batch_of(random_rows(2)))
