"""Unlearned documents: the run is bit for bit one that masked them from its start, and says what that cannot undo."""

from __future__ import annotations

import base64
import json
import random
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import tiny_runs
import vorox
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.provenance.named_documents import named_documents
from vorox.data.provenance.queries import where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import read_chain
from vorox.records.run_lookup import run_directories
from vorox.training.checkpoints.store import verify
from vorox.training.fork import ForkChange, fork

pytestmark = pytest.mark.slow

EVERY_DOCUMENT = ["data.validation.held_out_fraction=0", "eval.every_steps=null"]


@pytest.fixture
def numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


def chain(run_directory: Path) -> dict[int, str]:
    return {step: entry.chain for step, entry in read_chain(run_directory).items()}


def fingerprint(run_directory: Path) -> str:
    kept = step_directories(run_directory)
    return str(verify(kept[max(kept)]).metadata["fingerprint"])


def write_texts(directory: Path, texts: list[str]) -> None:
    (directory / "text").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) for text in texts]
    (directory / "text" / "text.jsonl").write_text("\n".join(lines) + "\n")


def first_reads(run_directory: Path) -> dict[int, int]:
    """The first step that reads each document, by index; without those that no step of the run reads."""
    found: dict[int, int] = {}
    with RunDataIndex.open(run_directory) as run_data:
        for step in sorted(chain(run_directory)):
            for row in where(run_data, step):
                for part in row.documents:
                    found.setdefault(part.ordinal, step)
    return found


def masked_from_the_start(parent: Path, ordinals: list[int], name: str) -> Path:
    """A run of its own from the initial weights, with documents masked in all of its steps."""
    with RunDataIndex.open(parent) as run_data:
        change = ForkChange(named_documents(run_data, [f"text.jsonl:{one}" for one in ordinals], "here"))
    directory = fork(parent, 0, None, change, name)
    tiny_runs.run(load_config(RunLayout(directory).config), resume_from=directory)
    return directory


def unlearn(parent: Path, *words: str) -> Path:
    """Unlearn by the command, and return the new run."""
    before = {one.name for one in run_directories(parent.parent)}
    assert main(["unlearn", str(parent), *words]) == 0
    (found,) = [one for one in run_directories(parent.parent) if one.name not in before]
    return found


def unlearn_last(parent: Path, *words: str) -> Path:
    """Unlearn by the command, in several forks, and return the last one."""
    assert main(["unlearn", str(parent), *words]) == 0
    (found,) = [one for one in run_directories(parent.parent) if RunLayout(one).statements.exists()]
    return found


def statement(run_directory: Path) -> dict[str, Any]:
    (path,) = RunLayout(run_directory).statements.iterdir()
    return json.loads(path.read_text())


@pytest.mark.usefixtures("numpy_engine")
@pytest.mark.parametrize("number", [1, 5])
def test_the_run_is_one_that_masked_them_from_its_start(tmp_path: Path, number: int) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    ordinals = random.sample(sorted(first_reads(parent)), number)
    files = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file() and path.suffix != ".pin"}
    listed = tmp_path / "list.txt"
    listed.write_text("# opted out\n" + "".join(f"text.jsonl:{one}  # by mail\n\n" for one in ordinals))
    unlearned = unlearn(parent, "--list", str(listed))
    assert {path: path.read_bytes() for path in files} == files, "the parent is not changed"
    scratch = masked_from_the_start(parent, ordinals, "scratch")
    assert chain(unlearned) == chain(scratch)
    assert fingerprint(unlearned) == fingerprint(scratch) != fingerprint(parent)
    found = statement(unlearned)["predicate"]
    with RunDataIndex.open(unlearned) as run_data:
        for step in range(1, 13):
            documents = [part for row in where(run_data, step) for part in row.documents if part.ordinal in ordinals]
            assert all(part.is_masked for part in documents) or step < found["masked_steps"][0]
            assert bool(documents) == (step in found["masked_steps"])


