"""Signed checkpoints: openssl verifies what Vorox signs, and every change since then is found and named."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.batch import Progress
from vorox.core.errors import CheckpointError, DataError
from vorox.core.files import atomic
from vorox.core.files.staged_directory import hash_file
from vorox.core.run_layout import RunLayout
from vorox.records.replay_chain import StateChain, link, read_chain, read_states
from vorox.training.checkpoints.signature import (
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    load_private_key,
    load_public_key,
    sign_checkpoint,
    verify_signature,
)

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def openssl(*words: str | Path) -> str:
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints, and keys of two kinds by openssl."""
    directory = tmp_path_factory.mktemp("signed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_runs.use_numpy_engine(monkeypatch)
        tiny_runs.run(tiny_runs.configuration(directory))
    openssl("genpkey", "-algorithm", "ed25519", "-out", directory / "ed25519.pem")
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", directory / "ecdsa.pem")
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384", "-out", directory / "p384.pem")
    for name in ("ed25519", "ecdsa"):
        openssl("pkey", "-in", directory / f"{name}.pem", "-pubout", "-out", directory / f"{name}.pub")
    return directory


@pytest.fixture
def place(signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(signed, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def run_of(place: Path) -> Path:
    (run,) = (path for path in (place / "runs").iterdir() if path.is_dir())
    return run


@pytest.mark.parametrize("kind", ["ed25519", pytest.param("ecdsa", marks=pytest.mark.slow)])
def test_openssl_verifies_a_signature_and_its_digests(kind: str, place: Path, tmp_path: Path) -> None:
    assert main(["checkpoints", "sign", "tiny", "--key", f"{kind}.pem"]) == 0
    assert main(["checkpoints", "verify", "tiny", "--public-key", f"{kind}.pub"]) == 0
    layout = RunLayout(run_of(place))
    envelope: dict[str, Any] = json.loads(layout.signature(12).read_text())
    payload, kind_of = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    assert kind_of == "application/vnd.in-toto+json"
    (tmp_path / "message").write_bytes(f"DSSEv1 {len(kind_of)} {kind_of} {len(payload)} ".encode() + payload)
    (tmp_path / "signature").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    checked = ("-in", tmp_path / "message", "-sigfile", tmp_path / "signature")
    digest = ("-rawin",) if kind == "ed25519" else ("-rawin", "-digest", "sha256")
    said = openssl("pkeyutl", "-verify", "-pubin", "-inkey", f"{kind}.pub", *digest, *checked)
    assert "Verified Successfully" in said
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    files = {path.name: path for path in layout.checkpoint(12).rglob("*") if path.is_file()}
    expected = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == expected
    chain = [json.loads(line) for line in layout.chain.read_text().splitlines()]
    head = next(entry["chain"] for entry in reversed(chain) if entry.get("step") == 12)
    states = json.loads(layout.states.read_text().splitlines()[-1])
    assert (states["step"], states["chain"]) == (12, head)
    assert statement["predicate"] == {"run": run_of(place).name, "step": 12, "chain": head, "states": states["states"]}


def forge_weights(run: Path) -> None:
    """Change a file together with the manifest and its hash, as a forger would."""
    checkpoint = RunLayout(run).checkpoint(12)
    body = json.loads((checkpoint / "MANIFEST.json").read_text())
    files = body["files"]
    name = max(files, key=lambda name: files[name]["size_bytes"])
    data = bytearray((checkpoint / name).read_bytes())
    data[-1] ^= 1
    (checkpoint / name).write_bytes(data)
    files[name]["xxh3_128"] = hash_file(checkpoint / name).xxh3_128
    rehash(checkpoint, body)


def change_signature(run: Path) -> None:
    path = RunLayout(run).signature(12)
    envelope = json.loads(path.read_text())
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["predicate"]["step"] = 8
    envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    path.write_text(json.dumps(envelope))


def edit_chain(run: Path, edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Edit the lines of the chain; ``None`` removes one."""
    path = RunLayout(run).chain
    edited = [edit(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_bytes(b"".join(atomic.canonical_json(line) + b"\n" for line in edited if line is not None))


def forge_behind_gaps(line: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the line before each signed step, and write any loss and batch into the signed step's line."""
    if line["step"] % 4 == 3:
        return None
    return line | {"loss": "3f1a36e2eb1c432d", "batch": "0" * 64} if line["step"] % 4 == 0 else line


def forge_everything_behind_a_gap(line: dict[str, Any]) -> dict[str, Any] | None:
    return {1: None}.get(line["step"] % 4, line | {"loss": "3f1a36e2eb1c432d"} if line["step"] % 4 else line)


def add_file(run: Path) -> None:
    """Add a file together with its line in the manifest."""
    checkpoint = RunLayout(run).checkpoint(12)
    (checkpoint / "part.py").write_text("x = 1\n")
    body = json.loads((checkpoint / "MANIFEST.json").read_text())
    body["files"]["part.py"] = asdict(hash_file(checkpoint / "part.py"))
    rehash(checkpoint, body)


def rehash(checkpoint: Path, body: dict[str, Any]) -> None:
    body.pop("sha256", None)
    body["sha256"] = hashlib.sha256(atomic.canonical_json(body)).hexdigest()
    (checkpoint / "MANIFEST.json").write_bytes(atomic.pretty_json(body))


CHAIN_FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any] | None], str]] = {
    "a changed loss": (
        lambda line: line | {"loss": "4" + "0" * 15} if line["step"] == 5 else line,
        "step 5 is changed",
    ),
    "losses behind gaps": (forge_behind_gaps, "step 3 is not recorded"),
    "everything behind gaps": (forge_everything_behind_a_gap, "step 1 is not recorded"),
    "missing steps": (lambda line: None if line["step"] in (6, 7) else line, "steps 6 to 7 are not recorded"),
    "signed steps alone": (lambda line: line if line["step"] % 4 == 0 else None, "steps 1 to 3 are not recorded"),
    "no first step": (lambda line: None if line["step"] == 1 else line, "step 1 is not recorded"),
    "an end before the signed step": (lambda line: None if line["step"] > 10 else line, "11 to 12 are not recorded"),
    "nothing": (lambda _: None, "steps 1 to 12 are not recorded"),
}
"""Forgeries of the replay chain, and the report of the first damage."""


