"""Run directories that others wrote: none ends a list, the dashboard or /metrics; each is a line with a reason."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vorox.cli import main
from vorox.core.errors import VoroxError
from vorox.core.files.atomic import canonical_json, pretty_json
from vorox.experiments.artifacts import inspect_run, list_checkpoints, list_runs
from vorox.records import executed_steps

pytest.importorskip("starlette")
from vorox.dashboard.runs import prometheus
from vorox.dashboard.runs.run_index import RunIndex
from vorox.dashboard.server import Answers

DEEP = b"[" * 100_000 + b"]" * 100_000
NESTED = b'{"a":' * 400 + b"1" + b"}" * 400
"""Deep enough for the stack of code that walks it, not for the parser's."""
GOOD = {"format": "vorox-run/2", "attempts": [{"attempt": 1, "outcome": "finished", "started_at": "2026"}]}


def record(attempts: object) -> Mapping[str, object]:
    return {"run.json": {"format": "vorox-run/2", "attempts": attempts}}


def lines(*records: Mapping[str, object]) -> str:
    return "".join(json.dumps(one) + "\n" for one in records)


def manifest(body: Mapping[str, object]) -> Mapping[str, object]:
    """A manifest that matches its own hash."""
    whole = {"format": "vorox-directory/1", **body}
    content = pretty_json({**whole, "sha256": hashlib.sha256(canonical_json(whole)).hexdigest()})
    return {"checkpoints/step-00000010/MANIFEST.json": content}


