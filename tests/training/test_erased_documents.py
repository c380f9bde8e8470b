"""A run that masks a document goes on, bit for bit, after its tokens are gone; a run that needs them is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

import chats
import tiny_runs
import vorox.run
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.errors import DataError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.upkeep.erasure import erase_documents
from vorox.data.order.difficulty_buckets import cache_of
from vorox.data.provenance.named_documents import named_documents
from vorox.data.provenance.queries import when, where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.log import RunLog
from vorox.records.replay_chain import read_chain
from vorox.training.checkpoints.store import verify
from vorox.training.fork import ForkChange, fork
from vorox.training.replay import replay
from vorox.training.steps.workload import Workload

pytestmark = pytest.mark.slow

EVERY_DOCUMENT = ["data.validation.held_out_fraction=0", "eval.every_steps=null", "checkpoint.keep_last=9"]
CASES: dict[str, list[str]] = {
    "plain": [],
    "streaming": ["data.mode=streaming", "data.growth.mode=strict", "data.streaming.retention_bytes=24000"],
    "growing": ["data.growth.mode=strict"],
    "buckets": ["data.sources.0.split_by=tokens_per_document", "data.sources.0.split_quantiles=[0.5]"],
}


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


def make_workload(config: RunConfig) -> Workload:
    return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def chain(run_directory: Path) -> dict[int, str]:
    return {step: entry.chain for step, entry in read_chain(run_directory).items()}


def parent_run(folder: Path, overrides: list[str], *, first_step: int = 1) -> tuple[Path, int]:
    """A run of 12 steps, and a document that it reads after step 8, and not before ``first_step``."""
    parent = tiny_runs.run(tiny_runs.configuration(folder, [*EVERY_DOCUMENT, *overrides])).run_directory
    with RunDataIndex.open(parent) as run_data:
        for ordinal in random.sample(range(60), 60):
            steps = {one.step for one in when(run_data, "text.jsonl", ordinal=ordinal)}
            if min(steps, default=0) in range(first_step, 13) and any(8 < step <= 12 for step in steps):
                return parent, ordinal
    raise AssertionError("no document is read there")


def masked_fork(parent: Path, ordinal: int, name: str) -> Path:
    with RunDataIndex.open(parent) as run_data:
        change = ForkChange(named_documents(run_data, [f"text.jsonl:{ordinal}"], "here"))
    return fork(parent, 0, None, change, name)


def erase(run_directory: Path, ordinal: int) -> list[Path]:
    """Erase a document from the caches of a run; return the caches."""
    with RunDataIndex.open(run_directory) as run_data:
        caches = {cache_of(reader).directory: cache_of(reader) for reader in run_data.readers}
        for directory, reader in caches.items():
            (file,) = reader.files
            erase_documents(directory, [(file.version, ordinal)])
    return list(caches)


def train_on(run_directory: Path, *overrides: str) -> Path:
    config = load_config(RunLayout(run_directory).config, overrides)
    return tiny_runs.run(config, resume_from=run_directory).run_directory


@pytest.mark.parametrize("case", CASES)
def test_a_masked_run_resumes_and_replays_after_the_document_is_gone(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, ordinal = parent_run(tmp_path, CASES[case])
    whole, killed = (masked_fork(parent, ordinal, name) for name in ("whole", "killed"))
    train_on(whole)
    with monkeypatch.context() as patch:
        tiny_runs.at_step(patch, 10, tiny_runs.kill)
        with pytest.raises(tiny_runs.Killed):
            train_on(killed)
    assert replay(whole, make_workload).is_exact
    erase(parent, ordinal)
    train_on(killed)
    assert chain(killed) == chain(whole)
    fingerprints = {verify(step_directories(one)[12]).metadata["fingerprint"] for one in (killed, whole)}
    assert len(fingerprints) == 1
    for one in (whole, killed):
        assert replay(one, make_workload).is_exact
        with RunDataIndex.open(one) as run_data:
            rows = [row for step in range(1, 13) for row in where(run_data, step)]
        parts = [part for row in rows for part in row.documents if part.ordinal == ordinal or part.is_erased]
        assert parts
        assert all(part.is_erased and part.is_masked and part.ordinal == ordinal for part in parts)
    with pytest.raises(DataError, match=rf"document .*text.jsonl:{ordinal}, which was erased"):
        replay(parent, make_workload)


def test_a_run_without_the_mask_is_refused_where_it_needs_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, ordinal = parent_run(tmp_path, [], first_step=5)
    (cache,) = erase(parent, ordinal)
    first = min(one for one in chain(parent) if one in steps_of(parent, ordinal))
    assert replay(parent, make_workload, last_step=4).is_exact
    assert main(["replay", str(parent)]) == DataError.exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert f"text.jsonl:{ordinal}, which was erased from the cache" in said
    assert cache.name in said
    assert "vorox fork RUN --step N --without-document" in said
    capsys.readouterr()
    assert main(["data", "where", str(parent), "--step", str(first), "--text"]) == 0
    shown = capsys.readouterr().out
    assert "erased from the cache" in shown
    forked = fork(parent, 4, verify(step_directories(parent)[4]), ForkChange(), "unmasked")
    before = chain(forked)
    with pytest.raises(DataError, match=rf"text.jsonl:{ordinal}, which was erased from the cache"):
        train_on(forked)
    assert {step: entry for step, entry in chain(forked).items() if step < first} == {
        step: entry for step, entry in chain(parent).items() if step < first
    }
    assert max(chain(forked)) == first - 1 >= max(before), "no step is trained on the hole"
    CacheReader.open(cache).verify()


def test_the_divisor_of_the_loss_stays_where_only_answers_are_trained_on(tmp_path: Path) -> None:
    conversations = chats.conversations(60, seed=random.randrange(1000))
    (tmp_path / "text").mkdir()
    chats.write_jsonl(tmp_path / "text" / "text.jsonl", conversations)
    source = {"name": "text", "format": "jsonl", "paths": [str(tmp_path / "text")], "chat_fields": ["messages"]}
    overrides = [
        f"data.sources={json.dumps([source])}", "data.sequence_length_tokens=48",
        'tokenizer.special_tokens=["<|im_start|>","<|im_end|>"]',
    ]  # fmt: skip
    parent, ordinal = parent_run(tmp_path, overrides)
    forked = train_on(masked_fork(parent, ordinal, "forked"))
    erase(parent, ordinal)
    assert replay(forked, make_workload).is_exact
    with pytest.raises(DataError, match="which was erased from the cache"):
        replay(parent, make_workload)


def test_rows_of_validation_with_an_erased_document_are_refused(tmp_path: Path) -> None:
    outcome = tiny_runs.run(tiny_runs.configuration(tmp_path, ["eval.num_sequences=999"]))
    (cache,) = (path for path in (tmp_path / "cache").iterdir() if "-validation-" in path.name)
    reader = CacheReader.open(cache)
    ordinal = reader.documents_of(0)[0].ordinal
    erase_documents(cache, [(reader.files[0].version, ordinal)])
    shutil.rmtree(outcome.run_directory)
    with pytest.raises(DataError, match=rf"text.jsonl:{ordinal}, which was erased from the cache"):
        tiny_runs.run(tiny_runs.configuration(tmp_path, ["eval.num_sequences=999"]))


def steps_of(run_directory: Path, ordinal: int) -> set[int]:
    with RunDataIndex.open(run_directory) as run_data:
        return {one.step for one in when(run_data, "text.jsonl", ordinal=ordinal)}
