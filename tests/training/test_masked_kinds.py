"""Masked documents of every kind: two corpora that differ in one document give equal runs once it is masked.

The document has the same length in both, and another content: other words, other answers, another picture, and other
logits of a teacher. So all else is equal, and what differs in a step comes from the document. Both corpora are stored
and trained on apart, from their files on; only the order of rows, which hashes of all texts decide, is made the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import image_text_models
import pictures
import tiny_runs
from vorox.api.teacher_logits import write_teacher_logits
from vorox.cli import main
from vorox.core.batch import IGNORED_LABEL, Batch
from vorox.core.config import load_config
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.cache.units import packing
from vorox.data.provenance.named_documents import named_documents
from vorox.data.provenance.queries import when, where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import read_chain, read_states
from vorox.training.fork import ForkChange, fork

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LETTERS = "abcdefghijklmnopqrstuvwxyz "
BASE = (
    "backend=torch", "data.validation.held_out_fraction=0", "eval.every_steps=null", "data.shuffle=false",
    "checkpoint.keep_last=9", "log.matmul_peak=false",
)  # fmt: skip
NUM_RECORDS = 25
"""So few that every run reads all of them."""


@pytest.fixture(autouse=True)
def _order_without_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(rows: packing.Packing, documents_D: Any) -> Any:
        lengths_only = documents_D.copy()
        lengths_only["text_xxh3"] = 0
        return original(rows, lengths_only)

    original = packing.stored_order
    monkeypatch.setattr(packing, "stored_order", order)


@dataclass(frozen=True)
class Corpora:
    """Two folders with the same file names, and the record in which they differ."""

    folders: tuple[Path, Path]
    ordinal: int
    shared: Path
    """A folder for what both read."""


def letters(chooser: random.Random, low: int, high: int | None = None) -> str:
    return "".join(chooser.choices(LETTERS, k=chooser.randint(low, high or low)))


def write(tmp_path: Path, record: Callable[[random.Random], Any], other: Callable[[Any], Any]) -> Corpora:
    """Write random records as two files that differ in one early record."""
    chooser = random.Random()
    records, ordinal = [record(chooser) for _ in range(NUM_RECORDS)], chooser.randrange(3, 8)
    changed = [*records]
    changed[ordinal] = other(records[ordinal])
    folders = (tmp_path / "one", tmp_path / "other")
    for folder, found in zip(folders, (records, changed), strict=True):
        (folder / "text").mkdir(parents=True)
        lines = "".join(json.dumps(one) + "\n" for one in found)
        (folder / "text" / "text.jsonl").write_text(lines, encoding="utf-8")
    return Corpora(folders, ordinal, tmp_path)


def other_letters(text: str) -> str:
    """Another text of equal length in bytes."""
    return "".join(LETTERS[(LETTERS.index(sign) + 7) % len(LETTERS)] for sign in text)


def texts(tmp_path: Path) -> Corpora:
    return write(
        tmp_path, lambda chooser: {"text": letters(chooser, 5, 40)}, lambda one: {"text": other_letters(one["text"])}
    )


def pairs(tmp_path: Path) -> Corpora:
    def record(chooser: random.Random) -> dict[str, str]:
        return {name: letters(chooser, 3, 12).strip() + "." for name in ("prompt", "chosen", "rejected")}

    return write(tmp_path, record, lambda one: {name: other_letters(text[:-1]) + "!" for name, text in one.items()})


def teacher(corpora: Corpora, *overrides: str) -> Path:
    """A run on other texts, whose weights both corpora start from or learn from."""
    folder = corpora.shared / "teacher"
    if not folder.exists():
        settings = ["backend=torch", "optimizer.lr=0.1", "log.matmul_peak=false", *overrides]
        tiny_runs.run(tiny_runs.configuration(folder, settings))
    (run,) = (folder / "runs").iterdir()
    return run


def tiny(folder: Path, *overrides: str) -> RunConfig:
    return tiny_runs.configuration(folder, [*BASE, *overrides])


def plain_case(corpora: Corpora, *overrides: str) -> list[RunConfig]:
    return [tiny(folder, *overrides) for folder in corpora.folders]


def pair_case(corpora: Corpora, *start: str) -> list[RunConfig]:
    length = "data.sequence_length_tokens=96"
    start = start or (f"train.from_weights={teacher(corpora, length)}",)
    configs: list[RunConfig] = []
    for folder in corpora.folders:
        source = {
            "name": "text", "format": "jsonl", "paths": [str(folder / "text")],
            "chat_fields": ["prompt", "chosen", "rejected"], "preference_pairs": True,
        }  # fmt: skip
        configs.append(
            tiny(
                folder,
                f"data.sources={json.dumps([source])}",
                length,
                "loss.name=dpo",
                "loss.dpo_beta=0.5",
                *start,
            )
        )
    return configs


def transformers_pair_case(corpora: Corpora) -> list[RunConfig]:
    from backends.torch_engine.transformers_models import write_model  # imports torch

    base = corpora.shared / "base"
    write_model(base, "llama", vocab_size=264, max_position_embeddings=256)
    return pair_case(corpora, f"model={{kind: huggingface, name_or_path: {base}}}")


def live_case(corpora: Corpora) -> list[RunConfig]:
    return [tiny(folder, f"train.distillation.teacher={teacher(corpora)}") for folder in corpora.folders]


def stored_case(corpora: Corpora) -> list[RunConfig]:
    configs: list[RunConfig] = []
    for folder in corpora.folders:
        settings = (f"train.distillation.teacher={teacher(corpora)}", "train.distillation.top_k=5")
        write_teacher_logits(tiny(folder, *settings), folder / "logits", precision="fp32")
        configs.append(tiny(folder, f"train.distillation.logits={folder / 'logits'}"))
    return configs


def captions(tmp_path: Path, sizes: tuple[tuple[int, int], ...], other_size: Callable[[Any], Any]) -> Corpora:
    """Captions with one or two pictures; the pictures of one record differ, and so may their sizes in pixels."""
    chooser = random.Random()
    folders, ordinal = (tmp_path / "one", tmp_path / "other"), chooser.randrange(3, 8)
    for folder in folders:
        (folder / "text" / "pictures").mkdir(parents=True)
    lines: list[tuple[str, str]] = []
    for number in range(NUM_RECORDS):
        count, words = (chooser.randint(1, 2) if number == ordinal else number % 3), letters(chooser, 5)
        names, placeholders = [f"pictures/{number}-{index}.png" for index in range(count)], "<image>" * count
        for name in names:
            size, colour = sizes[chooser.randrange(len(sizes))], chooser.choice([*pictures.COLOURS])
            plain = pictures.picture(colour, number, size)
            (folders[0] / "text" / name).write_bytes(plain)
            if number == ordinal:
                plain = pictures.picture(colour, number + 1000, other_size(size))
            (folders[1] / "text" / name).write_bytes(plain)
        both = (words, other_letters(words) if number == ordinal else words)
        one, other = (json.dumps({"text": placeholders + text, "images": names}) for text in both)
        lines.append((one, other))
    for index, folder in enumerate(folders):
        text = "".join(line[index] + "\n" for line in lines)
        (folder / "text" / "captions.jsonl").write_text(text, encoding="utf-8")
    return Corpora(folders, ordinal, tmp_path)


def encoder_case(corpora: Corpora) -> list[RunConfig]:
    return [pictures.picture_configuration(folder, BASE) for folder in corpora.folders]


def patches_case(corpora: Corpora) -> list[RunConfig]:
    model = image_text_models.write_image_model(corpora.shared / "qwen2_vl", "qwen2_vl")
    return [
        image_text_models.image_configuration(folder, [*BASE, f"model.name_or_path={model}"])
        for folder in corpora.folders
    ]


EXPERTS = (
    "model.num_experts=4", "model.experts_per_token=2", "loss.load_balancing_weight=0.02",
    "loss.router_z_loss_weight=0.003",
)  # fmt: skip
FLOAT8 = ("precision.float8=tensorwise", "precision.float8_emulate=true", "model.intermediate_size=48")
CASES: dict[str, tuple[Callable[[Path], Corpora], Callable[[Corpora], list[RunConfig]]]] = {
    "pairs": (pairs, pair_case),
    "pairs for transformers": (pairs, transformers_pair_case),
    "stored logits": (texts, stored_case),
    "live teacher": (texts, live_case),
    "image encoder": (lambda path: captions(path, ((20, 12), (9, 31)), lambda size: size[::-1]), encoder_case),
    "images for transformers": (
        lambda path: captions(path, image_text_models.SIZES, lambda size: size), patches_case,
    ),
    "experts": (texts, lambda corpora: plain_case(corpora, *EXPERTS)),
    "experts on JAX": (
        texts, lambda corpora: plain_case(corpora, *EXPERTS, "backend=jax", "runtime.num_threads=null"),
    ),
    "8-bit floats": (texts, lambda corpora: plain_case(corpora, *FLOAT8)),
}  # fmt: skip


def outcome(run_directory: Path) -> tuple[list[str], str]:
    """The chain of a run, and the fingerprint of its last state."""
    states = read_states(run_directory)
    return [entry.chain for entry in read_chain(run_directory).values()], states[max(states)].fingerprint


def masked(parent: Path, ordinal: int) -> Path:
    """The trained fork of a run that masks a document from its start on."""
    with RunDataIndex.open(parent) as run_data:
        (file,) = run_data.readers[0].files
        change = ForkChange(named_documents(run_data, [f"{file.uri}:{ordinal}"], "here"))
        assert any(one.step <= 12 for one in when(run_data, file.uri, ordinal=ordinal))
    forked = fork(parent, 0, None, change, "masked")
    tiny_runs.run(load_config(RunLayout(forked).config), resume_from=forked)
    return forked


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.jax] if "JAX" in name else []) for name in CASES]
)
def test_nothing_of_a_masked_document_reaches_the_run(tmp_path: Path, name: str) -> None:
    if name == "8-bit floats" and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    make, configure = CASES[name]
    corpora = make(tmp_path)
    parents = [tiny_runs.run(config).run_directory for config in configure(corpora)]
    plain = [outcome(parent) for parent in parents]
    filled = [outcome(masked(parent, corpora.ordinal)) for parent in parents]
    assert filled[0] == filled[1]
    assert len({plain[0][1], plain[1][1], filled[0][1]}) == 3, "the comparison would be trivial"
    assert plain[0][0] != plain[1][0]


def first_read(run_directory: Path, ordinal: int) -> tuple[int, list[tuple[int, int, int]]]:
    """The first step that reads a document; there, row of the batch, first token and end of each of its parts."""
    with RunDataIndex.open(run_directory) as run_data:
        (file,) = run_data.readers[0].files
        step = min(one.step for one in when(run_data, file.uri, ordinal=ordinal))
        return step, [
            (index, part.row_token, part.row_token + part.num_tokens)
            for index, row in enumerate(where(run_data, step)) for part in row.documents if part.ordinal == ordinal
        ]  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Gradients of a batch, sum of its losses, what they are divided by, and log-probabilities of answers."""

    gradients: dict[str, np.ndarray]
    loss: float
    divisor: int
    answers: list[np.ndarray]