SHAPES: dict[str, Mapping[str, object]] = {
    "attempts: text": record("abc"),
    "attempts: integers": record([1, 2]),
    "attempts: null": record(None),
    "attempts: lists": record([[]]),
    "attempts: absent": {"run.json": {"format": "vorox-run/2"}},
    "record: list": {"run.json": [1]},
    "record: torn": {"run.json": b'{"attempts": ['},
    "record: empty": {"run.json": b""},
    "record: binary": {"run.json": b"\xff\xfe\x00"},
    "record: deep": {"run.json": DEEP},
    "record: nested": {"run.json": b'{"attempts": [' + NESTED + b"]}"},
    "notes: list": record([{"notes": [1]}]),
    "notes: environment": record([{"notes": {"environment": [1]}}]),
    "notes: caches": record([{"notes": {"caches": {"a": 1}}}]),
    "code: text": record([{"code": "x"}]),
    "outcome: list": record([{"outcome": [1]}]),
    "start: integer": record([{"started_at": 5, "outcome": "finished"}]),
    "command: integer": record([{"argv": 5}]),
    "command: integers": record([{"argv": [5]}]),
    "length: 400 digits": record([{"notes": {"total_steps": 10**400}}]),
    "length: 60 bits": record([{"notes": {"total_steps": 1 << 60}}]),
    "length: negative": record([{"notes": {"total_steps": -5}}]),
    "failure: list": {"failure.json": [1]},
    "failure: deep": {"failure.json": DEEP},
    "failure: mapping": {"failure.json": {"what": {"a": 1}, "exit_code": [1]}},
    "metrics: deep": {"metrics.jsonl": DEEP + b"\n"},
    "metrics: nested": {"metrics.jsonl": NESTED + b"\n"},
    "metrics: types": {"metrics.jsonl": lines(
        {"step": "x", "attempt": 1, "values": {"loss": 1}}, {"step": 1, "attempt": 1, "values": [1]},
        {"step": [1], "attempt": 1, "values": {"loss": "q"}}, {"step": 1, "attempt": 1}, {"attempt": [1]},
    )},
    "metrics: text": {"metrics.jsonl": lines({"step": 1, "attempt": 1, "values": "abc", "time": "x"})},
    "metrics: huge step": {"metrics.jsonl": lines({"step": 10**30, "attempt": 1, "values": {"loss": 1.0}})},
    "metrics: huge attempt": {"metrics.jsonl": lines({"step": 1, "attempt": 10**30, "values": {"loss": 1.0}})},
    "metrics: huge resume": {"metrics.jsonl": lines({"resume_step": 10**30, "attempt": 1})},
    "metrics: huge float": {"metrics.jsonl": '{"step":1,"attempt":1,"values":{"loss":1e999,"step_seconds":-1e308}}\n'},
    "metrics: huge integer": {"metrics.jsonl": '{"step":1,"attempt":1,"values":{"loss":%s}}\n' % ("9" * 400)},
    "metrics: 5,000 digits": {"metrics.jsonl": '{"step":1,"attempt":1,"values":{"loss":%s}}\n' % ("9" * 5000)},
    "metrics: huge time": {"metrics.jsonl": '{"step":1,"attempt":1,"time":1e300,"values":{"loss":1.0}}\n'},
    "metrics: negative": {"metrics.jsonl": lines({"step": -5, "attempt": 1, "values": {"loss": 1.0}})},
    "metrics: truth": {"metrics.jsonl": lines({"step": True, "attempt": 1, "values": {"loss": 1.0}})},
    "metrics: binary": {"metrics.jsonl": b'\xff\xfe\x00{"step":1}\n'},
    "events: deep": {"events.jsonl": DEEP + b"\n"},
    "events: fields": {"events.jsonl": lines({"kind": "sample", "fields": [1]}, {"kind": 1, "fields": "x"})},
    "events: rank": {"events.jsonl": lines(*({"kind": "x", "process": one} for one in ("a", {"a": 1}, None, -1, 1.5)))},
    "events: huge step": {"events.jsonl": lines(
        {"kind": "sample", "fields": {"step": 10**400, "prompt": "p", "completion": "c"}}
    )},
    "events: types": {"events.jsonl": lines(
        *({"kind": kind, "fields": {"step": "x", "from": [], "weights": 5}} for kind in (
            "resumed", "checkpoint_saved", "validation", "loss_spike", "loss_spike_rollback", "started",
            "settings_changed", "mixture_changed", "growth", "quarantine",
        ))
    )},
    "evaluations: types": {"evaluations.jsonl": lines(
        {"step": 1, "loss": "x"}, {"step": "x", "loss": 1.0}, {"resume_step": "x"}, {"step": -1, "loss": 1.0}
    )},
    "evaluations: deep": {"evaluations.jsonl": DEEP + b"\n"},
    "chain: deep": {"chain.jsonl": DEEP + b"\n"},
    "chain: huge step": {"chain.jsonl": lines({"step": 10**400})},
    "verdicts: types": {"verdicts.jsonl": lines({"kind": 1, "text": [1], "time": 5}, {"a": 1})},
    "verdicts: deep": {"verdicts.jsonl": DEEP + b"\n"},
    "lock: garbage": {"LOCK": b"\xff\x00garbage\x1b[2J"},
    "lock: types": {"LOCK": {"pid": "x", "host": 5}},
    "lock: huge": {"LOCK": {"pid": 10**30, "host": "x"}},
    "lock: deep": {"LOCK": DEEP},
    "configuration: deep": {"config.yaml": "[" * 5000},
    "configuration: aliases": {"config.yaml": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join('*' + chr(97 + i) for _ in range(9))}]" for i in range(9)
    )},
    "configuration: tag": {"config.yaml": "train: !!python/object/apply:os.system ['touch RAN']\n"},
    "configuration: scalar": {"config.yaml": "train: 5\n"},
    "configuration: binary": {"config.yaml": b"\xff\xfe\x00"},
    "configuration: huge": {"config.yaml": "train: {num_steps: %s}\n" % ("9" * 400)},
    "manifest: deep": {"checkpoints/step-00000010/MANIFEST.json": DEEP},
    "manifest: list": {"checkpoints/step-00000010/MANIFEST.json": [1]},
    "manifest: huge step": {"checkpoints/step-" + "9" * 200 + "/MANIFEST.json": {}},
    "manifest: no files": manifest({"metadata": {}}),
    "manifest: files": manifest({"files": [1], "metadata": {}}),
    "manifest: size": manifest({"files": {"a": {"size_bytes": "x", "xxh3_128": "0"}}, "metadata": {}}),
    "manifest: huge size": manifest({"files": {"a": {"size_bytes": 10**400, "xxh3_128": "0"}}, "metadata": {}}),
    "manifest: entry": manifest({"files": {"a": 5}, "metadata": {}}),
    "manifest: empty entry": manifest({"files": {"a": {}}, "metadata": {}}),
    "manifest: metadata": manifest({"files": {}, "metadata": [1]}),
    "manifest: text": manifest({"files": {}, "metadata": "x"}),
    "manifest: no metadata": manifest({"files": {}}),
    "manifest: types": manifest({"files": {}, "metadata": {"step": "x", "fingerprint": 5, "settings": []}}),
    "manifest: outside": manifest(
        {"files": {"../../../etc/passwd": {"size_bytes": 1, "xxh3_128": "0"}}, "metadata": {"step": 10}}
    ),
    "plan: deep": {"plan.jsonl": DEEP + b"\n" + DEEP + b"\n"},
    "plan: garbage": {"plan.jsonl": b"{}\n{}\n"},
    "attempts: garbage": {"attempts.bin": b"\x07" * 6400},
    "heartbeat: garbage": {"watchdog/rank-00000.beat": b"\x07" * 4096},
    "heartbeat: zeros": {"watchdog/rank-00000.beat": b"\0" * 4096},
    "stall: types": {"watchdog/stall-00001.json": {"attempt": [1], "at": {}, "what": 1, "where": 0, "traceback": "["}},
    "stall: deep": {"watchdog/stall-00001.json": DEEP},
    "nonfinite: names": {"nonfinite/step-<img src=x>": b"x"},
    "configurations: huge": {"configs/step-" + "9" * 220 + ".yaml": "a: 1"},
}  # fmt: skip
UNREADABLE = [name for name in SHAPES if name.startswith(("attempts: ", "record", "notes", "code", "outcome", "start",
              "command")) and name != "attempts: garbage"] + ["length: 400 digits"]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one sound run."""
    write(tmp_path / "runs" / "good", {})
    return tmp_path / "runs"


def write(run: Path, files: Mapping[str, Any]) -> Path:
    for name, content in {"run.json": GOOD, **files}.items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes | str) else json.dumps(content)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return run


def look(root: Path, name: str) -> None:
    """Ask everything that only looks; an explained error about this run is an answer."""
    index = RunIndex(root)
    rows = {row["id"]: row for row in index.rows()}
    assert rows["good"]["state"] == "finished"
    assert rows[name]["state"] in ("finished", "killed", "unknown", "unreadable", "running")
    text = prometheus.exposition(list(rows.values()), time.time())
    assert 'vorox_run_state{run="good",state="finished"} 1' in text
    answers = Answers(index)
    questions = ("run", "curves", "events", "samples", "health", "ranks", "plan", "checkpoints", "data")
    asked = [(question, {"id": name}) for question in questions]
    asked += [("documents", {"id": name, "step": "1"}), ("steps", {"id": name, "uri": "x"})]
    asked += [("compare", {"ids": f"{name}/good"})]
    for question, query in asked:
        with contextlib.suppress(VoroxError):
            json.dumps(answers.get(question, query), default=str)
    with contextlib.suppress(VoroxError):
        list_checkpoints(root / name, verify=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_hostile_run_ends_nothing(
    shape: str, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    write(root / "evil", SHAPES[shape])
    found = {run.run_id: run for run in list_runs(root)}
    assert found["good"].state == "finished"
    assert (found["evil"].state == "unreadable") == (shape in UNREADABLE) == bool(found["evil"].problem)
    assert main(["runs", "list"]) == 0
    printed = capsys.readouterr().out
    assert "good" in printed
    assert ("evil: unreadable, because run.json: " in printed) == (shape in UNREADABLE)
    assert main(["runs", "show", "evil"]) == 0
    look(root, "evil")
    assert not Path("RAN").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize(
    "name",
    ["failure.json", "metrics.jsonl", "events.jsonl", "evaluations.jsonl", "chain.jsonl", "plan.jsonl",
     "verdicts.jsonl", "config.yaml", "checkpoints/step-00000010/MANIFEST.json", "LOCK", "attempts.bin",
     "watchdog/rank-00000.beat"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["fifo", "endless", "loop"])
def test_nothing_waits_at_a_fifo_or_reads_a_device(name: str, kind: str, root: Path) -> None:
    path = write(root / "evil", {}) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "endless" else path)
    assert {run.run_id for run in list_runs(root)} == {"good", "evil"}
    look(root, "evil")


def test_a_record_that_is_a_link_to_itself_is_no_evidence_of_steps(tmp_path: Path) -> None:
    (tmp_path / "run.json").symlink_to("run.json")
    assert executed_steps._evidence_of(tmp_path) is not None  # pyright: ignore[reportPrivateUsage]


def test_what_no_reader_foresaw_is_a_line_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vorox.dashboard.runs import run_index
    from vorox.experiments import artifacts

    def fail(directory: Path, *arguments: object, **_: object) -> Any:
        if directory.name == "evil":
            raise ZeroDivisionError("a case of its own")
        return inspect_run(directory) if len(arguments) == 0 else {}

    write(root / "evil", {})
    monkeypatch.setattr(artifacts, "inspect_run", fail)
    found = {run.run_id: run for run in list_runs(root)}
    assert found["evil"].problem == "ZeroDivisionError: a case of its own"
    monkeypatch.undo()
    monkeypatch.setattr(run_index, "_newest_values", fail)
    rows = {row["id"]: row for row in RunIndex(root).rows()}
    assert rows["evil"]["failure"] == "unreadable, because ZeroDivisionError: a case of its own"
    assert list(rows["evil"]) == list(rows["good"]), "the page reads the same keys of every row"
    assert "vorox_step" in prometheus.exposition(list(rows.values()), time.time())


def test_a_name_that_is_not_utf8_ends_nothing(root: Path) -> None:
    try:
        write(root / os.fsdecode(b"bad-\xff"), {})
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    rows = RunIndex(root).rows()
    assert len(rows) == 2
    prometheus.exposition(rows, time.time()).encode()