@pytest.mark.parametrize("forgery", CHAIN_FORGERIES)
def test_a_chain_with_changed_or_missing_links_is_neither_verified_nor_signed(
    forgery: str, signed: Path, tmp_path: Path
) -> None:
    from vorox.training.checkpoints.signature import (
        load_private_key,
        load_public_key,
        sign_checkpoint,
        verify_signature,
    )

    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    key = load_private_key(signed / "ed25519.pem")
    sign_checkpoint(run, 12, key)
    verify_signature(run, 12, load_public_key(signed / "ed25519.pub"))
    edit, said = CHAIN_FORGERIES[forgery]
    edit_chain(run, edit)
    with pytest.raises(CheckpointError, match=said):
        verify_signature(run, 12, load_public_key(signed / "ed25519.pub"))
    with pytest.raises(CheckpointError, match=said):
        sign_checkpoint(run, 12, key)


def test_an_intact_chain_of_other_numbers_does_not_verify(signed: Path, tmp_path: Path) -> None:
    """Every link follows from the one before it, but the head is not the signed one."""
    from vorox.training.checkpoints.signature import (
        load_private_key,
        load_public_key,
        sign_checkpoint,
        verify_signature,
    )

    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    sign_checkpoint(run, 12, load_private_key(signed / "ed25519.pem"))
    head = ""

    def relink(line: dict[str, Any]) -> dict[str, Any]:
        nonlocal head
        loss = "3f1a36e2eb1c432d" if line["step"] == 5 else line["loss"]
        head = link(head, line["step"], line["batch"], loss, line["grad_norm"])
        return line | {"loss": loss, "chain": head}

    edit_chain(run, relink)
    with pytest.raises(CheckpointError, match="differs from the checkpoint at step 12"):
        verify_signature(run, 12, load_public_key(signed / "ed25519.pub"))