@pytest.mark.usefixtures("numpy_engine")
def test_twenty_documents_and_three_lists(tmp_path: Path) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    read = sorted(first_reads(parent))
    cases = [[one] for one in random.sample(read, min(20, len(read)))] + [random.sample(read, k) for k in (3, 8, 15)]
    for number, ordinals in enumerate(cases):
        words = [word for one in ordinals for word in ("--document", f"text.jsonl:{one}")]
        unlearned = unlearn(parent, *words, "--name", f"without-{number}")
        scratch = masked_from_the_start(parent, ordinals, f"scratch-{number}")
        assert chain(unlearned) == chain(scratch)
        assert fingerprint(unlearned) == fingerprint(scratch)


@pytest.mark.usefixtures("numpy_engine")
def test_settings_that_a_resume_changed_change_again(tmp_path: Path) -> None:
    config = tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)
    parent = tiny_runs.run(config).run_directory
    later = tiny_runs.configuration(tmp_path, [*EVERY_DOCUMENT, "optimizer.lr=0.03", "train.num_steps=16"])
    tiny_runs.run(later, resume_from=parent)
    with RunDataIndex.open(parent) as run_data:
        ordinal = where(run_data, 2)[0].documents[0].ordinal
    scratch = masked_from_the_start(parent, [ordinal], "scratch")
    changed = load_config(RunLayout(scratch).config, ["optimizer.lr=0.03", "train.num_steps=16"])
    tiny_runs.run(changed, resume_from=scratch)
    assert main(["unlearn", str(parent), "--document", f"text.jsonl:{ordinal}", "--name", "clean"]) == 0
    (unlearned,) = [one for one in run_directories(parent.parent) if RunLayout(one).statements.exists()]
    assert max(chain(unlearned)) == 16
    assert chain(unlearned) == chain(scratch)
    assert fingerprint(unlearned) == fingerprint(scratch)


