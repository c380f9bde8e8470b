"""Passports: the validators of the standards accept them, and every figure equals a count by the test itself."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import lzma
import math
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

import tiny_runs
import vorox
from training.test_training_record import documents_of, write_source
from vorox.cli import main
from vorox.core.run_layout import step_directories
from vorox.experiments.task_results import checkpoint_sha256, record_task_results

for package in ("cyclonedx", "mlcroissant", "spdx_python_model", "model_signing", "huggingface_hub", "jsonschema"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
    pytest.mark.filterwarnings("ignore:ConjunctiveGraph is deprecated:DeprecationWarning"),  # mlcroissant reads by it
]

SCHEMAS, PAGE = Path(__file__).parents[1] / "schemas", Path(__file__).parents[2] / "docs" / "passports.md"
STEPS, SAVED = 20, 8
DOCUMENTS = {"README.md", "bom.cdx.json", "croissant.json", "model.spdx.json"}
HOSTILE_FILE = "b <img src=x onerror=alert(1)> |`*_[a](javascript:b)\x1b[31m\u202e$x$.jsonl"
HOSTILE = (
    '</td></table>\n---\nlicense: mit\n# Title\n![a](http://b)<script>alert("1")</script>'
    '`` | {"@id": "x"} \x00\x1b[2J\u202e ${a} \\'
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may open a connection or look a name up."""

    def refuse(*arguments: object, **_: object) -> Any:
        raise AssertionError(f"the network is used: {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@dataclass(frozen=True)
class Trained:
    """A run of a mixture of two sources, some rows twice; one file has a hostile name."""

    directory: Path
    corpora: Path
    tokens_by_step: dict[int, Counter[tuple[str, str, int]]]

    def count(self, step: int) -> dict[str, tuple[int, int]]:
        """Tokens and documents of each source up to a step, from the batches alone."""
        total = sum((self.tokens_by_step[known] for known in range(1, step + 1)), Counter[tuple[str, str, int]]())
        return {
            name: (
                sum(tokens for document, tokens in total.items() if document[0] == name),
                sum(document[0] == name for document in total),
            )
            for name in ("web", "notes")
        }

    def file_of(self, name: str, file: str) -> Path:
        return self.corpora / name / (HOSTILE_FILE if (name, file) == ("web", "b.jsonl") else file)


def settings(corpora: Path, *more: str) -> list[str]:
    sources: list[dict[str, Any]] = [
        {"name": name, "format": "jsonl", "paths": [str(corpora / name)], "weight": weight, "bad_record_fraction": 0.5}
        for name, weight in (("web", "2/3"), ("notes", "1/3"))
    ]
    sources[0]["transforms"] = [{"name": "length", "args": {"min_characters": 8}}]
    return [
        f"data.sources={json.dumps(sources)}", "data.sequence_length_tokens=64", "data.document_mask=false",
        f"train.num_steps={STEPS}", "eval.every_steps=null", "data.validation.held_out_fraction=0",
        f"checkpoint.every_steps={SAVED}", "checkpoint.keep_last=9", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("passport")
    chooser = random.Random()
    for name in ("web", "notes"):
        write_source(directory / "corpora" / name, name, chooser)
    (directory / "corpora" / "web" / "b.jsonl").rename(directory / "corpora" / "web" / HOSTILE_FILE)
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        config = tiny_runs.configuration(directory, settings(directory / "corpora"))
        run_directory = tiny_runs.run(config).run_directory
    with vorox.open_run(run_directory) as run:
        tokens = {batch.step: documents_of(batch) for batch in run.batches(1, STEPS)}
    for kind, name in (("EC", "ecdsa"), ("EC", "other"), ("ED25519", "ed25519")):
        curve = ["-pkeyopt", "ec_paramgen_curve:P-256"] if kind == "EC" else []
        openssl("genpkey", "-algorithm", kind, *curve, "-out", directory / f"{name}.pem")
        openssl("pkey", "-in", directory / f"{name}.pem", "-pubout", "-out", directory / f"{name}.pub")
    return Trained(run_directory, directory / "corpora", tokens)


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def export(run: Path | str, target: Path, *words: str, code: int = 0) -> Path:
    assert main(["export", str(run), "--passport", "--output", str(target), *words]) == code
    return target


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {one["name"].removeprefix("vorox:"): one["value"] for one in component["properties"]}


def load(directory: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], str]:
    """Bill of materials, description of the data, elements of SPDX, and card."""
    bom, data, spdx = (json.loads((directory / name).read_bytes()) for name in sorted(DOCUMENTS)[1:])
    return bom, data, spdx["@graph"], (directory / "README.md").read_text(encoding="utf-8")


def validate(directory: Path) -> None:
    """Let the standards' own validators read all documents; SPDX by its bindings, which check types and counts."""
    import mlcroissant
    import spdx_python_model
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from huggingface_hub import ModelCard
    from jsonschema import Draft7Validator
    from rfc3986_validator import validate_rfc3986

    @Draft7Validator.FORMAT_CHECKER.checks("iri-reference")  # jsonschema's own check needs rfc3987-syntax
    def is_reference(value: object) -> bool:
        return not isinstance(value, str) or validate_rfc3986(value, rule="URI_reference") is not None

    bom = (directory / "bom.cdx.json").read_text(encoding="utf-8")
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(bom) is None
    astray = {**json.loads(bom), "externalReferences": [{"type": "website", "url": "not a reference"}]}
    assert validator.validate_str(json.dumps(astray)) is not None
    assert not mlcroissant.Dataset(jsonld=directory / "croissant.json").metadata.ctx.issues.errors
    _, objects = spdx_python_model.load(directory / "model.spdx.json")
    assert not objects.missing_ids
    card = ModelCard.load(directory / "README.md")
    assert "vorox" in (card.data.tags or [])
    assert card.text.lstrip().startswith("# ")


@pytest.mark.parametrize("step", [SAVED, STEPS])
def test_every_figure_equals_a_recount(trained: Trained, tmp_path: Path, step: int) -> None:
    import mlcroissant

    target = export(trained.directory, tmp_path / "passport", "--step", str(step))
    assert {path.name for path in target.iterdir()} == DOCUMENTS | {"MANIFEST.json"}
    validate(target)
    bom, data, elements, card = load(target)
    counted, checkpoint = trained.count(step), step_directories(trained.directory)[step]
    assert min(tokens for tokens, _ in counted.values()) > 0

    sources = {one["name"]: properties(one) for one in bom["components"] if one["type"] == "data"}
    packages = [one for one in elements if one["type"] == "dataset_DatasetPackage"]
    described = {one["name"]: one["comment"] for one in packages}
    dataset = mlcroissant.Dataset(jsonld=target / "croissant.json")
    records = {one["sources/name"]: one for one in dataset.records("sources")}
    total = sum(tokens for tokens, _ in counted.values())
    for name, (tokens, documents) in counted.items():
        assert (int(sources[name]["tokens"]), int(sources[name]["documents"])) == (tokens, documents)
        assert float(sources[name]["share"]) == pytest.approx(tokens / total, rel=1e-12)
        assert (records[name]["sources/tokens"], records[name]["sources/documents"]) == (tokens, documents)
        assert f"documents: {documents}\ntokens: {tokens}\n" in described[name]
        assert f"| Tokens with repetitions | {tokens:,} |\n| Distinct tokens" in card.split(f"#### {name}")[1]
    assert int(properties(bom["metadata"]["component"])["training:tokens"]) == total

    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}
    files = bom["metadata"]["component"]["components"]
    assert {one["name"]: one["hashes"][0]["content"] for one in files} == hashes
    named = {one["name"]: one["verifiedUsing"][0]["hashValue"] for one in elements if one["type"] == "software_File"}
    assert named == hashes
    assert all(f"`{digest}`" in card for digest in hashes.values())

    read = {(one["files/source"], one["files/uri"]): one for one in dataset.records("files")}
    of_files: Counter[tuple[str, str]] = Counter()
    for known in range(1, step + 1):
        for (name, file, _), tokens in trained.tokens_by_step[known].items():
            of_files[name, str(trained.file_of(name, file))] += tokens
    assert {key: one["files/tokens"] for key, one in read.items()} == of_files
    assert HOSTILE_FILE in {one["name"] for one in data["distribution"]}
    sizes: Counter[str] = Counter()
    for name, uri in of_files:
        sizes[name] += Path(uri).stat().st_size
    assert {one["name"]: one["dataset_datasetSize"] for one in packages} == sizes
    assert {unquote(one["contentUrl"]): one["sha256"] for one in data["distribution"]} == {
        f"file://{uri}": hashlib.sha256(Path(uri).read_bytes()).hexdigest() for _, uri in of_files
    }


