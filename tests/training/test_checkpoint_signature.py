"""Signed checkpoints: openssl verifies what Vorox signs, and every change since then is found and named."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core import atomic
from vorox.core.run_layout import RunLayout
from vorox.core.staged_directory import hash_file

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


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
    assert statement["predicate"] == {"run": run_of(place).name, "step": 12, "chain": head}


def forge_weights(run: Path) -> None:
    """Change a file together with the manifest and its hash, as a forger would."""
    checkpoint = RunLayout(run).checkpoint(12)
    manifest = checkpoint / "MANIFEST.json"
    body = json.loads(manifest.read_text())
    files = body["files"]
    name = max(files, key=lambda name: files[name]["size_bytes"])
    data = bytearray((checkpoint / name).read_bytes())
    data[-1] ^= 1
    (checkpoint / name).write_bytes(data)
    files[name]["xxh3_128"] = hash_file(checkpoint / name).xxh3_128
    del body["sha256"]
    body["sha256"] = hashlib.sha256(atomic.canonical_json(body)).hexdigest()
    manifest.write_bytes(atomic.pretty_json(body))


def change_signature(run: Path) -> None:
    path = RunLayout(run).signature(12)
    envelope = json.loads(path.read_text())
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["predicate"]["step"] = 8
    envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    path.write_text(json.dumps(envelope))


def change_chain(run: Path) -> None:
    path = RunLayout(run).chain
    lines = path.read_text().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if json.loads(line).get("step") == 5)
    entry = json.loads(lines[number])
    lines[number] = json.dumps(entry | {"loss": "4000000000000000"}) + "\n"
    path.write_text("".join(lines))


FAULTS = {
    "weights": (forge_weights, "has changed since step 12 was signed"),
    "added file": (lambda run: (RunLayout(run).checkpoint(12) / "x").touch(), "not in the manifest"),
    "no signature": (lambda run: RunLayout(run).signature(12).unlink(), "is not signed"),
    "changed statement": (change_signature, "not by this key, or was changed"),
    "signature of another step": (
        lambda run: shutil.copy(RunLayout(run).signature(8), RunLayout(run).signature(12)), "is for step 8 of run"
    ),
    "damaged signature": (lambda run: RunLayout(run).signature(12).write_text("{"), "signature file is damaged"),
    "chain": (change_chain, "replay chain differs"),
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
