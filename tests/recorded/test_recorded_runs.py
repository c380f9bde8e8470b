"""What earlier versions recorded is opened, read and continued: no later version may change a form."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recorded.record import KEPT, LATER, RUNS, answers, train, vorox
from vorox.core.run_layout import RunLayout

RECORDINGS = sorted(Path(__file__).parent.glob("*.tar.xz"))
MOVED: Mapping[str, list[str]] = {
    "chat": ["model.name_or_path=base", "tokenizer.path=base"],
    "pairs": ["train.from_weights=mixture"],
}
"""What a run recorded as an absolute path, where its folder is now."""


@pytest.fixture(scope="module", params=RECORDINGS, ids=lambda path: path.name.removesuffix(".tar.xz"))
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


def stored(folder: Path) -> dict[str, bytes]:
    """All chunks and recipes of the caches, by path."""
    files = (path for pattern in ("*.psc", "RECIPE.json") for path in (folder / "cache").rglob(pattern))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def as_recorded(found: Any, recorded: Any) -> Any:
    """An answer without the fields that are newer than the record; of an old run they say nothing."""
    if isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        return [as_recorded(one, other) for one, other in zip(found, recorded, strict=True)]
    if isinstance(found, dict) and isinstance(recorded, dict):
        newer = {name: value for name, value in found.items() if name not in recorded}
        assert not any(newer.values()), newer
        return {name: as_recorded(value, recorded[name]) for name, value in found.items() if name in recorded}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_verified_and_continued_with_the_rows_that_it_would_have_got(
    recording: Path, name: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(recording, tmp_path / "copy"))
    expected: dict[str, Any] = json.loads((folder / "expected.json").read_text(encoding="utf-8"))[name]
    (directory,) = (folder / "runs").glob(f"{name}-*")
    before = stored(folder)
    vorox(folder, "checkpoints", "verify", directory.name)
    vorox(folder, "data", "verify", directory.name)
    checkpoint = RunLayout(directory).checkpoint(KEPT).relative_to(folder)
    train(folder, name, "--resume", str(checkpoint), f"train.num_steps={LATER}", *MOVED.get(name, []))
    found = json.loads(json.dumps(answers(folder, directory)))
    assert as_recorded(found["documents"], expected["documents"]) == expected["documents"]
    assert found["batches"] == expected["batches"], "the same rows, masked and divided as they were"
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3), "another processor rounds differently"
    assert stored(folder) == before, "no cache was built again"
