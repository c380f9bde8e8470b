"""The account of a run's time under kills of real processes, against a stopwatch."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vorox.training.reports.run_time import RunTime, account

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="forks, and reads /proc"),
]
TIMEOUT_SECONDS = 300.0


def schedule(seed: int) -> dict[str, Any]:
    chooser = random.Random(seed)
    return {
        "kills": [chooser.uniform(3.0, 7.0) for _ in range(5)],
        "pauses": [chooser.uniform(0.1, 0.6) for _ in range(5)],
        "step_seconds": 0.04,
        "save_seconds": 0.06,
        "settings": [
            "train.num_steps=450", f"checkpoint.every_steps={chooser.randint(10, 30)}", "checkpoint.asynchronous=false",
            "eval.every_steps=null", "eval.at_end=false", "log.every_steps=50",
        ],
    }  # fmt: skip


def train(directory: Path, plan: dict[str, Any]) -> tuple[RunTime, dict[str, Any]]:
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("timed_run.py")), str(directory), json.dumps(plan)]
    directory.mkdir()
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    (run_directory,) = (directory / "runs").iterdir()
    return account(run_directory), json.loads(done.stdout.splitlines()[-1])


def watched(seen: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Wall seconds and seconds by class, from the stopwatch alone: every mark begins what lasts until the next one."""
    lives, spent = seen["lives"], Counter[str]()
    last_life = {step: number for number, kind, step, _ in seen["marks"] if kind == "stepped"}
    for number, (began, ended) in enumerate(lives):
        marks = [(kind, step, at) for owner, kind, step, at in seen["marks"] if owner == number]
        kinds = [kind for kind, _, _ in marks]
        del marks[: kinds.index("step") - 2 if "step" in kinds else len(marks)]  # what is read while the data is built
        spent["restart"] += next((at for kind, _, at in marks if kind == "wait"), ended) - began
        done, current = {step for kind, step, _ in marks if kind == "stepped"}, 0
        for (kind, step, at), (_, _, until) in itertools.pairwise([*marks, ("end", 0, ended)]):
            current = step or (current + 1 if kind == "wait" else current)
            is_lost = last_life.get(current, number) != number or (current not in done and number + 1 < len(lives))
            match kind:
                case "save":
                    name = "save"
                case "wait" if current not in done:
                    name = "data"
                case _ if until == ended and number + 1 == len(lives):
                    name = "save"  # closing the last attempt
                case _ if is_lost:
                    name = "redone"
                case _:
                    name = "data" if kind == "wait" else "compute"
            spent[name] += until - at
    spent["absent"] = sum(after[0] - before[1] for before, after in itertools.pairwise(lives))
    return lives[-1][1] - lives[0][0], dict(spent)


@pytest.mark.parametrize("seed", range(2))
def test_the_account_is_that_of_a_stopwatch(tmp_path: Path, seed: int) -> None:
    plan = schedule(seed)
    plan["kills"][1] = 0.05  # before its first step, and before its record of the run begins
    found, seen = train(tmp_path / "run", plan)
    wall, expected = watched(seen)
    seconds, tolerance = found.seconds, 0.01 * wall
    assert found.wall_seconds == pytest.approx(wall, abs=tolerance)
    assert sum(seconds.values()) == pytest.approx(found.wall_seconds, abs=1e-6)
    assert seconds["unknown"] == 0
    recorded = {attempt.number for attempt in found.attempts}
    assert len(recorded) in {5, 6}
    unrecorded = seen["lives"][1][1] - seen["lives"][1][0] if len(recorded) == 5 else 0.0
    expected["absent"] += unrecorded
    expected["restart"] -= unrecorded
    expected["restart"] += expected.pop("data")
    seconds["restart"] += seconds["data"]  # with opening the cache, which the stopwatch does not see
    for name in ("compute", "redone", "save", "restart", "absent"):
        assert seconds[name] == pytest.approx(expected[name], abs=tolerance), (name, seconds, expected)
    assert found.notes == ()
    executed = Counter(step for _, kind, step, _ in seen["marks"] if kind == "stepped")
    assert sum(attempt.num_lost_steps for attempt in found.attempts) == sum(executed.values()) - len(executed)
