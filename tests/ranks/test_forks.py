"""Forks on one rank and on two, on both engines: unchanged their parents, masked different from the document on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eventually import wait_until
from ranks.processes import PATIENCE_SECONDS, Runs, environment
from ranks.test_processes import MODEL as JAX_MODEL
from ranks.test_rank_data import ranks
from ranks.test_torch_ranks import MODEL as TORCH_MODEL
from vorox.core.run_layout import RunLayout
from vorox.data.provenance.queries import when, where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import read_chain
from vorox.training.checkpoints.materialized_cache import folder

pytestmark = pytest.mark.slow

MODELS = {"torch": TORCH_MODEL, "jax": JAX_MODEL}
STEPS = 50
SETTINGS = [f"train.num_steps={STEPS}", "checkpoint.every_steps=10"]


def chain(run: Path) -> dict[int, str]:
    return {step: entry.chain for step, entry in read_chain(run).items()}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "engine", [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_a_fork_is_its_parent_but_for_its_change(tmp_path: Path, engine: str, count: int) -> None:
    runs, nproc = Runs(tmp_path, MODELS[engine]), ["--nproc", str(count)] if count > 1 else []
    parent, _ = runs.train("parent", [*SETTINGS, *(ranks(runs, count) if count > 1 else [])])
    runs.run_fresh(["fork", parent.name, "--step", "17", "--name", "same", "--no-train", *nproc])
    runs.vorox(["train", "--resume", "same", *nproc])
    assert chain(runs.find("same")) == chain(parent)
    assert len(chain(parent)) == STEPS
    with RunDataIndex.open(parent) as run_data:
        found = {
            ordinal: sorted(
                {one.step for one in when(run_data, "text.jsonl", ordinal=ordinal) if 40 < one.step <= STEPS}
            )
            for ordinal in range(30)
        }
    ordinal = max(found, key=lambda ordinal: found[ordinal][:1])
    first = found[ordinal][0]
    without = ["--without-document", f"text.jsonl:{ordinal}", "--name", "masked", "--no-train"]
    runs.run_fresh(["fork", parent.name, "--step", "40", *without, *nproc])
    runs.vorox(["train", "--resume", "masked", *nproc])
    masked = chain(runs.find("masked"))
    assert [step for step in masked if masked[step] != chain(parent)[step]] == list(range(first, STEPS + 1))
    assert "bit-exact" in runs.vorox(["replay", "masked", "--from", "40", *nproc])


@pytest.mark.torch
def test_a_step_of_two_ranks_is_explained_by_two(tmp_path: Path) -> None:
    runs = Runs(tmp_path, TORCH_MODEL)
    parent, _ = runs.train("parent", ranks(runs, 2))
    before = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}
    said = runs.run_fresh(["explain", f"{parent.name}@7", "--next", "1", "--nproc", "2"])
    assert "What each document added" in said
    assert "Where the gradient norm arises" in said
    assert {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()} == before
    assert "--nproc 2" in runs.run_fresh(["explain", f"{parent.name}@9", "--next", "0"], code=2)


@pytest.mark.torch
def test_two_ranks_unlearn(tmp_path: Path) -> None:
    runs = Runs(tmp_path, TORCH_MODEL)
    parent, _ = runs.train("parent", ranks(runs, 2))
    read: dict[int, int] = {}
    with RunDataIndex.open(parent) as run_data:
        for ordinal in range(30):
            for one in when(run_data, "text.jsonl", ordinal=ordinal):
                if one.state == "kept":
                    read[ordinal] = min(one.step, read.get(ordinal, one.step))
    ordinal = max(read, key=lambda ordinal: read[ordinal])
    said = runs.run_fresh(
        ["unlearn", parent.name, "--document", f"text.jsonl:{ordinal}", "--name", "clean", "--nproc", "2"]
    )
    assert "No update of" in said
    clean = runs.find("clean")
    assert len(list(RunLayout(clean).statements.iterdir())) == 1
    same = [step for step, head in chain(clean).items() if head == chain(parent)[step]]
    assert same == list(range(1, read[ordinal]))
    assert "bit-exact" in runs.vorox(["replay", "clean", "--nproc", "2"])


@pytest.mark.torch
def test_two_ranks_print_one_json_document_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Also after a kill: what a computation was writing is gone once the next one has ended."""
    runs, temporary = Runs(tmp_path, TORCH_MODEL), tmp_path / "temporary"
    temporary.mkdir()
    parent, _ = runs.train("parent", ranks(runs, 2))
    variables = environment() | {"TMPDIR": str(temporary)}

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "vorox", *words, "--nproc", "2", "--json"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=variables, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe)

    def printed(*words: str) -> Any:
        process = start(*words)
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, errors
        return json.loads(output)

    with RunDataIndex.open(parent) as run_data:
        ordinal = where(run_data, 7)[0].documents[0].ordinal
    unlearn = ["unlearn", parent.name, "--document", f"text.jsonl:{ordinal}", "--name", "clean"]
    states = folder(parent)
    killed = start("explain", f"{parent.name}@7", "--next", "0")
    wait_until(lambda: any(states.glob(".*.unproven")) or killed.poll() is not None, PATIENCE_SECONDS)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -9, "it was killed while it computed the state"
    assert any(states.glob(".*.unproven"))
    assert not list(temporary.glob("*vorox-*"))
    explained = printed("explain", f"{parent.name}@7", "--next", "0")
    assert explained["step"] == 7
    assert not list(states.glob(".*.unproven"))
    assert printed("fork", f"{parent.name}@6", "--name", "same", "--no-train")["is_trained"] is False
    (written,) = printed("checkpoints", "materialize", parent.name, "--step", "5")
    assert written["step"] == 5
    done = printed(*unlearn)
    assert done["directory"] == str(runs.find("clean").relative_to(tmp_path))
    assert done["statement"]["content"]["predicate"]["acts"] == done["acts"]
    assert not list(temporary.glob("*vorox-*"))
