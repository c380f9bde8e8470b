"""kill -9 while a checkpoint is on its way to the store; then the same run on an empty disk, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from servers import Request
from servers.shelves import shelf
from tiny_runs import configuration, run, use_numpy_engine, write_text
from vorox.core.config import dump_yaml
from vorox.records.replay_chain import read_chain
from vorox.training.mirror import list_mirror

SCRIPT = Path(__file__).with_name("mirrored_run.py")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def start(directory: Path, text: Path, mirror: str) -> subprocess.Popen[bytes]:
    """The same run on a machine whose disk is this directory."""
    (directory / "text").mkdir(parents=True)
    config = configuration(directory, [f"data.sources.0.paths=[{text}]", f"checkpoint.mirror={mirror}"])
    file = directory / "mirrored.yaml"
    file.write_text(dump_yaml(config))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    with (directory / "stderr.txt").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(SCRIPT), str(file)],
            env={**os.environ, "PYTHONPATH": path}, stderr=said,
        )  # fmt: skip


def chain(directory: Path) -> list[tuple[str, str]]:
    return [(entry.batch, entry.chain) for entry in read_chain(directory).values()]


@pytest.mark.parametrize(
    ("kind", "dies_at", "comes_through", "goes_on_from"),
    [
        ("gs", "chain.jsonl", False, 4),
        ("gs", "MANIFEST.json", False, 4),
        ("gs", "MANIFEST.json", True, 8),
        ("s3", "state.json", True, 4),
        ("s3", "MANIFEST.json", True, 8),
        ("az", "MANIFEST.json", True, 8),
    ],
)
def test_killed_in_the_middle_of_an_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dies_at: str, comes_through: bool, goes_on_from: int
) -> None:
    """The server kills the process when it is about to write a file of step 8, or has just written it."""
    text = write_text(tmp_path / "text")
    with monkeypatch.context() as patch:
        use_numpy_engine(patch)
        straight = chain(run(configuration(tmp_path)).run_directory)
    with shelf(kind, tmp_path) as store, store.behind() as (root, proxy):
        mirror, process = f"{root}/mirror", None
        forward = proxy._ask

        def ask(request: Request) -> tuple[int, dict[str, str], bytes, int]:
            name = unquote(request.path)
            written = request.method in {"PUT", "POST"}
            dies = written and "step-00000008" in name and dies_at in name and process is not None
            if dies and not comes_through:
                os.kill(process.pid, signal.SIGKILL)
                raise ConnectionResetError
            answer = forward(request)
            if dies:
                os.kill(process.pid, signal.SIGKILL)
            return answer

        proxy._ask = ask  # type: ignore[method-assign]
        process = start(tmp_path / "first", text, mirror)
        assert process.wait(300) == -signal.SIGKILL
        process = None
        (name,) = [path.name for path in (tmp_path / "first" / "runs").iterdir()]
        shutil.rmtree(tmp_path / "first")
        whole = [entry.step for entry in list_mirror(f"{mirror}/{name}").lineage()]
        assert max(whole) == goes_on_from
        second = start(tmp_path / "second", text, mirror)
        assert second.wait(300) == 0, (tmp_path / "second" / "stderr.txt").read_text()
    directory = tmp_path / "second" / "runs" / name
    assert chain(directory) == straight
    events: list[dict[str, Any]] = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert [event["fields"]["step"] for event in events if event["kind"] == "resumed"] == [goes_on_from]
