"""What the documentation says is so: its commands run, its settings load, its snippets execute, its names exist.

A page's commands run one after the other in a folder with a small corpus, a configuration and a finished run called
``demo``. Only names are replaced (``STANDS_FOR``): the presets' own full-size runs are what CI's `make train` shows. A
command that needs a store, a hub, a cluster or several processes is in ``SHOWN_BY`` with the test that runs it.
"""

from __future__ import annotations

import ast
import json
import math
import random
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import chats
import pictures
import tiny_runs
import vorox
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.config.schema_fields import schema_fields
from vorox.sweeps.search_space import read_space

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/**/*.md")]
)

STANDS_FOR = {
    "exam.jsonl": "notes/text.jsonl",
    "quickstart": "my.yaml", "quick": "my.yaml", "config.yaml": "my.yaml", "my_config.yaml": "my.yaml",
    "domain.yaml": "my.yaml", "s3.yaml": "streamed.yaml",
    "my-run": "demo", "my-torch-run": "demo", "runs/my-1a2b3c4d": "demo",
    "path/to/transformers-directory": "transformers-directory", "10000": "60",
    "train.num_steps=2000": "train.num_steps=200", "model.num_layers=12": "model.num_layers=3",
    "200:240": "131:160", "captions.yaml": "small-captions.yaml",
    "published/my-run": "demo", "published/cache": "cache",
}  # fmt: skip
"""Words of a command that are replaced by what is in the folder."""

SHOWN_BY = {
    r"vorox data build \S+ --executor ray": "tests/data/cache/test_workers.py::test_ray",
    r"vorox data build quickstart tokenizer.kind=(huggingface|tiktoken)": "tests/data/tokenizers",
    r"vorox tune": "tests/sweeps/test_ray.py::test_a_killed_sweep_continues",
    r"vorox eval .*--exposure": "tests/training/test_exposure.py",
    r"vorox eval": "tests/training/test_task_evaluation.py::test_scores_equal_those_of_the_harness",
    r"vorox train \S+ precision.dtype=bf16 precision.float8": "tests/backends/torch_engine/test_float8.py",
    r"vorox train .*log.mlflow": "tests/experiments/test_mlflow_sink.py",
    r"vorox train .*log.trackio": "tests/experiments/test_trackio_sink.py",
    r"vorox compress .*--quantize": "tests/training/test_compression.py",
    r"vorox dash(?!.*--export)": "tests/dashboard/test_browser.py::test_every_page",
    r"vorox chat|echo .* \| vorox chat": "tests/serving/test_chat.py::test_lines_of_a_pipe",
    r"vorox serve": "tests/serving/test_server.py",
    r"vorox export \S+ (--to hf )?--passport": "tests/training/test_passport.py::test_the_commands_of_the_page",
    r"vorox checkpoints (sign|verify) \S+ --(key|public-key)": "tests/training/test_checkpoint_signature.py",
    r"vorox unlearn \S+ --list \S+ --key": "tests/training/test_unlearn.py::test_the_statement_is_signed",
    r"vorox claim .*--key|vorox claims .*--public-key": "tests/sweeps/test_claim.py::test_a_signed_verdict",
    r"vorox data download": "tests/data/transfer/test_download.py",
    r"vorox train \S+ --from-weights hf://": "tests/training/test_model_origin.py",
    r"vorox .*--nproc \d": "tests/ranks",
    r"vorox checkpoints restore RUN": "tests/training/test_mirror_resume.py",
    r"vorox .*(gs|s3)://|vorox (train CONFIG|checkpoints list RUN|runs remove RUN) ": "tests/training/test_mirror.py",
    r"vorox train\s*(#|$)": "tests/cli/test_menu.py::test_a_new_run_and_its_command",
    r"vorox train quickstart backend=jax parallel": "tests/backends/jax_engine/test_sharding.py",
}
"""Commands that need what this folder has not, and the tests that have it."""


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}"


