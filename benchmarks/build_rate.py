"""Building a packed cache from text against the tokenizer that it uses: MB of text per second of CPU time.

    build_rate.py [--megabytes 48] [--library-megabytes 16] [--rounds 3] [--only WORDS] [--keep DIRECTORY]

One corpus: Python files and the prose of their docstrings (torch, transformers, the standard library) in turn, cut into
documents of log-normal length by a fixed seed and written once in each format; in txt, where a file is a document, the
same texts in files of 200,000 characters. One byte-level vocabulary of 32,768, trained before. The library's own path,
which is slow, gets the beginning of the corpus.

In every round, each in a process of its own: the tokenizer over the texts, which lie ready as strings in batches of the
size that a build uses, and nothing else; and all of ``vorox data build`` as the command line runs it. Counted is CPU
time, user and system, of all threads and children. Interpreter and imports come first, by building a cache of two
documents, and are not counted. Building that small cache once more is what every build costs whatever its size
(configuration, the tokenizer's file, a test of the fast path, with workers their processes and imports): it is counted
in the build's rate, and told apart as "start". The fast path's test of itself is counted on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import interleave

SEED, VOCABULARY, LENGTH_TOKENS = 20240520, 32_768, 1024
BATCH_CHARACTERS = 1 << 20
MEDIAN_CHARACTERS, SIGMA, SHARE_OF_PROSE = 2_200, 1.1, 0.5
TEXT_FILE_CHARACTERS = 200_000
WORKER_UNIT_BYTES = 8 << 20
FORMATS = ("jsonl", "txt", "parquet", "csv")
_DOCSTRING = re.compile(r'"""(.{80,}?)"""', re.DOTALL)


@dataclass(frozen=True)
class Contender:
    """A tokenizer alone (no codec), or a build with it."""

    path: str
    format: str
    codec: str = ""
    workers: int = 1

    @property
    def name(self) -> str:
        if not self.codec:
            return f"{self.path} tokenizer alone, texts of {self.format}"
        workers = f", {self.workers} workers" if self.workers > 1 else ""
        return f"build, {self.path} tokenizer, {self.format}, {self.codec}{workers}"

    @property
    def alone(self) -> Contender:
        """The tokenizer over the same texts."""
        return Contender(self.path, "txt" if self.format == "txt" else "jsonl")


CONTENDERS = (
    *(Contender("fast", name) for name in ("jsonl", "txt")),
    *(Contender("fast", name, "lz4") for name in FORMATS),
    Contender("fast", "jsonl", "raw"),
    Contender("fast", "jsonl", "lz4", workers=2),
    *(Contender("library", name) for name in ("jsonl", "txt")),
    *(Contender("library", name, "lz4") for name in ("jsonl", "txt", "parquet")),
)


def source_files() -> list[Path]:
    """Python files, in an order that does not depend on the disk."""
    packages, library = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
    found = [*packages.glob("torch/**/*.py"), *packages.glob("transformers/**/*.py")]
    found = sorted(found) + sorted(path for path in library.glob("[a-z]*/*.py") if "site-packages" not in path.parts)
    return [found[index] for index in np.random.default_rng(SEED).permutation(len(found))]


def documents(limit_bytes: int) -> Iterator[str]:
    """Code and prose in turn, in documents whose lengths are log-normal."""
    random = np.random.default_rng(SEED)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in source_files()]
    found = (passage for text in texts for passage in _DOCSTRING.findall(text))
    kinds = ("".join(texts), "\n\n".join(textwrap.dedent("    " + passage) for passage in found))
    places = [0, 0]
    used = 0
    while used < limit_bytes:
        kind = int(random.random() < SHARE_OF_PROSE)
        length = int(np.clip(random.lognormal(np.log(MEDIAN_CHARACTERS), SIGMA), 40, 400_000))
        end = kinds[kind].find("\n", places[kind] + length) + 1
        if end == 0:
            return
        document, places[kind] = kinds[kind][places[kind] : end], end
        used += len(document.encode())
        yield document


def long_documents(texts: Sequence[str]) -> Iterator[str]:
    """The same texts, many to a document."""
    held: list[str] = []
    for text in texts:
        held.append(text)
        if sum(map(len, held)) >= TEXT_FILE_CHARACTERS:
            yield "".join(held)
            held = []
    if held:
        yield "".join(held)


def write_corpus(folder: Path, texts: Sequence[str]) -> None:
    """The texts in every format, under ``folder/<format>``."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in FORMATS:
        (folder / name).mkdir(parents=True)
    records = [
        {"id": f"{index:08d}", "url": f"https://example.org/{index}", "text": text} for index, text in enumerate(texts)
    ]
    with (folder / "jsonl" / "part.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with (folder / "csv" / "part.csv").open("w", encoding="utf-8", newline="") as rows:
        writer = csv.DictWriter(rows, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    pq.write_table(pa.Table.from_pylist(records), folder / "parquet" / "part.parquet", row_group_size=1000)
    for index, text in enumerate(long_documents(texts)):
        (folder / "txt" / f"{index:06d}.txt").write_text(text, encoding="utf-8", newline="")


def prepare(root: Path, sizes: dict[str, float]) -> None:
    """The tokenizer, and for each path its corpus and one of two documents."""
    from vorox.core.schema.tokenizer import TokenizerConfig
    from vorox.data.tokenizers.loading import train

    texts = list(documents(int(max(24.0, *sizes.values()) * 1e6)))  # the vocabulary needs so much
    train(TokenizerConfig(kind="bpe", vocab_size=VOCABULARY), texts[:6000:2]).save(root / "tokenizer")
    for path, megabytes in sizes.items():
        ends = np.cumsum([len(text.encode()) for text in texts])
        chosen = texts[: int(np.searchsorted(ends, megabytes * 1e6)) + 1]
        write_corpus(root / path / "corpus", chosen)
        write_corpus(root / path / "two", chosen[:2])
        (root / path / "texts.json").write_text(json.dumps(chosen))


def read_texts(root: Path, contender: Contender) -> list[str]:
    texts = json.loads((root / contender.path / "texts.json").read_text())
    return list(long_documents(texts)) if contender.format == "txt" else texts


def overrides(root: Path, corpus: str, place: Path, contender: Contender) -> list[str]:
    """What is configured beyond a preset."""
    changes = [
        f"data.sources.0.format={contender.format}",
        f"data.sources.0.paths=[{root / contender.path / corpus / contender.format}]",
        f"data.cache.directory={place}", f"data.cache.codec={contender.codec}", "data.validation.held_out_fraction=0",
        "eval.every_steps=null", "eval.prompts=[]", f"data.sequence_length_tokens={LENGTH_TOKENS}",
        "tokenizer.kind=file", f"tokenizer.path={root / 'tokenizer' / 'tokenizer.json'}",
        f"tokenizer.fast_path={'auto' if contender.path == 'fast' else 'off'}",
    ]  # fmt: skip
    if contender.workers > 1:  # several units, so that there is something to share
        changes.append(f"data.cache.unit_bytes={WORKER_UNIT_BYTES if corpus == 'corpus' else 1}")
    return changes


def cpu_seconds() -> float:
    """Of all threads of this process and of its children that ended, user and system."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def run_build(root: Path, contender: Contender) -> dict[str, float]:
    """A whole build, after two of a small corpus: one for the imports, one for what every build costs."""
    from vorox.cli import main

    def build(corpus: str) -> dict[str, float]:
        before, began = cpu_seconds(), time.perf_counter()
        with tempfile.TemporaryDirectory(dir=root) as place:
            words = ["data", "build", "quickstart", *overrides(root, corpus, Path(place), contender)]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = main([*words, "--workers", str(contender.workers)])
        assert code == 0, f"vorox data build ended with {code}"
        return {"cpu": cpu_seconds() - before, "wall": time.perf_counter() - began}

    build("two")
    imports = cpu_seconds()
    return {"start": build("two")["cpu"], "imports": imports, **build("corpus")}


def run_tokenizer(root: Path, contender: Contender) -> dict[str, float]:
    """Nothing but ``encode_batch`` over strings that are there."""
    from vorox.data.size_groups import batch_by_size
    from vorox.data.tokenizers.loading import load

    texts = read_texts(root, contender)
    batches = list(batch_by_size(((text, len(text)) for text in texts), BATCH_CHARACTERS))
    tokenizer = load(root / "tokenizer")
    tokenizer = tokenizer.with_fast_path() if contender.path == "fast" else tokenizer
    before, began = cpu_seconds(), time.perf_counter()
    for batch in batches:
        tokenizer.encode_batch(batch)
    return {"cpu": cpu_seconds() - before, "wall": time.perf_counter() - began}


def run_stages(root: Path, contender: Contender) -> dict[str, float]:
    """CPU seconds of the parts of a build, one after the other over the whole corpus, in one thread."""
    from vorox.core.config import load_config
    from vorox.core.files.atomic import write_file
    from vorox.data.cache.files.format import encode_chunk
    from vorox.data.cache.units.packing import chunk_contents
    from vorox.data.cache.units.unit_builder import UnitBuilder
    from vorox.data.corpus.cache_opener import recipe_for
    from vorox.data.text.sources import list_source
    from vorox.data.text.unit_reader import UnitReader
    from vorox.data.text.unit_splitter import split_into_units
    from vorox.data.tokenizers.store import resolve_tokenizer

    used: dict[str, float] = {}

    def timed(name: str, work: Callable[..., Any], *given: Any, **named: Any) -> Any:
        before = cpu_seconds()
        result = work(*given, **named)
        used[name] = used.get(name, 0.0) + cpu_seconds() - before
        return result

    def once(corpus: str) -> None:
        config = load_config("quickstart", overrides(root, corpus, root / "stages", contender))
        data = config.data
        source = timed("list and hash the files", list_source, data.sources[0])
        tokenizer = timed(
            "open the tokenizer", resolve_tokenizer, config.tokenizer, data, [source], [],
            root=root, build=True, on_progress=lambda *_: None,
        )  # fmt: skip
        recipe = recipe_for(data, source, "train", tokenizer)
        work = UnitBuilder(
            source.files, UnitReader(source, "train", data.validation), tokenizer, recipe, contender.codec
        )
        for unit in split_into_units(source, "train", data.validation, data.cache.unit_bytes):
            batches = timed("read, parse and check", lambda units: list(work.decode(units)), iter([unit]))
            done = [timed("tokenize, with the records of documents", work.tokenize, batch) for batch in batches]
            (gathered,) = timed("gather", lambda items: list(work.gather(items)), iter(done))
            contents = timed("pack rows", chunk_contents, unit.unit_id, gathered.tokens, gathered.documents_D, recipe)
            for content, origin in zip(contents, work.origins(unit, len(contents)), strict=True):
                body, _ = timed("compress and hash", encode_chunk, content, origin, codec=contender.codec)
                timed("write", write_file, root / "chunk", body)

    once("two")
    used.clear()
    once("corpus")
    return used


RUNS: dict[str, Callable[[Path, Contender], dict[str, float]]] = {
    "build": run_build, "tokenizer": run_tokenizer, "stages": run_stages
}  # fmt: skip


def run_child(what: str, root: Path, contender: Contender) -> dict[str, float]:
    fields = (contender.path, contender.format, contender.codec, str(contender.workers))
    command = [sys.executable, __file__, "--child", what, str(root), *fields]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if result.returncode:
        sys.exit(f"{contender.name} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def spread(values: Sequence[float], digits: int = 2) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def print_table(found: dict[Contender, list[dict[str, float]]], bytes_of: dict[str, int]) -> None:
    print("| | MB per CPU second | to the tokenizer alone | wall, s | of it start, CPU s | imports before, CPU s |")
    print("|---|---|---|---|---|---|")
    for contender, runs in found.items():
        rates = [bytes_of[contender.path] / 1e6 / run["cpu"] for run in runs]
        ratios = [alone["cpu"] / run["cpu"] for alone, run in zip(found[contender.alone], runs, strict=True)]
        known = ([f"{run[name]:.2f}" for run in runs if name in run] or ["-"] for name in ("start", "imports"))
        start, imports = (statistics.median_low(values) for values in known)
        cells = (
            contender.name, spread(rates), spread(ratios), f"{statistics.median(run['wall'] for run in runs):.1f}",
            start, imports,
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        what, root, path, form, codec, workers = sys.argv[2:]
        print(json.dumps(RUNS[what](Path(root), Contender(path, form, codec, int(workers)))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=48)
    parser.add_argument("--library-megabytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="measure what has these words in its name, and the tokenizer alone")
    parser.add_argument("--keep", type=Path, help="where the corpus lies; made there if it is missing")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (root / "library" / "texts.json").exists():
            prepare(root, {"fast": options.megabytes, "library": options.library_megabytes})
        counts = {path: read_texts(root, Contender(path, "jsonl")) for path in ("fast", "library")}
        bytes_of = {path: sum(len(text.encode()) for text in texts) for path, texts in counts.items()}
        for path, texts in counts.items():
            print(f"{path}: {len(texts):,} documents, {bytes_of[path]:,} bytes")
        names = ("tokenizers", "numpy", "pydantic_core", "pyarrow", "lz4")
        print(", ".join(f"{name} {version(name)}" for name in names), interleave.machine(), platform.processor())
        chosen = [contender for contender in CONTENDERS if options.only in contender.name]
        chosen = list(dict.fromkeys(each for contender in chosen for each in (contender.alone, contender)))
        found: dict[Contender, list[dict[str, float]]] = {contender: [] for contender in chosen}
        for number in range(options.rounds):
            shift = number % len(chosen)
            for contender in chosen[shift:] + chosen[:shift]:
                run = run_child("build" if contender.codec else "tokenizer", root, contender)
                found[contender].append(run)
                print(contender.name, {key: round(value, 2) for key, value in run.items()}, file=sys.stderr, flush=True)
        print(f"\n{options.rounds} rounds, median (least to most)\n")
        print_table(found, bytes_of)
        stages = run_child("stages", root, Contender("fast", "jsonl", "lz4"))
        print("\nParts of a build of jsonl, lz4, fast path, one after the other\n\n| | CPU s | share |\n|---|---|---|")
        for name, seconds in stages.items():
            print(f"| {name} | {seconds:.3f} | {seconds / sum(stages.values()):.1%} |")
        interleave.RESULTS.mkdir(exist_ok=True)
        record = {contender.name: runs for contender, runs in found.items()} | {"stages": stages, "bytes": bytes_of}
        (interleave.RESULTS / "build_rate.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
