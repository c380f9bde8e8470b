"""``GET /metrics``: what a scraper reads back is what the files of the runs say."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from vorox.dashboard.runs.run_index import RunIndex
from vorox.dashboard.server import application
from vorox.web.access import Access

HOSTILE = 'a "quoted" \\ name\n} 1'
TOKEN = "correct-horse-battery"

_LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"(vorox_[a-z_]+)\{{({_LABEL}(?:,{_LABEL})*)\}} (NaN|[+-]Inf|-?[0-9.]+(?:e[+-]?[0-9]+)?)")
"""The text format, version 0.0.4, as its specification defines a line."""


def parse(text: str) -> dict[tuple[str, str, str], float]:
    """Return value by (name, run, state); fail on any line outside of the format, and on a metric without a type."""
    assert text.endswith("\n")
    found: dict[tuple[str, str, str], float] = {}
    declared: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        if match := re.fullmatch(r"# HELP (vorox_[a-z_]+) [^\n]+", line):
            declared.append(match[1])
        elif line.startswith("#"):
            assert line == f"# TYPE {declared[-1]} gauge"
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == declared[-1]
            unescaped = {
                name: re.sub(r"\\(.)", lambda one: "\n" if one[1] == "n" else one[1], value)
                for name, value in re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2])
            }
            key = (match[1], unescaped["run"], unescaped.get("state", ""))
            assert key not in found
            found[key] = float(match[3])
    assert len(set(declared)) == len(declared)
    return found


def write_run(root: Path, name: str, outcome: str, values: dict[str, float | str], at: float) -> None:
    directory = root / name
    directory.mkdir(parents=True)
    attempts = [{"attempt": 1, "outcome": outcome, "started_at": "2026-01-01T00:00:00Z", "notes": {"total_steps": 20}}]
    (directory / "run.json").write_text(json.dumps({"attempts": attempts}), encoding="utf-8")
    lines = [{"step": 7, "attempt": 1, "time": at - 5, "values": {"loss": 9.0}},
             {"step": 9, "attempt": 1, "time": at, "values": values}]  # fmt: skip
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for step in (4, 8):
        checkpoint = directory / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "MANIFEST.json").write_text("{}", encoding="utf-8")


def test_a_scrape_reads_back_what_the_files_say(tmp_path: Path) -> None:
    at = time.time() - 100
    values = {"loss": 2.5, "tokens_per_second": 1234.5, "mfu_fraction": 0.25, "tokens_total": 4096.0}
    write_run(tmp_path, HOSTILE, "failed", values, at)
    write_run(tmp_path, "diverged", "finished", {"loss": "NaN"}, at)
    app = application(RunIndex(tmp_path), Access("127.0.0.1", 7860, TOKEN))
    browser = TestClient(app, base_url="http://127.0.0.1:7860", follow_redirects=False)
    assert browser.get("/metrics").status_code == 401
    assert browser.get("/metrics?token=wrong").status_code == 401
    assert browser.get(f"/metrics?token={TOKEN}").status_code == 200
    answer = browser.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = parse(answer.text)
    expected = {
        "vorox_step": 9, "vorox_planned_steps": 20, "vorox_tokens": 4096, "vorox_loss_nats": 2.5,
        "vorox_tokens_per_second": 1234.5, "vorox_mfu_ratio": 0.25, "vorox_checkpoints": 2, "vorox_checkpoint_step": 8,
        "vorox_attempts": 1,
    }  # fmt: skip
    assert {name: found[name, HOSTILE, ""] for name in expected} == expected
    assert 100 <= found["vorox_last_step_age_seconds", HOSTILE, ""] < 400
    assert ("vorox_eval_loss_nats", HOSTILE, "") not in found, "it was not validated"
    assert math.isnan(found["vorox_loss_nats", "diverged", ""])
    states = {
        state: value for (name, run, state), value in found.items() if (name, run) == ("vorox_run_state", HOSTILE)
    }
    assert sum(states.values()) == states["failed"] == 1
    assert len(states) > 5