def blocks_of(page: Path) -> Iterator[Block]:
    fences = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for number, (language, text) in enumerate(fences, 1):
        yield Block(page.relative_to(ROOT).as_posix(), number, language, text)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(block: Block) -> list[str]:
    """The command lines of a block; what it shows of their output is left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console" and any(line.startswith("$ ") for line in lines):
        found: list[str] = []
        for line in lines:
            if line.startswith("$ "):
                found.append(line[2:])
            elif found and found[-1].count('"') % 2:  # a quoted word goes on
                found[-1] += "\n" + line
        return found
    if block.language in ("console", "bash"):
        return [line for line in lines if line.strip() and not line.startswith("#")]
    return []


COMMANDS = [(block.page, command) for block in BLOCKS for command in commands_of(block)]
PAGES_WITH_COMMANDS = sorted({page for page, command in COMMANDS if command.startswith("vorox ")})


def shown_elsewhere(command: str) -> str | None:
    return next((test for pattern, test in SHOWN_BY.items() if re.match(pattern, command)), None)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a corpus, ``my.yaml``, and a finished run of 160 steps that is called ``demo``."""
    directory = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(directory)
        monkeypatch.setenv("VOROX_CACHE", "cache")
        chooser = random.Random(1)
        texts = ["".join(chooser.choices("abcdefghijk  ", k=900)) for _ in range(60)]  # they do not repeat themselves
        tiny_runs.write_text(directory / "notes")
        with (directory / "notes" / "text.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts[:20])
        chats.write_jsonl(directory / "chats.jsonl", chats.conversations(60, seed=2))
        pairs = [{"prompt": f"{n} + 3 =", "chosen": f" {n + 3}", "rejected": f" {n}"} for n in range(60)]
        (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
        (directory / "photos").mkdir()
        (directory / "photos" / "0.png").write_bytes(pictures.picture("red", 0))
        captions = [{"text": f"<image> A picture, {n}.", "images": ["photos/0.png"]} for n in range(60)]
        (directory / "captions.jsonl").write_text(
            "".join(json.dumps(each) + "\n" for each in captions), encoding="utf-8"
        )
        small = {
            "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vision": pictures.VISION},
            "data": {
                "sources": [
                    {"name": "captions", "format": "jsonl", "paths": ["captions.jsonl"], "images_field": "images"}
                ],
                "sequence_length_tokens": 64,
            },
            "tokenizer": {"kind": "byte", "special_tokens": ["<|image|>"]},
            "train": {"num_steps": 4, "global_batch_sequences": 4, "micro_batch_sequences": 4},
            "eval": {"prompts": []},
            "log": {"matmul_peak": False},
        }
        (directory / "small-captions.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
        (directory / "code").mkdir()
        for number, text in enumerate(texts[20:]):
            (directory / "code" / f"{number}.txt").write_text(text, encoding="utf-8")
        settings: dict[str, Any] = {
            "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
            "data": {
                "sources": [
                    {"name": "notes", "format": "jsonl", "paths": ["notes/text.jsonl"], "weight": 2},
                    {"name": "code", "format": "txt", "paths": ["code/"]},
                ],
                "sequence_length_tokens": 96,
                "cache": {"chunk_rows": 16, "unit_bytes": 2000},
                "validation": {"held_out_fraction": 0.1, "split": "span"},
            },
            "tokenizer": {"kind": "byte"},
            "train": {"num_steps": 160, "global_batch_sequences": 6, "micro_batch_sequences": 6},
            "checkpoint": {"every_steps": 50},
            "eval": {"every_steps": 80, "num_sequences": 4},
            "log": {"matmul_peak": False},
            "runtime": {"device": "cpu"},
        }
        Path("my.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        for name, rate in (("A", 0.01), ("B", 0.001)):
            short = settings | {"optimizer": {"lr": rate}, "train": settings["train"] | {"num_steps": 10}}
            Path(f"{name}.yaml").write_text(yaml.safe_dump(short), encoding="utf-8")
        streamed = settings | {
            "data": settings["data"] | {"mode": "streaming"},
            "train": settings["train"] | {"num_steps": 20},
        }
        Path("streamed.yaml").write_text(yaml.safe_dump(streamed), encoding="utf-8")
        facts = next(block.text for block in BLOCKS if block.text.startswith("# facts.yaml"))
        Path("facts.yaml").write_text(facts, encoding="utf-8")
        assert main(["train", "my.yaml", "--name", "demo"]) == 0
        assert main(["export", "demo", "--to", "hf", "--output", "transformers-directory"]) == 0
        yield directory


@pytest.fixture
def place(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which a page's commands may change."""
    copy = tmp_path / "place"
    shutil.copytree(stage, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("VOROX_CACHE", "cache")
    return copy


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.hf
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS)
def test_every_command_of_a_page_runs(page: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = 0
    commands = [command for of_page, command in COMMANDS if of_page == page and command.startswith("vorox ")]
    for command in commands:
        if shown_elsewhere(command):
            continue
        for part in command.split(" && "):
            words = [STANDS_FOR.get(word, word) for word in shlex.split(part, comments=True)]
            assert words[0] == "vorox", command
            words = words[1 : words.index(">")] if ">" in words else words[1:]
            capsys.readouterr()
            code = main(words)
            said = capsys.readouterr()
            refused = page == "docs/provenance.md" and "DELETE" in command  # shown because it is refused
            assert (code == 2) if refused else (code == 0), f"{part}\n{said.out}\n{said.err}"
            ran += 1
    assert ran or all(shown_elsewhere(command) for command in commands)


@pytest.mark.parametrize("pattern", SHOWN_BY)
def test_what_is_shown_elsewhere_is_in_the_docs_and_in_a_test(pattern: str) -> None:
    assert any(re.match(pattern, command) for _, command in COMMANDS)
    path, _, name = SHOWN_BY[pattern].partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name}" in (ROOT / path).read_text(encoding="utf-8")


def test_other_commands_name_what_there_is() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for page, command in COMMANDS:
        words = shlex.split(command, comments=True)
        if words[:1] == ["make"]:
            assert all(re.search(rf"^{re.escape(word)}:", makefile, re.M) for word in words[1:] if "=" not in word), (
                command
            )
        elif words[0].startswith(".venv-bench"):
            assert (ROOT / words[1]).is_file(), command
        elif words[0].startswith("benchmarks/"):
            assert (ROOT / words[0]).is_file(), command
        elif words[0] == "torchrun":
            assert words[words.index("-m") + 1 :][:2] in (["vorox", "train"], ["vorox", "doctor"]), command
        elif words[:2] == ["python", "-m"] and words[2].startswith("vllm."):
            test = (ROOT / "tests" / "serving" / "test_vllm.py").read_text(encoding="utf-8")
            assert all(f'"{word}"' in test for word in words[1:] if "/" not in word), command
        elif words[0] in ("model_signing", "mlcroissant"):
            assert page == "docs/passports.md", "tests/training/test_passport.py runs those of this page"
        elif words[0] not in ("vorox", "echo", "git", "export", "ssh", ".venv/bin/pre-commit"):
            extras = re.findall(r"vorox\[([\w,]+)\]|\.\[([\w,]+)\]", command)
            assert extras, f"{page}: who runs {command}?"
            for extra in ",".join(filter(None, extras[0])).split(","):
                assert re.search(rf"^{extra} = \[", project, re.M), command


NOT_SETTINGS = ("# yaml-language", "# space.yaml")
YAML_BLOCKS = [block for block in BLOCKS if block.language == "yaml" and not block.text.startswith(NOT_SETTINGS)]
NEEDED = {
    "num_steps": "train.num_steps=5",
    "sources": "data.sources=[{name: web, format: txt, paths: [web/]}]",
    "sequence_length_tokens": "data.sequence_length_tokens=64",
}
"""What every configuration says, by the word that shows that a block says it itself; a preset says all."""


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=str)
def test_settings_of_the_docs_load(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a configuration is completed by what every configuration needs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_package").mkdir()
    for snippet in (block for block in BLOCKS if block.text.startswith("# my_package/my_module.py")):
        (tmp_path / "my_package" / "my_module.py").write_text(snippet.text, encoding="utf-8")
    text = "data:\n  sources:\n" + block.text if block.text.lstrip().startswith("- ") else block.text
    (tmp_path / "block.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "base.yaml").write_text("preset: quickstart\n", encoding="utf-8")  # what a block may be based on
    is_whole = re.search(r"^preset:", text, re.MULTILINE)
    load_config(
        tmp_path / "block.yaml", [] if is_whole else [NEEDED[word] for word in NEEDED if f"{word}:" not in text]
    )


def test_the_search_space_of_the_docs_is_one(tmp_path: Path) -> None:
    (text,) = [block.text for block in BLOCKS if block.text.startswith("# space.yaml")]
    (tmp_path / "space.yaml").write_text(text, encoding="utf-8")
    keys = [parameter.key for parameter in read_space(tmp_path / "space.yaml")]
    assert keys == ["optimizer.lr", "optimizer.beta2", "model.num_layers"]


INSTEAD = {
    "docs/provenance.md": {
        "runs/demo-1a2b3c4d": "{run}",
        '"postgresql://user:password@host/database"': 'Path("{run}/metadata.sqlite")',
    },
    "docs/python.md": {'"quickstart"': '"my.yaml"', "def main(": "abc"},
    "docs/quickstart.md": {"runs/<run>/checkpoints/<step>": "{run}/checkpoints/step-00000160"},
    "docs/storage.md": {"hf://HuggingFaceFW/fineweb-edu/sample/10BT": "code", ".parquet": ".txt"},
    "docs/streaming.md": {
        "s3://bucket/crawl/*.jsonl.zst": "notes/*.jsonl", "gs://bucket/books/*.parquet": "code/*.txt",
        '"tokenizer.json"': '"{run}/tokenizer/tokenizer.json"', "num_workers=4": "num_workers=2",
        "sequence_length_tokens=2048": "sequence_length_tokens=64",
        'sample["metadata"]  #': 'sample["metadata"]; break  #', "num_batches_taken": "1",
        "stream = dataset": "import torch; stream = dataset",
    },
}  # fmt: skip
"""What the folder has in the place of what a page's snippets name."""
PAGES_WITH_PYTHON = sorted({block.page for block in BLOCKS if block.language == "python"})


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.hf
@pytest.mark.parametrize("page", PAGES_WITH_PYTHON)
def test_every_python_snippet_of_a_page_runs(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace, in order."""
    monkeypatch.syspath_prepend(place)
    (place / "my_package").mkdir()
    (place / "my_package" / "models.py").write_text("def load_translator(pair):\n    return str.upper, str.lower\n")
    run = next((place / "runs").glob("demo-*")).relative_to(place)
    names: dict[str, Any] = {}
    for block in (block for block in BLOCKS if block.page == page and block.language == "python"):
        text = block.text
        for old, new in INSTEAD.get(page, {}).items():
            text = text.replace(old, new.replace("{run}", run.as_posix()))
        exec(compile(text, str(block), "exec"), names)
    if page == "docs/transforms.md":
        assert names["tidy"]("“so”") == '"so"'
        assert names["back_translated"]("So") == ["So", "so"]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.hf
def test_training_uses_every_function_of_the_pages_on_extending(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the functions and settings of all pages in one run, and what they did."""
    monkeypatch.syspath_prepend(place)
    blocks = [block for block in BLOCKS if block.page.startswith("docs/extending")]
    files: dict[str, list[str]] = {}
    for page in {block.page for block in blocks}:
        texts = [block.text for block in blocks if block.page == page and block.language == "python"]
        if texts:
            name = re.match(r"# (\w+\.py)\n", texts[0])
            assert name is not None, f"{page}: the first example names its file"
            files.setdefault(name[1], []).extend(texts)
    for name, texts in files.items():
        (place / name).write_text("\n\n".join(texts), encoding="utf-8")
    (place / "urls.txt").write_text("2025-12.notes\n2026-01.notes\n", encoding="utf-8")
    (place / "2026-01.notes").write_text("\n---\n".join(f"note {number} of the month" * 9 for number in range(60)))
    settings = yaml.safe_load((place / "my.yaml").read_text(encoding="utf-8"))
    own_models: list[dict[str, Any]] = []
    for block in (block for block in blocks if block.language == "yaml"):
        for section, values in yaml.safe_load(block.text).items():
            if section == "model" and values.keys() & {"kind", "block"}:
                own_models.append(values)
            else:
                settings[section] = settings.get(section, {}) | values
    outcome = vorox.train(settings, {"run.name": "extended", "log.every_steps": 1, "data.validation.split": "document"})
    run = vorox.open_run(outcome.run_directory)
    metrics = run.metrics()
    total, warm_up = 160, 20
    for step in (21, 90, 160):
        share = 0.5 + 0.25 * (1 + math.cos(math.pi * (step - 1 - warm_up) / (total - 1 - warm_up)))
        assert metrics[step]["learning_rate"] == pytest.approx(1e-4 * share)
        assert 0 < metrics[step]["objective"] < metrics[step]["loss"]
        assert metrics[step]["custom/excess"] == pytest.approx(metrics[step]["loss"] - math.log(2))
    assert metrics[160]["eval/custom/recall/hits"] in (0, 1, 2)
    lines = outcome.run_directory.with_suffix(".csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines if not line.endswith(",")] == [str(step) for step in range(1, 161)]
    assert run.where(7)[0].documents[0].uri.endswith("2026-01.notes")
    assert vorox.load_model(run).tokenizer.vocab_size == 96
    for model in own_models:
        few = {"run.name": "own", "train.num_steps": 3, "data.validation.split": "document"}
        own = vorox.train(settings | {"model": model}, few)
        losses = [values["loss"] for values in vorox.open_run(own.run_directory).metrics().values()]
        assert losses[0] == pytest.approx(math.log(96), rel=0.25)
        assert losses[-1] < losses[0]
    (place / "depot" / "books").mkdir(parents=True)
    (place / "depot" / "books" / "one.notes").write_text("\n---\n".join(f"book {number}" * 40 for number in range(60)))
    settings["data"] = {"sources": [settings["data"]["sources"][-1] | {"paths": ["lake.py:depot://books/*.notes"]}]}
    settings["data"] |= {"sequence_length_tokens": 128}
    stored = vorox.train(settings, {"run.name": "stored", "train.num_steps": 3, "data.validation.split": "document"})
    assert vorox.open_run(stored.run_directory).where(2)[0].documents[0].uri == "lake.py:depot://books/one.notes"


def defined_names(module: Path) -> set[str]:
    """The classes, functions and variables of a module, and those of its classes as ``Class.member`` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for child in node.body:
            targets = getattr(child, "targets", [getattr(child, "target", child)])
            names = {getattr(target, "id", getattr(target, "name", "")) for target in targets} - {""}
            found |= names | ({f"{node.name}.{name}" for name in names} if isinstance(node, ast.ClassDef) else set())
    return found


def test_the_table_of_engines_says_what_settings_declare() -> None:
    """A setting is refused where it is not for an engine, and no value is named that is not for one."""
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+\.[a-z_]+)`[^|]* \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    for key, *cells in rows:
        engines = schema_fields()[key].facts.engines
        for engine, cell in zip(("torch", "jax"), cells, strict=True):
            if isinstance(engines, Mapping):
                foreign = {value for value, of in engines.items() if engine not in of}
                assert not foreign & set(re.findall(r"[\w-]+", cell)), (key, engine)
            elif key != "model.kind":  # its values are features (docs/support.md)
                assert cell.startswith("refused") == (engine not in (engines or ())), (key, engine)


def test_the_numbers_of_the_quickstart_are_those_of_its_preset() -> None:
    config, text = load_config("quickstart"), (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    steps = config.train.num_steps or 0
    assert f"train.num_steps={2 * steps} " in text
    assert f"all {2 * steps:,} steps: the learning rate jumps up at step {steps + 1}" in text
    assert f"holds out {config.data.validation.held_out_fraction:.0%}" in text
    assert f"with {config.tokenizer.vocab_size:,} tokens" in text


def test_a_member_is_known_by_its_class() -> None:
    names = defined_names(ROOT / "src" / "vorox" / "core" / "run_layout.py")
    assert {"RunLayout", "RunLayout.checkpoint", "RunLayout.chain", "RUN_FILES", "checkpoint"} <= names
    assert not {"RunFile.checkpoint", "RunLayout.loop", "loop", ""} & names


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_and_names_in_the_prose_exist(page: Path) -> None:
    """`training/loop/loop.py` and `experiments/sinks.py: Sink` are looked up below src/vorox, the package and the root.

    Several names are separated by commas, and a member may be named with its class: `StepSync.start, finish`.
    """
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for path, names in re.findall(r"`([\w./]+\.py)(?:: ([^`]+))?`", prose):
        places = [root / path for root in (ROOT, page.parent, ROOT / "benchmarks", ROOT / "src" / "vorox")]
        found = next((place for place in places if place.is_file()), None)
        assert found is not None, f"{page.name} names {path}"
        missing = set(filter(None, re.split(r",\s+", names))) - defined_names(found)
        assert not missing, f"{page.name} names {path}: {', '.join(sorted(missing))}"
    for path in re.findall(r"`((?:tests|configs|docs|benchmarks|examples)/[\w./]*\w)`", prose):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[\w-]+)?\)", prose):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pictures_of_the_call_paths_name_modules_that_exist() -> None:
    """The first word of each line and every path; core, data and training are where they are looked up."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    pictures = page.partition("## Document to chunk")[2].partition("## A run directory")[0]
    lines = [line for picture in re.findall(r"```\n(.*?)```", pictures, re.DOTALL) for line in picture.splitlines()]
    words = {line.split()[0].removesuffix(",") for line in lines} | set(re.findall(r"\w+/[\w/]+", "\n".join(lines)))
    folders = [ROOT / "src" / "vorox" / folder for folder in (".", "core", "data", "training")]
    assert len(words) > 20
    for word in words:
        path = word.removesuffix(".py")
        found = any(
            (folder / f"{path}.py").is_file() or (folder / path / "__init__.py").is_file() for folder in folders
        )
        assert found, f"the architecture page names {word}"