def other_states(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Another state after step 4, whose checkpoint need not exist, and links that follow from it."""
    head, lines = "", [line | {"state": "0" * 64} if line["step"] == 4 else line for line in lines]
    for line in lines:
        content = atomic.canonical_json([head, line["step"], line["chain"], line["state"]])
        line["states"] = head = hashlib.blake2b(content, digest_size=32).hexdigest()
    return lines


@pytest.mark.parametrize(
    ("forge", "error", "said"),
    [
        (other_states, CheckpointError, "chain of states differs from the checkpoint at step 12"),
        (lambda lines: lines[:-1], CheckpointError, "chain of states differs from the checkpoint at step 12"),
        (lambda lines: lines[1:], DataError, "State of step 8 does not follow"),
        (lambda _: [], CheckpointError, "chain of states differs from the checkpoint at step 12"),
    ],
    ids=["another state, linked", "without the last", "without the first", "nothing"],
)
def test_a_signature_covers_the_states_before_it(
    forge: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], error: type[Exception], said: str,
    signed: Path, tmp_path: Path,
) -> None:  # fmt: skip
    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    path, public = RunLayout(run).states, load_public_key(signed / "ed25519.pub")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]
    sign_checkpoint(run, 12, load_private_key(signed / "ed25519.pem"))
    verify_signature(run, 12, public)
    path.write_bytes(b"".join(atomic.canonical_json(line) + b"\n" for line in forge(lines)))
    with pytest.raises(error, match=said):
        verify_signature(run, 12, public)


def test_a_signature_belongs_to_its_run(signed: Path, tmp_path: Path) -> None:
    from vorox.training.checkpoints.signature import (
        load_private_key,
        load_public_key,
        sign_checkpoint,
        verify_signature,
    )

    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    sign_checkpoint(run, 12, load_private_key(signed / "ed25519.pem"))
    renamed = run.rename(tmp_path / "another")
    with pytest.raises(
        CheckpointError, match=f"for run {run.name}, but this directory is another: it was renamed"
    ) as bad:
        verify_signature(renamed, 12, load_public_key(signed / "ed25519.pub"))
    assert bad.value.hint.endswith(f"give it its old name: mv {renamed} {run}")
    layout = RunLayout(renamed.rename(run))
    layout.signature(12).rename(layout.signature(8))
    with pytest.raises(CheckpointError, match="is for step 12 of run"):
        verify_signature(run, 8, load_public_key(signed / "ed25519.pub"))


def test_a_statement_of_another_type_is_no_signature_of_a_checkpoint(signed: Path, tmp_path: Path) -> None:
    """The key's owner may sign other statements: their type is part of what is signed (DSSE)."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from vorox.training.checkpoints.signature import (
        load_private_key,
        load_public_key,
        sign_checkpoint,
        verify_signature,
    )

    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    sign_checkpoint(run, 12, load_private_key(signed / "ed25519.pem"))
    path = RunLayout(run).signature(12)
    envelope = json.loads(path.read_text())
    payload, kind = base64.b64decode(envelope["payload"]), "application/vnd.example+json"
    key: Any = load_pem_private_key((signed / "ed25519.pem").read_bytes(), None)
    message = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    envelope |= {"payloadType": kind}
    envelope["signatures"][0]["sig"] = base64.b64encode(key.sign(message)).decode()
    path.write_text(json.dumps(envelope))
    with pytest.raises(CheckpointError, match="not for a checkpoint"):
        verify_signature(run, 12, load_public_key(signed / "ed25519.pub"))


BODIES: dict[str, Any] = {
    "type no text": {"payloadType": 5, "payload": "", "signatures": []},
    "no type": {"payloadType": None, "payload": "", "signatures": []},
    "lone surrogate": {"payloadType": "\ud800", "payload": "", "signatures": []},
    "signatures of texts": {"payloadType": "a", "payload": "", "signatures": ["a"]},
    "signature of a number": {"payloadType": "a", "payload": "", "signatures": [{"sig": 5}]},
    "payload of a list": {"payloadType": "a", "payload": [], "signatures": []},
}
STATEMENTS: dict[str, Any] = {
    "no predicate": {"subject": []},
    "predicate of a list": {"subject": [], "predicate": []},
    "no states": {"subject": [], "predicate": {"run": "a", "step": 12, "chain": ""}},
    "subject without names": {"subject": [{}], "predicate": {"run": "a", "step": 12, "chain": "", "states": ""}},
    "run of two folders": {"subject": [], "predicate": {"run": "a/b", "step": 12, "chain": "", "states": ""}},
}