@pytest.mark.usefixtures("numpy_engine")
def test_what_is_unlearned_already_stays_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second document was read before the first one, whose mask is then a later decision of the run."""
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    seen = first_reads(parent)
    early = next(ordinal for ordinal, step in seen.items() if step == 1)
    late = max(seen, key=lambda ordinal: seen[ordinal])
    first = unlearn(parent, "--document", f"text.jsonl:{late}")
    both = unlearn(first, "--document", f"text.jsonl:{early}")
    assert chain(both) == chain(masked_from_the_start(parent, [early, late], "scratch"))
    capsys.readouterr()
    assert main(["unlearn", str(both), "--document", f"text.jsonl:{late}"]) == 0
    assert "Nothing is to be unlearned, and no run was written" in capsys.readouterr().out


@pytest.mark.usefixtures("numpy_engine")
def test_a_source_that_the_run_gave_up_later_is_given_up_again(tmp_path: Path) -> None:
    tiny_runs.write_text(tmp_path / "other", seed=1)
    tiny_runs.write_text(tmp_path / "text")
    sources = [{"name": name, "format": "jsonl", "paths": [str(tmp_path / name)]} for name in ("text", "other")]
    config = tiny_runs.configuration(tmp_path, [*EVERY_DOCUMENT, f"data.sources={json.dumps(sources)}"])
    parent = tiny_runs.run(config).run_directory
    change = ForkChange(sources=("other",))
    ablated = fork(parent, 8, verify(step_directories(parent)[8]), change, "ablated")
    tiny_runs.run(load_config(RunLayout(ablated).config), resume_from=ablated)
    with RunDataIndex.open(ablated) as run_data:
        places = [(part.uri, part.ordinal) for row in where(run_data, 2) for part in row.documents]
    uri, ordinal = random.choice(places)
    unlearned = unlearn_last(ablated, "--document", f"{uri}:{ordinal}")
    with RunDataIndex.open(unlearned) as run_data:
        assert {row.source for step in range(9, 13) for row in where(run_data, step)} == {"text"}
        assert {row.source for step in range(1, 9) for row in where(run_data, step)} == {"text", "other"}
    assert max(chain(unlearned)) == 12
    assert chain(unlearned)[1] == chain(parent)[1]
    assert chain(unlearned)[2] != chain(parent)[2]


@pytest.mark.usefixtures("numpy_engine")
def test_a_mask_that_the_run_has_later_stays_where_it_was(tmp_path: Path) -> None:
    """The run read the first document, masked it later, and is to unlearn one that it read in between."""
    overrides = [*EVERY_DOCUMENT, "train.num_epochs=3", "train.num_steps=null", "data.sequence_length_tokens=64"]
    write_texts(tmp_path, [" ".join(random.choices(tiny_runs.WORDS, k=12)) for _ in range(12)])
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, [*overrides, "checkpoint.keep_last=99"])).run_directory
    last, kept = max(chain(parent)), step_directories(parent)
    middle = max(step for step in kept if step <= 2 * last // 3)
    with RunDataIndex.open(parent) as run_data:
        change = ForkChange(named_documents(run_data, ["text.jsonl:3"], "here"))
    masked = fork(parent, middle, verify(kept[middle]), change, "masked")
    tiny_runs.run(load_config(RunLayout(masked).config), resume_from=masked)
    unlearned = unlearn_last(masked, "--document", "text.jsonl:7")
    scratch = masked_from_the_start(parent, [7], "scratch")
    with RunDataIndex.open(scratch) as run_data:
        change = ForkChange(named_documents(run_data, ["text.jsonl:3"], "here"))
    again = fork(scratch, middle, verify(step_directories(scratch)[middle]), change, "scratch-masked")
    tiny_runs.run(load_config(RunLayout(again).config), resume_from=again)
    assert chain(unlearned) == chain(again)


@pytest.mark.usefixtures("numpy_engine")
def test_a_run_beside_it_whose_record_is_damaged_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    ordinal = random.choice(sorted(first_reads(parent)))
    damaged = Path(shutil.copytree(parent, parent.with_name("damaged")))
    RunLayout(damaged).record.write_text("{")
    assert statement(unlearn(parent, "--document", f"text.jsonl:{ordinal}"))["predicate"]["step"] == 12
    assert "damaged: from step" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("numpy_engine")
def test_a_document_that_no_step_has_read_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_runs.run(tiny_runs.configuration(tmp_path / "whole", EVERY_DOCUMENT)).run_directory
    ordinal = max(first_reads(whole).items(), key=lambda item: item[1])[0]
    with monkeypatch.context() as patch:
        tiny_runs.at_step(patch, 6, tiny_runs.kill)
        with pytest.raises(tiny_runs.Killed):
            tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT))
    (parent,) = run_directories(tmp_path / "runs")
    unlearned = unlearn(parent, "--document", f"text.jsonl:{ordinal}")
    assert chain(unlearned) == chain(masked_from_the_start(whole, [ordinal], "scratch"))


@pytest.mark.usefixtures("numpy_engine")
def test_another_fork_is_not_taken_for_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    ordinal = random.choice(sorted(first_reads(parent)))
    first = unlearn(parent, "--document", f"text.jsonl:{ordinal}")
    tiny_runs.run(load_config(RunLayout(first).config, ["optimizer.lr=0.5", "train.num_steps=16"]), resume_from=first)
    second = unlearn(parent, "--document", f"text/text.jsonl:{ordinal}", "--name", "second")
    assert chain(second) == chain(masked_from_the_start(parent, [ordinal], "scratch"))
    kept = {run: step_directories(run)[12] for run in (parent, second)}
    shutil.rmtree(kept[second])
    shutil.copytree(kept[parent], kept[second])  # weights that did read it
    shutil.rmtree(RunLayout(second).statements)
    capsys.readouterr()
    assert main(["unlearn", str(parent), "--document", f"text.jsonl:{ordinal}"]) == 5
    assert "replay chain differs from the checkpoint" in " ".join(capsys.readouterr().err.split())
    assert not RunLayout(second).statements.exists()


@pytest.mark.usefixtures("numpy_engine")
def test_a_stopped_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    command = ["unlearn", str(parent), "--document", f"text.jsonl:{random.choice(sorted(first_reads(parent)))}"]
    with monkeypatch.context() as patch:
        tiny_runs.at_step(patch, 12, tiny_runs.kill)
        with pytest.raises(tiny_runs.Killed):
            main(command)
    assert main(command) == 0
    assert main(command) == 0
    (unlearned,) = [one for one in run_directories(parent.parent) if one.name != parent.name]
    assert max(chain(unlearned)) == 12
    assert statement(unlearned)["predicate"]["step"] == 12


def test_copies_other_runs_and_exports_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [" ".join(random.choices(tiny_runs.WORDS, k=20)) + f" {number}" for number in range(40)]
    secret = "".join(random.choices("abcdefgh ", k=80))
    texts[7], texts[21], texts[30] = secret, secret, texts[30] + secret[:60]
    write_texts(tmp_path, texts)
    overrides = [
        *EVERY_DOCUMENT,
        "data.sequence_length_tokens=64",
        "train.num_steps=60",
        "checkpoint.every_steps=30",
        "runtime.device=cpu",
    ]
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, overrides)).run_directory
    child = tiny_runs.run(
        tiny_runs.configuration(tmp_path, [*overrides, f"train.from_weights={parent}", "run.name=child"])
    ).run_directory
    assert main(["checkpoints", "average", str(parent), "30", "60", "--to", str(tmp_path / "models" / "mean")]) == 0
    assert main(["checkpoints", "materialize", str(parent), "--step", "1", "--to", str(tmp_path / "models")]) == 0
    assert main(["checkpoints", "materialize", str(parent), "--step", "59", "--to", str(tmp_path / "models")]) == 0
    for step in ("1", "59", "60"):  # two of states that are not kept
        assert main(["export", f"{parent}@{step}", "--output", str(tmp_path / "models" / f"hf-{step}")]) == 0
    shutil.rmtree(tmp_path / "cache" / "materialized")
    capsys.readouterr()
    command = ["unlearn", str(parent), "--document", "text.jsonl:7", "--search", str(tmp_path / "models")]
    command += ["--search", str(tmp_path / "models" / ".." / "models")]
    before = sorted(path.name for path in parent.parent.iterdir())
    assert main([*command, "--plan", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in parent.parent.iterdir()) == before, "nothing is written"
    copies = {Path(one["name"]).name: one["fraction"] for one in told["copies"]}
    assert copies["text.jsonl:21"] == 1
    assert 0.3 < copies["text.jsonl:30"] < 1
    assert set(copies) == {"text.jsonl:21", "text.jsonl:30"}
    assert told["checkpoints"] == ["step-00000030", "step-00000060"]
    assert set(told["runs"]) == {child.name}
    assert sorted(Path(one).name for one in told["directories"]) == ["hf-59", "hf-60", "mean", "step-00000059"]
    assert main([*command, "--plan"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "100% " in said
    assert "text.jsonl:21" in said
    assert f"{child.name}:" in said
    assert main(["unlearn", str(child), "--document", "text.jsonl:7", "--plan", "--json"]) == 0
    acts = {one["place"]: one["answer"] for one in json.loads(capsys.readouterr().out)["acts"]}
    assert acts["initial weights"] == "yes"
    assert acts["borders of rows"] == acts["divisor of the loss"] == "yes"
    assert acts["teacher"] == acts["tokenizer"] == acts["own code"] == "no"


@pytest.mark.usefixtures("numpy_engine")
def test_the_statement_is_signed(tmp_path: Path) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    ordinal = random.choice(sorted(first_reads(parent)))
    key = Ed25519PrivateKey.generate()
    kind = serialization.PrivateFormat.PKCS8
    content = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(content)
    lines = f"\ufefftext.jsonl:{ordinal}\r\n\r\ntext/text.jsonl:0{ordinal}\r\n"  # a mark at the start, two names of one
    (tmp_path / "optout.txt").write_bytes(lines.encode())
    unlearned = unlearn(parent, "--list", str(tmp_path / "optout.txt"), "--key", str(tmp_path / "key.pem"))
    envelope = statement(unlearned)
    payload = base64.b64decode(envelope["payload"])
    kind_of = envelope["payloadType"].encode()
    message = b"DSSEv1 %d %s %d %s" % (len(kind_of), kind_of, len(payload), payload)
    key.public_key().verify(base64.b64decode(envelope["signatures"][0]["sig"]), message)
    found = json.loads(payload)
    kept = verify(step_directories(unlearned)[12])
    assert found["predicate"]["fingerprint"] == kept.metadata["fingerprint"]
    assert found["predicate"]["chain"] == chain(unlearned)[12]
    assert {one["name"] for one in found["subject"]} == {
        path.relative_to(kept.path).as_posix() for path in kept.path.rglob("*") if path.is_file()
    }
    (name,) = found["predicate"]["documents"]
    assert name.endswith(f"/text/text.jsonl:{ordinal}")


@pytest.mark.usefixtures("numpy_engine")
def test_its_text_can_go_and_the_run_keeps_its_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    ordinal = random.choice(sorted(first_reads(parent)))
    command = [str(parent), "--document", f"text.jsonl:{ordinal}"]
    unlearned = unlearn(parent, *command[1:])
    assert main(["unlearn", *command, "--erase"]) == 2, "without a terminal, the question needs --yes"
    assert main(["replay", str(parent)]) == 0
    assert main(["unlearn", *command, "--erase", "--yes"]) == 0
    assert main(["replay", str(unlearned)]) == 0
    assert main(["replay", str(parent)]) == 4
    scratch = masked_from_the_start(parent, [ordinal], "scratch")
    assert chain(scratch) == chain(unlearned), "its content changes no bit"
    capsys.readouterr()
    assert main(["unlearn", *command, "--plan"]) == 0
    assert "erased already" in capsys.readouterr().out


@pytest.mark.usefixtures("numpy_engine")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "No document is named"),
        (["--document", "text.jsonl"], "names no document"),
        (["--document", "text.jsonl:600"], "reads no record 600"),
        (["--list", "missing.txt"], "The list cannot be read"),
        (["--document", "text.jsonl:3", "--key", "missing.pem"], "missing.pem"),
        (["--document", "text.jsonl:3", "--search", "missing"], "There is no such folder"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    assert main(["unlearn", str(parent), *words]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in parent.parent.iterdir()] == [parent.name]


@pytest.mark.usefixtures("numpy_engine")
def test_documents_that_cannot_be_masked_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, ["data.document_mask=false"])).run_directory
    assert main(["unlearn", str(parent), "--document", "text.jsonl:3"]) == 2
    assert "data.document_mask=false" in " ".join(capsys.readouterr().err.split())


def loss_of(model: vorox.Model, text: str) -> float:
    """Mean cross entropy of a text's bytes, computed from the logits."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    logits = model.forward(ids[None, :-1]).detach().double().log_softmax(-1)[0]
    return -float(logits[np.arange(len(ids) - 1), ids[1:].astype(np.int64)].mean())


