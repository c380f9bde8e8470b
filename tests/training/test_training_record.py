"""Training records against a recount of the batches, and the documents that opt out against the same recount."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
from vorox.cli import main
from vorox.cli.markdown.training_record import NOT_STATED
from vorox.core.run_layout import step_directories
from vorox.data.provenance.contamination import EvaluationRecord, find_contamination
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import read_chain
from vorox.training.reports.training_record import size_range

STEPS, SPIKE, NOT_FINITE, KILLED_IN = 30, 12, 15, 20
END_OF_TEXT = 256
Document = tuple[str, str, int]
"""Source, file and record of a document."""


@dataclass(frozen=True)
class Trained:
    """A run of two sources and two epochs, with a skipped step, a step that is not finite, and a resume."""

    directory: Path
    corpora: Path
    tokens_by_step: dict[int, Counter[Document]]

    def recount(self, last_step: int, lost: tuple[int, ...] = (SPIKE, NOT_FINITE)) -> Counter[Document]:
        steps = (step for step in range(1, last_step + 1) if step not in lost)
        return sum((self.tokens_by_step[step] for step in steps), Counter())


def write_source(directory: Path, name: str, chooser: random.Random) -> None:
    """Two files of short documents, each with its address in its text; one is no JSON, one of web too short."""
    directory.mkdir(parents=True)
    for file in ("a.jsonl", "b.jsonl"):
        lines = [
            json.dumps({"text": f"{name} {file} {number:03d} " + "x" * chooser.randint(4, 30)}) for number in range(16)
        ]
        lines[11] = "no json"
        if name == "web":
            lines[7] = json.dumps({"text": "short"})
        (directory / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def documents_of(batch: Any) -> Counter[Document]:
    """The tokens of each document in a batch, from its tokens and labels alone; documents fit into rows."""
    found: Counter[Document] = Counter()
    rows = zip(*(array.reshape(-1, array.shape[-1]) for array in (batch.tokens_ABT, batch.labels_ABT)), strict=True)
    for tokens, labels in rows:
        ids = [int(tokens[0]), *labels[labels >= 0].tolist()]
        for text in "".join(chr(token) if token < END_OF_TEXT else "\n" for token in ids).splitlines(keepends=True):
            match = re.fullmatch(r"(\w+) (\w\.jsonl) (\d+) x+\n", text)
            assert match is not None, text
            found[match[1], match[2], int(match[3])] += len(text)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("record")
    chooser = random.Random()
    sources: list[dict[str, Any]] = []
    for name, weight in (("web", "2/3"), ("notes", "1/3")):
        write_source(directory / "corpora" / name, name, chooser)
        paths = [str(directory / "corpora" / name)]
        sources.append({"name": name, "format": "jsonl", "paths": paths, "weight": weight, "bad_record_fraction": 0.5})
    sources[0]["transforms"] = [{"name": "length", "args": {"min_characters": 8}}]
    settings = [
        f"data.sources={json.dumps(sources)}", "data.sequence_length_tokens=64", "data.document_mask=false",
        f"train.num_steps={STEPS}", "train.spike_policy=skip", "train.spike_window_steps=4", "eval.every_steps=null",
        "data.validation.held_out_fraction=0",
        "checkpoint.every_steps=8", "checkpoint.keep_last=9",
    ]  # fmt: skip
    config = tiny_runs.configuration(directory, settings)
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        tiny_runs.scale_steps(patch, {SPIKE: 3, NOT_FINITE: math.nan})
        with pytest.MonkeyPatch.context() as killing:
            tiny_runs.at_step(killing, KILLED_IN, tiny_runs.kill)
            with pytest.raises(tiny_runs.Killed):
                tiny_runs.run(config)
        run_directory = tiny_runs.run(config).run_directory
    with vorox.open_run(run_directory) as run:
        tokens = {batch.step: documents_of(batch) for batch in run.batches(1, STEPS)}
    return Trained(run_directory, directory / "corpora", tokens)


@pytest.fixture
def record(trained: Trained, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["runs", "record", str(trained.directory), *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


@pytest.mark.parametrize("step", [8, 20, None])
def test_numbers_equal_a_recount_of_the_batches(trained: Trained, record: Any, step: int | None) -> None:
    code, out, error = record("--json", *([] if step is None else ["--step", str(step)]))
    assert code == 0, error
    found = json.loads(out)
    tokens = trained.recount(step or STEPS)
    by_file: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for name in ("web", "notes"):
        for file in ("a.jsonl", "b.jsonl"):
            of_file = [count for document, count in tokens.items() if document[:2] == (name, file)]
            by_file[name][str(trained.corpora / name / file)] = (len(of_file), sum(of_file))
    for source in found["sources"]:
        files = by_file[source["name"]]
        assert {file["uri"]: (file["documents"], file["tokens"]) for file in source["files"]} == files
        assert source["documents"] == sum(documents for documents, _ in files.values())
        assert source["tokens"] == sum(count for _, count in files.values())
        assert source["share"] == pytest.approx(source["tokens"] / tokens.total(), rel=1e-12)
        assert (source["num_source_files"], source["quarantined_records"]) == (2, 2)
        removed = [(transform["name"], transform["counts"]["removed"]) for transform in source["transforms"]]
        assert removed == [("length", 2)] * (source["name"] == "web")
        lengths = [len(text_of(trained, document)) + 1 for document in tokens if document[0] == source["name"]]
        assert source["distinct_tokens"] == sum(lengths)
    assert found["general"]["tokens"] == tokens.total()
    assert found["general"]["size_range"] == "less than 1 billion tokens"
    lost = [skipped for skipped in (SPIKE, NOT_FINITE) if skipped <= found["step"]]
    assert found["steps"] == {
        "applied": found["step"] - len(lost),
        "loss_spikes_skipped": int(SPIKE in lost),
        "not_finite": int(NOT_FINITE in lost),
        "not_known_to_be_finite": 0,
    }
    assert found["proof"]["chain_head"] == read_chain(trained.directory)[found["step"]].chain
    if step is None:
        manifest = json.loads((step_directories(trained.directory)[STEPS] / "MANIFEST.json").read_bytes())
        assert found["proof"]["checkpoint_fingerprint"] == manifest["metadata"]["fingerprint"]
        assert min(source["epochs"] for source in found["sources"]) > 1.2, "some rows are read twice"


def text_of(trained: Trained, document: Document) -> str:
    name, file, number = document
    return json.loads((trained.corpora / name / file).read_text(encoding="utf-8").splitlines()[number])["text"]


FACTS = """
provider: Example Ltd, data@example.org
languages: [en]
copyright: robots.txt is respected
sources:
  web: {kind: crawled, licence: "ODC-By 1.0 | terms of the pages", acquired: 2025-06}