@pytest.mark.parametrize("name", [*BODIES, *STATEMENTS])
def test_a_signature_of_another_form_is_refused(name: str, signed: Path, tmp_path: Path) -> None:
    """Even one that the key signed."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    envelope = BODIES.get(name)
    if envelope is None:
        payload = json.dumps(STATEMENTS[name] | {"predicateType": PREDICATE_TYPE}).encode()
        key: Any = load_pem_private_key((signed / "ed25519.pem").read_bytes(), None)
        message = f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload
        body, signature = (base64.b64encode(data).decode() for data in (payload, key.sign(message)))
        envelope = {"payloadType": PAYLOAD_TYPE, "payload": body, "signatures": [{"sig": signature}]}
    path = RunLayout(run).signature(12)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(envelope))
    with pytest.raises(CheckpointError, match=r"damaged|lacks what|is for run a/b"):
        verify_signature(run, 12, load_public_key(signed / "ed25519.pub"))


def test_a_state_after_the_signature_decides_nothing(signed: Path, tmp_path: Path) -> None:
    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    key, public = load_private_key(signed / "ed25519.pem"), load_public_key(signed / "ed25519.pub")
    path = RunLayout(run).states
    sign_checkpoint(run, 8, key)
    *before, last = path.read_text().splitlines()
    path.write_text("\n".join([*before, last.replace('"step":12', '"step":13')]) + "\n")
    verify_signature(run, 8, public)
    with pytest.raises(DataError, match="does not follow"):
        read_states(run)


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_a_chain_of_states_that_is_no_file_is_told_with_its_place(kind: str, signed: Path, tmp_path: Path) -> None:
    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    path = RunLayout(run).states
    state = json.loads((RunLayout(run).checkpoint(12) / "state.json").read_text())
    progress = Progress.from_json(state["progress"])
    path.unlink()
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    with pytest.raises(DataError, match="Chain of states cannot be read") as caught:
        read_states(run)
    assert caught.value.where == str(path)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        StateChain(run, 12).record(progress, "cd")


def test_later_versions_may_add_fields_to_the_lines_of_both_chains(signed: Path, tmp_path: Path) -> None:
    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    before = read_chain(run), read_states(run)
    for path in (RunLayout(run).chain, RunLayout(run).states):
        lines = [json.loads(line) | {"added": [1]} for line in path.read_text().splitlines()]
        path.write_bytes(b"".join(atomic.canonical_json(line) + b"\n" for line in lines))
    assert (read_chain(run), read_states(run)) == before


def test_an_added_file_is_named_by_the_signature_alone(signed: Path, tmp_path: Path) -> None:
    run = tmp_path / run_of(signed).name
    shutil.copytree(run_of(signed), run)
    sign_checkpoint(run, 12, load_private_key(signed / "ed25519.pem"))
    (RunLayout(run).checkpoint(12) / "part.py").touch()
    with pytest.raises(CheckpointError, match=r"part\.py was added since step 12"):
        verify_signature(run, 12, load_public_key(signed / "ed25519.pub"))


def test_removal_of_the_newest_signed_checkpoint_is_noticed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "sign", "tiny", "--key", "ed25519.pem"]) == 0
    layout = RunLayout(run_of(place))
    verify = ["checkpoints", "verify", "tiny", "--public-key", "ed25519.pub"]
    assert main(verify) == 0
    hidden = layout.checkpoint(12).rename(layout.checkpoint(12).with_name("step-00000012.corrupt-1"))
    capsys.readouterr()
    assert main(verify) == 5
    assert "newest signed checkpoint, of step 12, is missing" in capsys.readouterr().err
    assert main([*verify, "--step", "8"]) == 0  # of this one alone, nothing is missing
    hidden.rename(layout.checkpoint(12))
    assert main(["checkpoints", "remove", "tiny", "12", "--yes"]) == 0  # our own removal takes the signature along
    assert main(verify) == 0


FAULTS = {
    "weights": (forge_weights, "has changed since step 12 was signed"),
    "added file": (lambda run: (RunLayout(run).checkpoint(12) / "x").touch(), "not in the manifest"),
    "added and listed file": (add_file, "part.py was added since step 12 was signed"),
    "no signature": (lambda run: RunLayout(run).signature(12).unlink(), "is not signed"),
    "changed statement": (change_signature, "not by this key, or was changed"),
    "signature of another step": (
        lambda run: shutil.copy(RunLayout(run).signature(8), RunLayout(run).signature(12)), "is for step 8 of run"
    ),
    "damaged signature": (lambda run: RunLayout(run).signature(12).write_text("{"), "signature file is damaged"),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault", ["weights", *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS if fault != "weights")]
)
def test_a_change_since_the_signature_is_named(fault: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "sign", "tiny", "--key", "ed25519.pem"]) == 0
    action, said = FAULTS[fault]
    action(run_of(place))
    capsys.readouterr()
    assert main(["checkpoints", "verify", "tiny", "--step", "12", "--public-key", "ed25519.pub"]) == 5
    assert said in "".join(capsys.readouterr())


@pytest.mark.slow
def test_wrong_keys_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "sign", "tiny", "--key", "ed25519.pem", "--step", "12"]) == 0
    openssl("pkey", "-in", "ed25519.pem", "-aes128", "-passout", "pass:x", "-out", "encrypted.pem")
    refused = {
        ("verify", "--step", "12", "--public-key", "ecdsa.pub"): (5, "not by this key"),
        ("verify", "--step", "12", "--public-key", "tiny.yaml"): (2, "has no public key"),
        ("sign", "--key", "ed25519.pub"): (2, "has no private key"),
        ("sign", "--key", "p384.pem"): (2, "of another kind"),
        ("sign", "--key", "encrypted.pem"): (2, "is encrypted"),
        ("sign", "--key", "none.pem"): (2, "cannot be read"),
        ("sign", "--key", "ed25519.pem", "--step", "3"): (2, "No checkpoint of step 3"),
    }
    for (command, *options), (code, said) in refused.items():
        capsys.readouterr()
        assert main(["checkpoints", command, "tiny", *options]) == code
        assert said in capsys.readouterr().err