def labels_within(batch: Batch, parts: list[tuple[int, int, int]]) -> Batch:
    """The batch with the labels of some parts of its rows, and no others."""
    labels_NT = np.full_like(batch.labels_ABT.reshape(-1, batch.row_tokens), IGNORED_LABEL)
    before_NT = batch.labels_ABT.reshape(labels_NT.shape)
    for row, start, end in parts:  # token i is the label of position i - 1
        labels_NT[row, start : end - 1] = before_NT[row, start : end - 1]
    return replace(batch, labels_ABT=labels_NT.reshape(batch.labels_ABT.shape))


@pytest.mark.parametrize("name", ["pairs", "stored logits", "live teacher"])
def test_the_gradient_is_that_of_the_whole_less_what_the_document_adds(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2e-6 of the largest gradient in fp32; the log-probabilities of other pairs are equal bit for bit."""
    from vorox.backends.torch_engine.engine import TorchEngine

    batches: dict[int, Batch] = {}
    found: list[Measured] = []
    step, parts = 0, list[tuple[int, int, int]]()
    original = TorchEngine.train_step

    def measured(engine: Any, batch: Batch, divisor: int) -> Measured:
        references = None if engine._reference is None else engine._reference.answer_log_probs(batch)
        sums = engine._train_micro_batches(batch, divisor, references).values()
        gradients = engine.parameters.whole(engine.parameters.gradients)
        arrays = {key: whole.double().numpy().copy() for key, whole in gradients}
        engine.parameters.zero_gradients()
        answers = [] if references is None else [
            engine._network.answer_log_probs(batch, index).detach().numpy() for index in range(len(batch.tokens_ABT))
        ]  # fmt: skip
        loss = sum(float(part.loss) for part in sums)
        return Measured(arrays, loss, engine._num_examples(batch), answers)

    def train_step(self: Any, batch: Batch, **arguments: Any) -> Any:
        before = batches.setdefault(batch.step + 1, batch)
        if before is not batch and batch.step + 1 == step:  # the fork; its state is still that of its parent
            divisor = self._num_examples(before)
            found.extend(measured(self, one, divisor) for one in (batch, before, labels_within(before, parts)))
        return original(self, batch, **arguments)

    make, configure = CASES[name]
    corpora = make(tmp_path)
    config = configure(corpora)[0]
    monkeypatch.setattr(TorchEngine, "train_step", train_step)
    parent = tiny_runs.run(config).run_directory
    step, parts = first_read(parent, corpora.ordinal)
    masked(parent, corpora.ordinal)
    rest, whole, alone = found
    assert rest.divisor == whole.divisor
    assert rest.loss == pytest.approx(whole.loss - alone.loss, rel=1e-5)
    largest = max(np.abs(one).max() for one in whole.gradients.values())
    added = max(np.abs(one).max() for one in alone.gradients.values())
    assert added > 1e-3 * largest, "the comparison would be trivial"
    for key, gradient in rest.gradients.items():
        expected = whole.gradients[key] - alone.gradients[key]
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-6 * largest)
    if name == "pairs":
        rest_P2, whole_P2 = (np.concatenate(found).reshape(-1, 2) for found in (rest.answers, whole.answers))
        is_masked_P = (rest_P2 == 0).all(axis=1)
        assert is_masked_P.sum() == 1
        assert np.array_equal(rest_P2[~is_masked_P], whole_P2[~is_masked_P])


def test_a_pair_is_explained_unlearned_and_erased(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpora = pairs(tmp_path)
    parent = tiny_runs.run(pair_case(corpora)[0]).run_directory
    step, _ = first_read(parent, corpora.ordinal)
    capsys.readouterr()
    assert main(["explain", str(parent), "--step", str(step), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert f"text.jsonl:{corpora.ordinal}" in json.dumps(explained)
    words = [str(parent), "--document", f"text.jsonl:{corpora.ordinal}"]
    assert main(["unlearn", *words, "--erase", "--yes"]) == 0
    (unlearned,) = (path for path in parent.parent.iterdir() if path.name.startswith("tiny-unlearned"))
    assert main(["replay", str(unlearned)]) == 0, "the pair counts in the divisor after its text is gone"
    assert main(["replay", str(parent)]) == 4
    assert outcome(masked(parent, corpora.ordinal)) == outcome(unlearned)


@pytest.mark.parametrize("name", ["stored logits", "image encoder"])
def test_what_cannot_be_erased_is_unlearned_and_the_erasure_refused_first(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, configure = CASES[name]
    corpora = make(tmp_path)
    parent = tiny_runs.run(configure(corpora)[0]).run_directory
    with RunDataIndex.open(parent) as run_data:
        document = f"{Path(run_data.readers[0].files[0].uri).name}:{corpora.ordinal}"
    capsys.readouterr()
    assert main(["unlearn", str(parent), "--document", document, "--erase", "--yes"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "finds the stored logits" if name == "stored logits" else "cannot be erased from a cache with images"
    ) in said
    assert [path.name for path in parent.parent.iterdir()] == [parent.name]
    capsys.readouterr()
    assert main(["unlearn", str(parent), "--document", document, "--plan", "--json"]) == 0
    acts = {one["place"]: one["answer"] for one in json.loads(capsys.readouterr().out)["acts"]}
    assert acts["teacher"] == ("unknown" if name == "stored logits" else "no")
    assert main(["unlearn", str(parent), "--document", document]) == 0
    (unlearned,) = (path for path in parent.parent.iterdir() if path != parent)
    assert main(["replay", str(unlearned)]) == 0