"""


def test_facts_are_stated_and_others_are_not_invented(trained: Trained, record: Any, tmp_path: Path) -> None:
    facts, file = tmp_path / "facts.yaml", tmp_path / "record.md"
    facts.write_text(FACTS, encoding="utf-8")
    found = json.loads(record("--facts", str(facts), "--json")[1])
    web, notes = found["sources"]
    assert (web["kind"], web["acquired"]) == ("crawled", "2025-06")
    assert [notes[key] for key in ("kind", "licence", "acquired", "description")] == [None] * 4
    assert [(entry["kind"], entry["share"]) for entry in found["shares"]["kind"]] == [
        ("crawled", web["share"]), (None, notes["share"]),
    ]  # fmt: skip
    code, out, error = record("--facts", str(facts), "--to", str(file))
    assert code == 0, error
    assert str(file) in out
    sections = re.split(r"^#{3,4} ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = [section.splitlines()[0] for section in sections[1:]]
    assert titles.index("web") == titles.index("2.3 Data crawled and scraped from online sources") + 1
    of_web, of_notes = (next(part for part in sections if part.startswith(name)) for name in ("web", "notes"))
    assert "| Licence | ODC-By 1.0 \\| terms of the pages |" in of_web
    assert f"| Licence | {NOT_STATED} |" in of_notes
    assert f"| Tokens with repetitions | {web['tokens']:,} |" in of_web
    assert f"| Model | {NOT_STATED} |" in sections[0]
    assert f"| Removal of illegal content | {NOT_STATED} |" in sections[-1]


def test_contaminated_records_of_an_evaluation_set_are_counted(trained: Trained, record: Any, tmp_path: Path) -> None:
    seen, exam = trained.recount(3), tmp_path / "exam.jsonl"
    texts = [
        *(text_of(trained, document) for document in list(seen)[:5]),
        "0123456789 never read, so it is unseen",
        "?",
    ]
    exam.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    code, out, error = record("--against", str(exam), "--step", "3", "--json")
    assert code == 0, error
    assert json.loads(out)["contamination"] == [
        {
            "evaluation_set": str(exam), "records": 7, "short_records": 1, "ngram_tokens": 13,
            "contaminated": 5, "mostly_contaminated": 5,
        }
    ]  # fmt: skip
    assert f"| {exam} | 7 | 1 | 5 | 5 |" in record("--against", str(exam), "--step", "3")[1]


@pytest.mark.parametrize(
    ("text", "place", "named"),
    [
        ("sources:\n  web: {license: MIT}", "facts.yaml:2", "licence"),
        ("sources:\n  web:\n    kind: stolen", "facts.yaml:3", "crawled"),
        ("provider: A\nsources:\n  pages: {kind: public}", "facts.yaml:3", "web, notes"),
        ("provider: [", "facts.yaml", "facts.yaml"),
        (None, "facts.yaml", "YAML"),
    ],
)
def test_wrong_facts_are_refused(record: Any, tmp_path: Path, text: str | None, place: str, named: str) -> None:
    facts = tmp_path / "facts.yaml"
    if text is not None:
        facts.write_text(text, encoding="utf-8")
    code, out, error = record("--facts", str(facts))
    assert (code, out) == (2, "")
    assert place in error
    assert named in error


def test_missing_steps_are_refused(
    trained: Trained, record: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = record("--step", str(STEPS + 1))
    assert (code, out) == (2, "")
    assert f"Step {STEPS + 1}" in error
    assert f"{STEPS}" in error.partition("do ")[2]
    copy = tmp_path / "copy"
    shutil.copytree(trained.directory, copy)
    (copy / "attempts.bin").unlink()
    capsys.readouterr()
    assert main(["runs", "record", str(copy), "--json"]) == 0, "run.json has the steps of attempts that ended"
    assert json.loads(capsys.readouterr().out)["steps"] == json.loads(record("--json")[1])["steps"]
    (copy / "run.json").unlink()
    assert main(["runs", "record", str(copy)]) == 4
    shutil.copy2(trained.directory / "attempts.bin", copy)
    assert main(["runs", "record", str(copy)]) == 4, "nothing says which weights it started from"


def test_a_damaged_chain_is_not_called_proof(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained.directory, copy)
    lines = (copy / "chain.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (copy / "chain.jsonl").write_text("".join(line for line in lines if '"step":5}' not in line), encoding="utf-8")
    capsys.readouterr()
    assert main(["runs", "record", str(copy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "step 5" in found["proof"]["chain_damage"]
    assert found["steps"]["not_known_to_be_finite"] == 1


def test_ranges_of_the_template() -> None:
    known = [size_range(tokens) for tokens in (10**9 - 1, 10**9, 10**13, 10**13 + 1)]
    assert [name.split()[0] for name in known] == ["less", "1", "1", "more"]


def test_a_skipped_step_is_no_contamination(trained: Trained) -> None:
    with RunDataIndex.open(trained.directory) as run_data:
        records = [
            EvaluationRecord(
                "exam", number, np.frombuffer(text_of(trained, document).encode(), np.uint8).astype(np.int64)
            )
            for number, document in enumerate(trained.tokens_by_step[SPIKE])
        ]
        found = find_contamination(run_data, records)
    assert found.num_steps == STEPS - 1
    steps = {step for one in found.records for document in one.documents for step in document.steps}
    assert steps
    assert SPIKE not in steps


# The documents of an opt-out


@pytest.fixture(scope="module")
def family(trained: Trained) -> Path:
    """The folder of the run, and of a run that reads only ``web`` and starts from weights of step 8 of the first."""
    directory = trained.corpora.parent
    sources = [{"name": "web", "format": "jsonl", "paths": [str(trained.corpora / "web")], "bad_record_fraction": 0.5}]
    settings = [
        f"data.sources={json.dumps(sources)}", "data.sequence_length_tokens=64", "eval.every_steps=null",
        "data.validation.held_out_fraction=0", "run.name=child", "train.num_steps=4", "train.from_optimizer=true",
        f"train.from_weights={step_directories(trained.directory)[8]}",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        tiny_runs.run(tiny_runs.configuration(directory, settings))
    return directory / "runs"


def search(capsys: pytest.CaptureFixture[str], root: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert main(["data", "when", "--all-runs", "--root", str(root), "--json", *words]) == code
    printed = capsys.readouterr()
    return {run["run"].partition("-")[0]: run for run in json.loads(printed.out)}, printed.err


def test_runs_steps_and_checkpoints_of_a_document(
    trained: Trained, family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: dict[Document, list[int]] = defaultdict(list)
    for step, documents in trained.tokens_by_step.items():
        for document in documents:
            steps[document] += [step] * (step != SPIKE)
    of_notes = [document for document, applied in steps.items() if document[0] == "notes" and applied]
    early, late = min(of_notes, key=lambda one: steps[one][0]), max(of_notes, key=lambda one: steps[one][0])
    assert steps[early][0] <= 8 < steps[late][0]
    saved = step_directories(trained.directory)
    for name, file, number in (early, late):
        address = ("--source", f"{name}/{file}", "--record", str(number))
        found, _ = search(capsys, family, *address)
        first_step = steps[name, file, number][0]
        tiny, child = found["tiny"], found["child"]
        assert tiny["first_step"] == first_step
        assert tiny["checkpoints"] == [path.name for step, path in saved.items() if step >= first_step]
        assert {one["step"] for one in tiny["occurrences"] if one["state"] == "kept"} == set(steps[name, file, number])
        assert (child["first_step"], child["occurrences"], tiny["inherited_from"]) == (None, [], None)
        assert child["inherited_from"] == (str(saved[8]) if first_step <= 8 else None)
        assert child["checkpoints"] == ([] if first_step > 8 else ["step-00000004"])
        text = tmp_path / "text.txt"
        text.write_text(text_of(trained, (name, file, number)) + "\n", encoding="utf-8")
        by_text, _ = search(capsys, family, "--text-file", str(text))
        assert by_text == found
    row = next(row for row in vorox.open_run(trained.directory).where(steps[late][0]) for row in row.documents)
    by_hash, _ = search(capsys, family, "--text-hash", f"{row.text_xxh3:016x}")
    assert steps[late][0] in {one["step"] for one in by_hash["tiny"]["occurrences"]}
    assert search(capsys, family, "--text-hash", "0" * 16)[0]["tiny"]["first_step"] is None


def test_a_run_that_cannot_be_searched_is_named(
    trained: Trained, family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in family.iterdir():
        shutil.copytree(run, tmp_path / run.name)
    (tmp_path / trained.directory.name / "plan.jsonl").unlink()
    found, error = search(capsys, tmp_path, "--source", "web/a.jsonl", code=4)
    assert "plan" in found["tiny"]["problem"]
    assert trained.directory.name in error
    assert found["child"]["first_step"] == 1
    assert found["child"]["unknown_weights"] == str(step_directories(trained.directory)[8])


@pytest.mark.parametrize(
    "words",
    [
        ("--source", "web/a.jsonl"), ("RUN", "--all-runs", "--source", "web/a.jsonl"), ("RUN",),
        ("RUN", "--source", "web/a.jsonl", "--text-hash", "0" * 16), ("RUN", "--text-hash", "xyz"),
        ("RUN", "--text-hash", "0" * 16, "--byte", "3"), ("RUN", "--text-file", "nofile.txt"),
    ],
)  # fmt: skip
def test_questions_that_name_no_document_or_run(trained: Trained, words: tuple[str, ...]) -> None:
    assert main(["data", "when", *(str(trained.directory) if word == "RUN" else word for word in words)]) == 2
