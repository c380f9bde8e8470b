"""kill -9 of the real command at twenty random instants, resumed each time: the end is the straight run's, bit for bit.

Every process is ``vorox train`` with PyTorch on a tiny model. Those that are killed are forked with PyTorch imported;
those that end a run are fresh interpreters. The instants are drawn from a seed: some at any time of a process's life,
from right after its start; others where it matters, by watching the run's files: while the cache is built, between two
logged steps, while a checkpoint is written.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import configuration, write_text
from vorox.core.files.json_lines import read_history
from vorox.core.files.staged_directory import read_manifest
from vorox.core.run_layout import RunLayout
from vorox.records.replay_chain import read_chain
from warm_children import WarmChild, WarmChildren

pytestmark = [pytest.mark.torch, pytest.mark.slow]
STEPS = 40
KILLS = 20
KILLS_OF_A_LIFE = 5
LIVES = 10
TIMEOUT_SECONDS = 600.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SETTINGS = [
    f"train.num_steps={STEPS}", "checkpoint.every_steps=5", "eval.every_steps=10", "log.every_steps=1",
    "eval.prompts=['the step']", "eval.sample_tokens=4", "model.dropout_fraction=0.1",
]  # fmt: skip


@dataclass
class Life:
    """One run directory and cache, from the first start to the end."""

    directory: Path
    settings: list[str] = field(default_factory=list)
    configured: bool = False

    def start(self, children: WarmChildren | None = None) -> WarmChild | subprocess.Popen[bytes]:
        if not self.configured:
            write_text(self.directory / "text", documents=400)
            configuration(self.directory)  # writes tiny.yaml
            self.configured = True
        words = ["train", "tiny.yaml", *SETTINGS, *self.settings]
        with (self.directory / "output.txt").open("ab") as output:
            if children is not None:
                return children.vorox(words, cwd=self.directory, output=output)
            return subprocess.Popen(
                [sys.executable, "-m", "vorox", *words], cwd=self.directory, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, env=ENVIRONMENT,
            )  # fmt: skip

    @property
    def run_directory(self) -> Path:
        return next((self.directory / "runs").iterdir())

    def finish(self, children: WarmChildren | None = None) -> dict[str, Any]:
        """Go on to the end; what the run came to."""
        code = self.start(children).wait(TIMEOUT_SECONDS)
        assert code == 0, (self.directory / "output.txt").read_text()
        manifest = read_manifest(RunLayout(self.run_directory).checkpoint(STEPS))["metadata"]
        chain = read_chain(self.run_directory)
        assert list(chain) == list(range(1, STEPS + 1))
        evaluations = read_history(self.run_directory / "evaluations.jsonl")
        return {
            "chain": [entry.chain for entry in chain.values()],
            "saved_chain": manifest["chain"],
            "fingerprint": manifest["fingerprint"],
            "eval_losses": {step: float(record["loss"]).hex() for step, record in evaluations.items()},
        }

    def logged_steps(self) -> int:
        files = list(self.directory.glob("runs/*/metrics.jsonl"))
        return files[0].read_bytes().count(b'"loss"') if files else 0

    def is_saving(self) -> bool:
        return any(self.directory.glob("runs/*/checkpoints/.tmp-*"))

    def is_building(self) -> bool:
        return any(self.directory.glob("cache/*/chunks"))

    def stage(self) -> str:
        """What has been reached by now."""
        for stage, pattern in (("saved", "runs/*/checkpoints/step-*"), ("steps", "runs/*/metrics.jsonl"),
                               ("cache", "cache/*/chunks"), ("run", "runs/*")):  # fmt: skip
            if any(self.directory.glob(pattern)):
                return stage
        return "nothing"


def kill(life: Life, children: WarmChildren, due: Callable[[], bool], delay_seconds: float) -> bool:
    """Start, wait until something is seen and a moment longer, and kill; whether it was still alive then."""
    process = life.start(children)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and not due():
        assert time.monotonic() < deadline, "neither ended nor seen"
        time.sleep(0.001)
    time.sleep(delay_seconds)
    alive = process.poll() is None
    process.kill()
    code = process.wait(TIMEOUT_SECONDS)
    assert alive or code == 0, (life.directory / "output.txt").read_text()
    return alive


def logged(steps: int) -> Callable[[Life], bool]:
    return lambda life: life.logged_steps() >= steps


def killed_life(
    folder: Path, children: WarmChildren, dues: Sequence[Callable[[Life], bool]], settings: Sequence[str] = ()
) -> Life:
    """A run that was killed at each of these moments; on a busy machine, a life may end before, and is void."""
    for number in range(LIVES):
        life = Life(folder / f"killed-{number}", settings=list(settings))
        life.directory.mkdir()
        if all(kill(life, children, functools.partial(due, life), 0.01) for due in dues):
            return life
    pytest.fail(f"{LIVES} runs ended before they were killed")


@pytest.fixture(scope="module")
def torch_children() -> Iterator[WarmChildren]:
    with WarmChildren("torch", ENVIRONMENT) as children:
        yield children


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, torch_children: WarmChildren) -> dict[str, Any]:
    """The run that nothing happens to, and the seconds that it takes where everything is imported."""
    fresh = Life(tmp_path_factory.mktemp("fresh")).finish()
    began = time.monotonic()
    forked = Life(tmp_path_factory.mktemp("forked")).finish(torch_children)
    assert_same(forked, fresh, "between a forked process and a fresh one")
    return {**fresh, "seconds": time.monotonic() - began}


def assert_same(found: dict[str, Any], straight: dict[str, Any], what: str) -> None:
    for key in ("chain", "saved_chain", "fingerprint", "eval_losses"):
        assert found[key] == straight[key], f"{key} differs {what}"


def test_killed_at_twenty_random_instants(
    straight: dict[str, Any], torch_children: WarmChildren, tmp_path: Path
) -> None:
    chooser = random.Random(20_260_730)
    kinds = ["any time"] * 7 + ["building"] * 3 + ["first steps"] * 3 + ["between steps"] * 3 + ["saving"] * 4
    chooser.shuffle(kinds)
    killed: Counter[str] = Counter()
    stages: Counter[str] = Counter()
    for number in range(3 * KILLS):
        if killed.total() >= KILLS:
            break
        life = Life(tmp_path / f"life-{number}")
        life.directory.mkdir()
        for _ in range(min(KILLS_OF_A_LIFE, KILLS - killed.total())):
            kind = kinds[killed.total()]
            if kind in {"building", "first steps"} and life.is_building():
                break  # only a new life builds, and has saved nothing yet
            before = life.logged_steps()
            wanted = before + chooser.randint(1, 12)
            due = {
                "any time": lambda: True,
                "building": life.is_building,
                "first steps": lambda life=life: life.logged_steps() >= 1,
                "between steps": lambda wanted=wanted, life=life: life.logged_steps() >= wanted,
                "saving": life.is_saving,
            }[kind]
            longest = {"any time": straight["seconds"], "first steps": 0.0}.get(kind, 0.05)
            if not kill(life, torch_children, due, chooser.uniform(0, longest)):
                break  # it had reached its end
            killed[kind] += 1
            stages[life.stage()] += 1
        assert_same(life.finish(), straight, f"after {killed.total()} kills, stages {dict(stages)}")
    assert killed.total() == KILLS, dict(killed)
    assert {"building", "between steps", "saving"} <= set(killed), dict(killed)
    assert len(stages) >= 3, dict(stages)


PATTERN = [
    "model.layer_pattern=M*-", "model.num_layers=3", "model.mamba_head_dim=8", "model.mamba_chunk_tokens=5",
    "data.document_mask=true",
]  # fmt: skip
"""Mamba-2, attention and MLP; chunks do not divide rows."""


@pytest.mark.jax
@pytest.mark.parametrize("model", [[], PATTERN], ids=["attention", "Mamba-2"])
def test_the_jax_engine_resumes_after_kills_bit_for_bit(tmp_path: Path, model: list[str]) -> None:
    settings = ["backend=jax", "runtime.num_threads=null", "model.dropout_fraction=0.1", *model]
    calm = Life(tmp_path / "calm", settings=settings)
    calm.directory.mkdir()
    straight = calm.finish()
    with WarmChildren("jax", ENVIRONMENT) as children:
        life = killed_life(tmp_path, children, [logged(7), Life.is_saving, logged(25)], settings)
    assert_same(life.finish(), straight, "with the JAX engine")
    if model:
        assert_replays_exactly(life)


@pytest.mark.parametrize("threads", [0, 4])
def test_loader_threads_change_nothing(straight: dict[str, Any], tmp_path: Path, threads: int) -> None:
    found = Life(tmp_path, settings=[f"data.loader.num_threads={threads}"]).finish()
    assert_same(found, straight, f"with {threads} loader threads")


def test_replay_says_bit_exact(tmp_path: Path, torch_children: WarmChildren) -> None:
    life = killed_life(tmp_path, torch_children, [logged(12)])
    life.finish()
    assert_replays_exactly(life)


def assert_replays_exactly(life: Life) -> None:
    for arguments in ([], ["--from", "37"]):
        command = [sys.executable, "-m", "vorox", "replay", str(life.run_directory), "--json", *arguments]
        result = subprocess.run(
            command, cwd=life.directory, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["difference"] is None
        assert report["num_steps"] == (5 if arguments else STEPS)
