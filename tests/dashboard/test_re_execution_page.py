"""The page "Re-execution" against the commands whose answers it shows, and against damaged and hostile files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import tiny_runs
from vorox.cli import main
from vorox.core.run_layout import RunLayout
from vorox.data.provenance.queries import where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.run_lookup import run_directories

pytest.importorskip("starlette")
from vorox.dashboard.runs.run_index import RunIndex
from vorox.dashboard.server import Answers

pytestmark = pytest.mark.slow
SPIKE = 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a loss spike and an audit, its fork, and a run that unlearned a document, signed."""
    place = tmp_path_factory.mktemp("re_execution")
    settings = ["data.validation.held_out_fraction=0", "eval.every_steps=null", "train.spike_policy=skip"]
    settings += ["train.spike_window_steps=4", "run.name=parent"]
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        tiny_runs.scale_steps(patch, {SPIKE: 40.0})
        parent = tiny_runs.run(tiny_runs.configuration(place, settings)).run_directory
        assert main(["fork", f"{parent}@8", "optimizer.lr=0.001", "--name", "fork"]) == 0
        with RunDataIndex.open(parent) as run_data:
            ordinal = where(run_data, 6)[0].documents[0].ordinal
        key = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (place / "key.pem").write_bytes(key)
        words = ["--document", f"text.jsonl:{ordinal}", "--name", "clean", "--key", str(place / "key.pem")]
        assert main(["unlearn", str(parent), *words]) == 0
        statements = RunLayout(parent).statements
        statements.mkdir()
        assert main(["audit", str(parent), "--segments", "2", "--output", str(statements / "audit.json")]) == 0
    return place / "runs"


def named(runs: Path, name: str) -> Path:
    (found,) = [path for path in run_directories(runs) if path.name.startswith(f"{name}-")]
    return found


def page(runs: Path, run: Path) -> Any:
    return Answers(RunIndex(runs)).get("re_execution", {"id": run.name})


def test_a_spike_has_the_command_that_explains_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = page(runs, named(runs, "parent"))["steps"]
    assert (one["step"], one["what"]) == (SPIKE, "loss spike")
    words = one["command"].split()
    assert words[:2] == ["vorox", "explain"]
    assert main([*words[1:], "--plan", "--root", str(runs)]) == 0
    assert "to compute" in capsys.readouterr().out


def test_a_fork_leads_to_its_parent(runs: Path) -> None:
    parent, fork = named(runs, "parent"), named(runs, "fork")
    assert page(runs, parent)["fork"] is None
    found = page(runs, fork)["fork"]
    assert (found["parent"], found["id"], found["step"]) == (parent.name, parent.name, 8)
    assert found["changes"] == ["optimizer.lr=0.001"]
    assert "runs compare --paired" in found["command"]
    alone = Answers(RunIndex(fork)).get("re_execution", {"id": fork.name})["fork"]
    assert (alone["id"], alone["command"]) == (None, ""), "no link to a run that the dashboard does not show"


def test_the_time_is_that_of_the_command(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = named(runs, "parent")
    found = page(runs, parent)["time"]
    capsys.readouterr()
    assert main(["runs", "time", str(parent), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {one["name"]: one["seconds"] for one in found["classes"]} == {
        name: seconds for name, seconds in told["seconds"].items() if seconds
    }
    assert sum(one["seconds"] for one in found["classes"]) == pytest.approx(found["wall_seconds"])


def test_statements_say_whether_they_are_about_the_run_as_it_is(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    runs = tmp_path / "runs"
    parent, clean = named(runs, "parent"), named(runs, "clean")
    (audit,) = page(runs, parent)["statements"]
    assert audit["text"].startswith("Audit: passed; ")
    assert (audit["is_current"], audit["key_ids"], audit["problem"]) == (True, (), "")
    (unlearned,) = page(runs, clean)["statements"]
    assert unlearned["text"].startswith("No update up to step 12 read the content of 1 document; they may still act")
    assert unlearned["is_current"]
    assert len(unlearned["key_ids"]) == 1
    manifest = RunLayout(clean).checkpoint(12) / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    assert page(runs, clean)["statements"][0]["is_current"] is False
    chain = RunLayout(parent).chain
    chain.write_text("".join(chain.read_text().splitlines(keepends=True)[:6]))
    assert page(runs, parent)["statements"][0]["is_current"] is False


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"{}", b"\xff", b"[" * 100_000, b'{"payload": "*", "signatures": []}',
        b'{"subject": 1, "predicateType": "urn:vorox:audit:1"}',
        b'{"subject": [], "predicateType": "urn:vorox:audit:1", "predicate": {"heads": 3}}',
        b'{"subject": [], "predicateType": "urn:vorox:unlearned:1", "predicate": {"step": 1e400, "documents": []}}',
    ],
)  # fmt: skip
def test_a_damaged_statement_is_a_line_with_a_reason(runs: Path, tmp_path: Path, content: bytes) -> None:
    run = tmp_path / "runs" / named(runs, "parent").name
    shutil.copytree(named(runs, "parent"), run)
    (RunLayout(run).statements / "other.json").write_bytes(content)
    first, other = page(tmp_path / "runs", run)["statements"]
    assert first["problem"] == ""
    assert other["problem"]
    assert other["text"] == ""