def test_a_canary_is_as_unlikely_as_those_never_seen(tmp_path: Path) -> None:
    """A text of random letters, read often enough to be known; 50 others of its kind are the comparison."""
    letters = "abcdefghijklmnopqrstuvwxyz"

    def canary() -> str:
        return "the secret is " + "".join(random.choices(letters, k=40))

    texts = [" ".join(random.choices(tiny_runs.WORDS, k=random.randint(5, 30))) for _ in range(30)]
    texts[11] = canary()
    write_texts(tmp_path, texts)
    overrides = [
        *EVERY_DOCUMENT, "data.sequence_length_tokens=64", "model.hidden_size=64", "train.num_steps=150",
        "train.global_batch_sequences=8", "train.micro_batch_sequences=8", "checkpoint.every_steps=50",
        "runtime.device=cpu",
    ]  # fmt: skip
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, overrides)).run_directory
    unlearned = unlearn(parent, "--document", "text.jsonl:11")
    never_seen = [canary() for _ in range(50)]
    for run, is_known in ((parent, True), (unlearned, False)):
        model = vorox.load_model(str(run))
        losses = sorted(loss_of(model, text) for text in never_seen)
        found = loss_of(model, texts[11])
        margin = statistics.stdev(losses)
        assert (found < losses[0] - margin) == is_known
        assert is_known or losses[0] <= found <= losses[-1] or abs(found - statistics.mean(losses)) < 4 * margin