def test_recipe_versions_and_metrics_are_those_on_record(trained: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.directory, run)
    losses = {4: 3.5, SAVED: 2.25, STEPS: 1.5}
    lines = [json.dumps({"loss": loss, "num_target_tokens": 5, "step": step}) for step, loss in losses.items()]
    (run / "evaluations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    checkpoint = step_directories(run)[SAVED]
    record_task_results(run, SAVED, checkpoint_sha256(checkpoint), {"quiz": {"metrics": {"acc": 0.75}}})
    record_task_results(run, STEPS, "another checkpoint", {"quiz": {"metrics": {"acc": 0.125}}})
    bom, _, elements, card = load(export(run, tmp_path / "early", "--step", str(SAVED)))
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    found = properties(bom["metadata"]["component"])
    for section, key in (("optimizer", "lr"), ("train", "num_steps"), ("data", "sequence_length_tokens")):
        assert float(found[f"recipe:{section}.{key}"]) == config[section][key]
    (model,) = [one for one in elements if one["type"] == "ai_AIPackage"]
    settings = {one["key"]: one["value"] for one in model["ai_hyperparameter"]}
    assert {key.removeprefix("recipe:"): value for key, value in found.items() if key.startswith("recipe:")} == settings
    manifest = json.loads((checkpoint / "MANIFEST.json").read_bytes())["metadata"]
    assert (found["fingerprint"], found["tokenizer"]) == (manifest["fingerprint"], manifest["tokenizer"])
    assert found["proof:chain_head"] == manifest["chain"]
    assert f"`{manifest['fingerprint']}`" in card
    libraries = {one["name"]: one["version"] for one in bom["components"] if one["type"] == "library"}
    assert libraries["numpy"] == importlib.metadata.version("numpy")
    assert (libraries["vorox"], libraries["python"]) == (vorox.__version__, sys.version.split()[0])
    analysis = bom["metadata"]["component"]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert {(one["type"], float(one["value"]), one["slice"]) for one in analysis} == {
        ("validation loss", 2.25, "step 8"), ("quiz/acc", 0.75, "step 8"),
    }  # fmt: skip
    assert "| validation loss | 2.25 | 8 |" in card
    late = load(export(run, tmp_path / "late"))[3]
    assert "| validation loss | 1.5 | 20 |" in late
    assert "quiz" not in late, "results of other weights are not of this checkpoint"


def test_what_is_not_known_is_not_invented(trained: Trained, tmp_path: Path) -> None:
    bom, data, elements, card = load(export(trained.directory, tmp_path / "passport"))
    assert not any("licenses" in one for one in bom["components"])
    assert "supplier" not in bom["metadata"]["component"]
    assert "pedigree" not in bom["metadata"]["component"]
    assert {"license", "creator", "publisher", "inLanguage", "datePublished"}.isdisjoint(data)
    assert {one["sources/licence"] for one in data["recordSet"][0]["data"]} == {"not recorded"}
    kinds = {one["type"] for one in elements}
    assert {"Agent", "simplelicensing_LicenseExpression"}.isdisjoint(kinds)
    assert set(yaml.safe_load(card.split("---")[1])) == {"pipeline_tag", "tags"}
    assert "| Licence of the model | not recorded |" in card
    assert "| Provider | not stated |" in card
    assert "Evaluations: not recorded." in card


def test_facts_are_stated(trained: Trained, tmp_path: Path) -> None:
    facts = tmp_path / "facts.yaml"
    stated = {
        "provider": "Example Ltd", "model": "Example 1B", "languages": ["en"],
        "sources": {"web": {"licence": "MIT OR Apache-2.0", "kind": "crawled"}, "notes": {"licence": "ask Anna"}},
    }  # fmt: skip
    facts.write_text(yaml.safe_dump(stated), encoding="utf-8")
    target = export(trained.directory, tmp_path / "passport", "--facts", str(facts))
    validate(target)
    bom, data, elements, card = load(target)
    licences = {one["name"]: one["licenses"] for one in bom["components"] if one["type"] == "data"}
    assert licences == {
        "web": [{"expression": "MIT OR Apache-2.0"}], "notes": [{"license": {"name": "ask Anna"}}],
    }  # fmt: skip
    assert bom["metadata"]["component"]["supplier"] == {"name": "Example Ltd"}
    assert (sorted(data["license"]), data["inLanguage"]) == (["MIT OR Apache-2.0", "ask Anna"], "en")
    by_id = {one["spdxId"]: one for one in elements if "spdxId" in one}
    declared = {
        by_id[one["from"]]["name"]: by_id[one["to"][0]]["simplelicensing_licenseExpression"]
        for one in elements
        if one.get("relationshipType") == "hasDeclaredLicense"
    }
    assert declared == {"web": "MIT OR Apache-2.0"}
    notes = next(one for one in elements if one.get("name") == "notes")
    assert notes["comment"].endswith("licence: ask Anna")
    assert card.split("---")[2].lstrip().startswith("# Example 1B\n")
    assert yaml.safe_load(card.split("---")[1])["language"] == ["en"]


def test_hostile_texts_stay_texts(trained: Trained, tmp_path: Path) -> None:
    from markdown_it import MarkdownIt

    facts = tmp_path / "facts.yaml"
    stated: dict[str, Any] = dict.fromkeys(("provider", "model", "copyright", "other"), HOSTILE)
    stated["sources"] = {"web": {"licence": HOSTILE, "description": HOSTILE, "acquired": HOSTILE}}
    facts.write_text(json.dumps(stated | {"languages": [HOSTILE]}), encoding="utf-8")  # JSON is YAML
    target = export(trained.directory, tmp_path / "passport", "--facts", str(facts))
    validate(target)
    bom, data, elements, _ = load(target)
    assert bom["metadata"]["component"]["name"] == HOSTILE
    assert {one["description"] for one in bom["components"] if "description" in one} == {HOSTILE}
    assert data["name"] == f"Training data of {HOSTILE}"
    assert any(one.get("name") == HOSTILE for one in elements)
    assert all(isinstance(one.get("name", ""), str) for one in elements)
    raw = (target / "README.md").read_text(encoding="utf-8")
    header, text = re.fullmatch(r"---\n(.*?)\n---\n(.*)", raw, re.DOTALL).groups()  # type: ignore[union-attr]
    assert set(yaml.safe_load(header)) == {"language", "pipeline_tag", "tags"}
    assert {character for character in text if unicodedata.category(character) in {"Cc", "Cf"}} == {"\n"}
    html = MarkdownIt("gfm-like", {"html": True}).disable("linkify").render(text)
    assert re.findall(r"<(script|img|a) ", html) == []
    assert html.count("<table>") == html.count("</table>")
    assert html.count("<h1>") == 2, "no line of a text becomes a heading"
    assert "alert(" in html, "the text itself is shown"
    assert "\n---\n" not in text


def family(trained: Trained, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A run that starts from the weights of step 8."""
    tiny_runs.use_numpy_engine(patch)
    weights = step_directories(trained.directory)[SAVED]
    more = [f"train.from_weights={weights}", "train.from_optimizer=true", "train.num_steps=3", "run.name=child"]
    return tiny_runs.run(tiny_runs.configuration(folder, settings(trained.corpora, *more))).run_directory


def test_parent_weights_are_named_with_their_hash(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = family(trained, tmp_path / "child", monkeypatch)
    target = export(child, tmp_path / "passport")
    validate(target)
    bom, _, elements, card = load(target)
    weights = step_directories(trained.directory)[SAVED]
    fingerprint = json.loads((weights / "MANIFEST.json").read_bytes())["metadata"]["fingerprint"]
    (ancestor,) = bom["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor["name"] == str(weights)
    assert properties(ancestor)["checkpoint:0"] == f"{trained.directory.name} step 8 {fingerprint}"
    (edge,) = [one for one in elements if one.get("relationshipType") == "descendantOf"]
    (parent,) = [one for one in elements if one.get("spdxId") == edge["to"][0]]
    assert parent["name"] == str(weights)
    assert f"step 8 {fingerprint}" in parent["comment"]
    assert f"| Checkpoint | `{trained.directory.name}`, step 8 |" in card
    assert "base_model" not in yaml.safe_load(card.split("---")[1]), "a path is no repository of the Hub"


def test_an_unfinished_run(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.at_step(monkeypatch, SAVED + 3, tiny_runs.kill)
    config = tiny_runs.configuration(tmp_path, settings(trained.corpora, f"run.name={json.dumps(HOSTILE)}"))
    with pytest.raises(tiny_runs.Killed):
        tiny_runs.run(config)
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    target = export(run, tmp_path / "passport")
    validate(target)
    bom, _, _, card = load(target)
    assert properties(bom["metadata"]["component"])["step"] == str(SAVED)
    assert "| Steps | 8 applied," in card


def test_two_passports_have_the_same_bytes_and_a_repeated_one_changes_nothing(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (export(trained.directory, tmp_path / name) for name in ("first", "second"))
    content = {path.name: path.read_bytes() for path in first.iterdir()}
    assert content == {path.name: path.read_bytes() for path in second.iterdir()}
    times = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    capsys.readouterr()
    export(trained.directory, first, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["existed"], found["step"], set(found["passport"])) == (True, STEPS, DOCUMENTS)
    assert times == {path: path.stat().st_mtime_ns for path in first.iterdir()}
    export(trained.directory, first, "--step", str(SAVED), code=2)
    assert times == {path: path.stat().st_mtime_ns for path in first.iterdir()}


@pytest.mark.slow
def test_the_commands_of_the_page(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but that of an exported model, which ``test_an_export_of_torch_travels_with_its_passport`` runs."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained.directory, tmp_path / "runs" / "my-run-1a2b3c4d")
    for name in ("pem", "pub"):
        shutil.copy(trained.corpora.parent / f"ecdsa.{name}", f"key.{name}")
    Path("facts.yaml").write_text("provider: Example Ltd", encoding="utf-8")
    commands = re.findall(
        r"^\$ ((?:vorox|model_signing|mlcroissant) .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(commands) == 5
    for command in commands:
        program, *words = shlex.split(command, comments=True)
        if program == "vorox" and "--to" not in words:
            assert main(words) == 0, command
        elif program == "model_signing":
            assert subprocess.run([sys.executable, "-m", program, *words]).returncode == 0, command
        elif program == "mlcroissant":
            program = str(Path(sys.executable).with_name(program))
            assert subprocess.run([program, *words]).returncode == 0, command
    default = tmp_path / "runs" / "my-run-1a2b3c4d" / "export" / "passport-step-00000020"
    validate(default)
    named = set(re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {path.name for path in Path("passport").iterdir()} == named | {"MANIFEST.json"}


@pytest.fixture
def signed(trained: Trained, tmp_path: Path) -> Path:
    keys = trained.corpora.parent
    return export(trained.directory, tmp_path / "signed", "--key", str(keys / "ecdsa.pem"))


def verifies(directory: Path, public_key: Path) -> bool:
    from model_signing import verifying

    verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    try:
        verifier.verify(directory, directory / "model.sig")
    except Exception:
        return False
    return True


def test_one_changed_byte_is_found_without_the_run(trained: Trained, signed: Path) -> None:
    keys, chooser = trained.corpora.parent, random.Random()
    command = [
        sys.executable, "-m", "model_signing", "verify", "key", signed, "--signature", signed / "model.sig",
        "--public_key", keys / "ecdsa.pub",
    ]  # fmt: skip
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert not verifies(signed, keys / "other.pub")
    files = sorted(path for path in signed.iterdir())
    assert {path.name for path in files} == DOCUMENTS | {"MANIFEST.json", "model.sig"}
    for path in files:
        content = bytearray(path.read_bytes())
        position = chooser.randrange(len(content))
        if path.name == "model.sig":  # a byte of what is signed; JSON around it may have another layout
            inner = json.loads(content)
            payload = bytearray(base64.b64decode(inner["dsseEnvelope"]["payload"]))
            payload[chooser.randrange(len(payload))] ^= 1 << chooser.randrange(8)
            inner["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
            changed = json.dumps(inner).encode()
        else:
            content[position] ^= 1 << chooser.randrange(8)
            changed = bytes(content)
        original = path.read_bytes()
        path.write_bytes(changed)
        assert not verifies(signed, keys / "ecdsa.pub"), (path.name, position)
        path.write_bytes(original)
    (signed / "added.txt").write_text("more")
    assert not verifies(signed, keys / "ecdsa.pub")
    (signed / "added.txt").unlink()
    (signed / "README.md").unlink()
    assert not verifies(signed, keys / "ecdsa.pub")


def test_a_signature_is_repeated_only_by_its_key(
    trained: Trained, signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, before = trained.corpora.parent, (signed / "model.sig").read_bytes()
    export(trained.directory, signed, "--key", str(keys / "ecdsa.pem"))
    export(trained.directory, signed)
    export(trained.directory, signed, "--key", str(keys / "other.pem"), code=2)
    assert "not of this key" in capsys.readouterr().err
    assert (signed / "model.sig").read_bytes() == before
    assert not [path for path in signed.parent.iterdir() if path.name.startswith(".")], "nothing temporary is left"


def test_signatures_of_the_run_are_named(trained: Trained, tmp_path: Path) -> None:
    run, key = tmp_path / trained.directory.name, trained.corpora.parent / "ecdsa.pem"
    shutil.copytree(trained.directory, run)
    assert main(["checkpoints", "sign", str(run), "--key", str(key)]) == 0
    der = subprocess.run(
        ["openssl", "pkey", "-in", key, "-pubout", "-outform", "DER"], check=True, capture_output=True
    ).stdout
    bom, _, elements, card = load(export(run, tmp_path / "passport"))
    key_id = hashlib.sha256(der).hexdigest()
    assert properties(bom["metadata"]["component"])["signed_by:0"] == key_id
    assert f"| Signed in the run by key | `{key_id}` |" in card
    assert any(f"signed_by.0: {key_id}" in one.get("comment", "") for one in elements)
    (run / "signatures" / f"step-{STEPS:08d}.json").write_text('{"signatures": 3}')
    assert main(["export", str(run), "--passport", "--output", str(tmp_path / "damaged")]) != 0
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--passport", "--check"], 2, "--to hf"),
        (["--passport", "--dtype", "bf16"], 2, "--to hf"),
        (["--passport", "--weights", "ema"], 2, "--to hf"),
        (["--facts", "facts.yaml"], 2, "--passport"),
        (["--passport", "--facts", "none.yaml"], 2, "none.yaml"),
        (["--passport", "--step", "999"], 2, "999"),
        (["--passport", "--key", "none.pem"], 2, "none.pem"),
        (["--passport", "--key", "{keys}/ed25519.pem"], 2, "P-256"),
        (["--passport", "--key", "{keys}/ecdsa.pub"], 2, "no private key"),
    ],
)
def test_what_makes_no_sense_is_refused(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, named: str
) -> None:
    words = [word.format(keys=trained.corpora.parent) for word in words]
    target = tmp_path / "target"
    assert main(["export", str(trained.directory), "--output", str(target), *words]) == code
    assert named in capsys.readouterr().err
    assert not [*tmp_path.iterdir()], "nothing is written"


def test_a_run_without_its_cache_has_no_passport(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = trained.corpora.parent / "cache"
    cache.rename(cache.with_name("moved"))
    try:
        export(trained.directory, tmp_path / "passport", code=4)
    finally:
        cache.with_name("moved").rename(cache)
    assert "cache" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "package", ["cyclonedx", "mlcroissant", "spdx_python_model", "huggingface_hub", "model_signing"]
)
def test_a_missing_package_is_named_before_any_work(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    export(trained.directory, tmp_path / "passport", "--key", str(trained.corpora.parent / "ecdsa.pem"), code=2)
    printed = capsys.readouterr().err
    assert package in printed
    assert "[passport]" in printed
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hostile", "child"])
def test_schema_and_shapes_of_spdx_accept_it(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The official ones; in Python they take half a minute."""
    jsonschema, pyshacl, rdflib = (pytest.importorskip(name) for name in ("jsonschema", "pyshacl", "rdflib"))
    run = family(trained, tmp_path / "child", monkeypatch) if kind == "child" else trained.directory
    text = HOSTILE if kind == "hostile" else "Example Ltd"
    facts = tmp_path / "facts.yaml"
    facts.write_text(json.dumps({"provider": text, "model": text, "sources": {"web": {"licence": "MIT"}}}))
    target = export(run, tmp_path / "passport", "--facts", str(facts))
    schema, model, context = (
        lzma.decompress((SCHEMAS / f"spdx-3.0.1-{name}.xz").read_bytes())
        for name in ("schema.json", "model.ttl", "context.jsonld")
    )
    written = json.loads((target / "model.spdx.json").read_bytes())
    assert jsonschema.Draft202012Validator(json.loads(schema)).is_valid(written)
    shapes = rdflib.Graph().parse(data=model, format="turtle")

    def conforms(document: dict[str, Any]) -> bool:
        document = document | {"@context": json.loads(context)["@context"]}
        graph = rdflib.Graph().parse(data=json.dumps(document), format="json-ld")
        return pyshacl.validate(graph, shacl_graph=shapes, ont_graph=shapes)[0]

    assert conforms(written)
    element = next(one for one in written["@graph"] if one["type"] == "ai_AIPackage")
    element["software_primaryPurpose"] = "weapon"
    assert not conforms(written), "the shapes can refuse"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.hf
def test_an_export_of_torch_travels_with_its_passport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    config = tiny_runs.configuration(tmp_path, ["backend=torch", "train.num_steps=2"])
    run = tiny_runs.run(config).run_directory
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", "key.pem")
    openssl("pkey", "-in", "key.pem", "-pubout", "-out", "key.pub")
    words = ["export", str(run), "--to", "hf", "--check", "--key", "key.pem"]
    assert main([*words, "--passport"]) == 0
    assert main([*words, "--passport"]) == 0, "a repeated export is the same"
    target = run / "export" / "hf-fp32-passport-step-00000002"
    validate(target)
    bom, _, _, card = load(target)
    hashes = {one["name"]: one["hashes"][0]["content"] for one in bom["metadata"]["component"]["components"]}
    assert "model.safetensors" in hashes
    for name, digest in hashes.items():
        assert hashlib.sha256((target / name).read_bytes()).hexdigest() == digest
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    assert verifies(target, Path("key.pub"))
    weights = bytearray((target / "model.safetensors").read_bytes())
    weights[random.randrange(len(weights))] ^= 1
    (target / "model.safetensors").write_bytes(weights)
    assert not verifies(target, Path("key.pub"))
    assert main(words) == 0, "an export without passport is another directory"
    assert verifies(run / "export" / "hf-fp32-step-00000002", Path("key.pub"))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.hf
def test_an_adapter_names_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from backends.torch_engine.transformers_models import write_model  # imports torch

    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base", "llama", vocab_size=260)
    tiny_runs.configuration(tmp_path)
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": {}}))
    words = ["backend=torch", "model.kind=huggingface", "model.name_or_path=base", "tokenizer.kind=byte"]
    more = ["adapter.kind=lora", "adapter.rank=4", "train.num_steps=2", "eval.num_sequences=2", "run.name=adapted"]
    assert main(["train", "tiny.yaml", *words, *more, "log.matmul_peak=false"]) == 0
    (run,) = Path("runs").glob("adapted-*")
    target = export(run, tmp_path / "adapter", "--to", "peft")
    validate(target)
    bom, _, _, card = load(target)
    (ancestor,) = bom["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor["name"] == str(tmp_path / "base")
    manifest = json.loads((step_directories(run)[2] / "MANIFEST.json").read_bytes())
    assert properties(ancestor)["fingerprint"] == manifest["metadata"]["spec"]["adapter"]["base_fingerprint"]
    assert properties(bom["metadata"]["component"])["adapter"] == "lora"
    assert "| Adapter | lora |" in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"


@pytest.mark.slow
@pytest.mark.jax
def test_a_run_of_jax(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    run = tiny_runs.run(
        tiny_runs.configuration(tmp_path, ["backend=jax", "runtime.num_threads=null", "train.num_steps=2"])
    ).run_directory
    target = export(run, tmp_path / "passport")
    validate(target)
    found = properties(load(target)[0]["metadata"]["component"])
    assert (found["step"], math.isfinite(float(found["recipe:optimizer.lr"]))) == ("2", True)
