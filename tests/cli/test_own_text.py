"""A user's own text: recognised, given a model that fits it, and trained at the first command."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from dataset_folders import write_mds, write_saved_dataset
from servers import http_server
from vorox.cli import main
from vorox.cli.settings.arguments import parse_arguments
from vorox.cli.settings.config import source_and_overrides
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema import RunConfig
from vorox.data.storage import local
from vorox.data.text.format_detection import detect_source

TEXTS = [f"Chapter {number}. " + "The cat sat on the mat and looked at the moon. " * 40 for number in range(40)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))


def test_a_first_record_that_is_longer_than_the_sample() -> None:
    records = [{"text": "word " * 100_000}, *({"text": text} for text in TEXTS)]
    Path("long.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert detect_source(["long.jsonl"], {}).source["text_field"] == "text"


@pytest.mark.parametrize(("first_line_bytes", "most_bytes"), [(300_000, 3 << 20), (3_000_000, 5 << 20), (9, 3 << 20)])
def test_detection_reads_little_more_than_the_first_records(
    monkeypatch: pytest.MonkeyPatch, first_line_bytes: int, most_bytes: int
) -> None:
    lines = [json.dumps({"text": "x" * size}) for size in (first_line_bytes, *[200_000] * 100)]
    Path("long.jsonl").write_text("\n".join(lines), encoding="utf-8")
    read = 0
    original = local._Range.readinto  # pyright: ignore[reportPrivateUsage]

    def readinto(self: Any, buffer: Any) -> int:
        nonlocal read
        count = original(self, buffer)
        read += count
        return count

    monkeypatch.setattr("vorox.data.storage.local._Range.readinto", readinto)
    source = detect_source(["long.jsonl"], {}).source
    assert source["text_field"] == "text"
    assert 0 < read <= 2 * most_bytes, "the records, and the sample that measures the vocabulary"


@pytest.mark.parametrize("num_words", [20, 100_000], ids=["short", "long"])
def test_files_on_a_server_are_recognised(num_words: int) -> None:
    Path("web").mkdir()
    records = [{"text": "word " * num_words}, {"text": TEXTS[0]}]
    Path("web/a.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    with http_server(Path("web")) as web:
        assert detect_source([f"{web.url}/a.jsonl"]).source["text_field"] == "text"


def _txt() -> str:
    Path("my.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    return "my.txt"


def _notes() -> str:
    Path("notes/deep").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        Path("notes", "deep" if number % 2 else "", f"{number}.md").write_text(text, encoding="utf-8")
    return "notes/"


def _jsonl() -> str:
    lines = [json.dumps({"id": number, "url": "x", "content": text}) for number, text in enumerate(TEXTS)]
    Path("a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return "a.jsonl"


def _compressed() -> str:
    Path("a.jsonl.gz").write_bytes(gzip.compress(Path(_jsonl()).read_bytes()))
    return "a.jsonl.gz"


def _csv() -> str:
    with Path("b.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerow(["number", "story"])
        rows.writerows([number, text] for number, text in enumerate(TEXTS))
    return "b.csv"


def _parquet() -> str:
    parquet.write_table(arrow.table({"n": list(range(len(TEXTS))), "body": TEXTS}), "p.parquet")
    return "p.parquet"


def _nested_parquet() -> str:
    documents = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]
    parquet.write_table(arrow.table({"n": list(range(len(TEXTS))), "doc": documents}), "n.parquet")
    return "n.parquet"


def _nested_jsonl() -> str:
    lines = [json.dumps({"id": str(number), "doc": {"text": text}}) for number, text in enumerate(TEXTS)]
    Path("n.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return "n.jsonl"


def _folder() -> str:
    Path("texts").mkdir()
    for number, text in enumerate(TEXTS):
        Path(f"texts/{number}.txt").write_text(text, encoding="utf-8")
    return "texts"


def _token_shards() -> str:
    """A folder as llm.c writes it: a header of 256 int32 with magic number, version and count, then uint16 ids."""
    Path("fineweb").mkdir()
    for name, count in (("fineweb_val_000000.bin", 2000), ("fineweb_train_000001.bin", 8000)):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, count
        ids = np.arange(count, dtype="<u2") % 500
        ids[::100] = 50256
        Path("fineweb", name).write_bytes(header.tobytes() + ids.tobytes())
    return "fineweb"


def _saved() -> str:
    write_saved_dataset(Path("saved/train"), {"story": TEXTS})
    write_saved_dataset(Path("saved/test"), {"story": TEXTS[:3]}, num_shards=1)
    return "saved"


def _mds() -> str:
    write_mds(Path("mosaic"), [{"n": n, "body": text} for n, text in enumerate(TEXTS)], {"n": "int", "body": "str"})
    return "mosaic"


def configuration(*words: str) -> RunConfig:
    return load_config(*source_and_overrides(parse_arguments(words, options=(), max_positional=1)))


@pytest.mark.parametrize(
    ("make", "format_name", "text_field"),
    [
        (_txt, "txt", "text"),
        (_notes, "txt", "text"),
        (_jsonl, "jsonl", "content"),
        (_compressed, "jsonl", "content"),
        (_csv, "csv", "story"),
        (_parquet, "parquet", "body"),
        (_saved, "arrow", "story"),
        (_mds, "mds", "body"),
    ],
)
def test_text_is_recognised_and_named_in_the_answer_to_its_path(
    make: Callable[[], str], format_name: str, text_field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make()
    assert main(["train", path]) == 2
    assert main(["data", "stats", path]) == 2
    assert capsys.readouterr().err.count(f"vorox train --data {path}") == 2
    config = configuration("--data", path)
    source = config.data.sources[0]
    assert (source.format, source.text_field) == (format_name, text_field)
    assert format_name in capsys.readouterr().err
    assert config.eval.prompts
    assert all(prompt not in {"def ", "import ", "class "} for prompt in config.eval.prompts)


@pytest.mark.parametrize("make", [_nested_parquet, _nested_jsonl])
def test_a_text_inside_an_object_is_never_guessed(
    make: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    path = make()
    assert main(["train", "--data", path, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "No column holds text" in said
    assert "data.sources.0.text_field=doc.text" in said
    assert configuration("--data", path, "data.sources.0.text_field=doc.text").data.sources[0].text_field == "doc.text"


def test_token_ids_of_an_mds_folder_are_recognised() -> None:
    write_mds(
        Path("ids"), [{"input_ids": np.arange(n, dtype=np.uint16)} for n in range(9)], {"input_ids": "ndarray:uint16"}
    )
    config = configuration("--data", "ids")
    assert (config.data.sources[0].tokens_field, config.tokenizer.kind) == ("input_ids", "none")


def test_the_model_grows_with_the_text_and_the_rate_falls_with_the_model() -> None:
    Path("small.txt").write_text("\n".join(TEXTS)[:30_000], encoding="utf-8")
    words = " ".join(f"word{number} word{number}" for number in range(60_000))
    Path("large.txt").write_text(words, encoding="utf-8")
    small, large = configuration("--data", "small.txt"), configuration("--data", "large.txt")
    assert small.tokenizer.kind == "byte", "a text of 20 words supports no vocabulary"
    assert large.tokenizer.kind == "bpe"
    assert small.model.hidden_size < large.model.hidden_size
    assert small.train.num_steps is not None
    assert large.train.num_steps is not None
    assert small.train.num_steps < large.train.num_steps
    wide = configuration("--data", "large.txt", "model.hidden_size=512", "model.num_heads=8")
    assert wide.optimizer.lr < large.optimizer.lr < 0.01
    assert configuration("--data", "large.txt", "--lr", "2e-4").optimizer.lr == 2e-4


def test_the_heads_fit_a_width_of_the_user() -> None:
    Path("small.txt").write_text("\n".join(TEXTS)[:30_000], encoding="utf-8")
    assert configuration("--data", "small.txt").model.num_heads == 3
    fitted = configuration("--data", "small.txt", "model.hidden_size=64")
    assert (fitted.model.hidden_size, fitted.model.num_heads) == (64, 2)
    assert configuration("--data", "small.txt", "model.hidden_size=64", "model.num_heads=4").model.num_heads == 4


@pytest.mark.torch
def test_starting_weights_bring_their_model_and_tokenizer_to_own_text(capsys: pytest.CaptureFixture[str]) -> None:
    """What was fitted to the size of the text is a preset: it does not contradict the weights."""
    text = ["train", "--data", _jsonl(), "backend=torch", "runtime.device=cpu", "--steps", "2", "log.matmul_peak=false"]
    assert main([*text, "--name", "first", "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2"]) == 0
    (first,) = Path("runs").iterdir()
    assert main([*text, "--name", "second", "--from-weights", str(first)]) == 0, capsys.readouterr().err
    (second,) = set(Path("runs").iterdir()) - {first}
    trained = load_config(second / "config.yaml")
    assert (trained.model.num_layers, trained.model.hidden_size, trained.model.num_heads) == (1, 32, 2)
    assert main([*text, "--from-weights", str(first), "--dry-run"]) == 0
    assert f"weights        {first}\n" in capsys.readouterr().out
    assert main([*text, "--from-weights", str(first), "model.num_layers=2"]) == 2
    assert "model.num_layers" in capsys.readouterr().err


def test_of_a_mixed_folder_one_format_is_read_and_the_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(_notes())
    (folder / "large.jsonl").write_bytes(Path(_jsonl()).read_bytes() * 3)
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert configuration("--data", "notes").data.sources[0].format == "jsonl"
    said = capsys.readouterr().err
    assert "left out: 41 files (.md, .png); data.sources.0.format=txt" in said
    assert max(map(len, said.splitlines())) < 120
    source = configuration("--data", "notes", "data.sources.0.format=txt").data.sources[0]
    assert source.format == "txt"
    assert not any("png" in path or "jsonl" in path for path in source.paths)


@pytest.mark.parametrize(("chosen", "others"), [("csv", "jsonl, txt"), ("jsonl", "csv, txt"), ("txt", "csv, jsonl")])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_every_format_that_is_left_out_is_named(
    chosen: str, others: str, is_compressed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(TEXTS[:2])
    files = {"txt": words, "jsonl": json.dumps({"text": words}), "csv": f"number,text\n1,{words}\n"}
    Path("mixed").mkdir()
    for name, text in files.items():
        data = (text * (9 if name == chosen == "txt" else 1)).encode() + b"\n" * (9999 * (name == chosen))
        path = Path("mixed", f"a.{name}")
        path.write_bytes(data)
        if is_compressed and name != chosen:
            path.with_name(f"a.{name}.gz").write_bytes(gzip.compress(data))
            path.unlink()
    assert configuration("--data", "mixed").data.sources[0].format == chosen
    assert f"left out: 2 files ({others})" in capsys.readouterr().err


def _lab(name: str, column: str = "text", delimiter: str = ",") -> str:
    rows = [delimiter.join((column, "n")), *(delimiter.join((f"words of the lab {n}", str(n))) for n in range(50))]
    Path(name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return name


@pytest.mark.parametrize(
    ("second", "differing"),
    [("lab.csv", "format"), ("lab.tsv", "delimiter"), ("column.csv", "text_field"), ("lines.json", "format")],
)
def test_paths_of_different_formats_are_refused_and_the_remedy_reads_each(second: str, differing: str) -> None:
    first = _lab("first.csv")
    if differing == "format":
        first = "book.txt"
        Path(first).write_text(TEXTS[0] * 3, encoding="utf-8")
    if second == "lines.json":
        Path(second).write_text(json.dumps([{"text": text} for text in TEXTS[:5]]), encoding="utf-8")
    else:
        _lab(second, "body" if second == "column.csv" else "text", "\t" if second == "lab.tsv" else ",")
    for pair in ((first, second), (second, first)):
        data = [word for path in pair for word in ("--data", path)]
        with pytest.raises(ConfigError, match=f"{pair[0]} and {pair[1]} differ in {differing}") as caught:
            configuration(*data)
        words = shlex.split(caught.value.hint.partition(": ")[2].rpartition(" (")[0])
        sources = configuration(*words).data.sources
        assert [source.paths for source in sources] == [(path,) for path in pair]
        for source, path in zip(sources, pair, strict=True):
            alone = detect_source([path]).source
            assert (source.format, source.delimiter) == (alone["format"], alone.get("delimiter", ","))
            assert source.text_field == alone.get("text_field", "text")


def test_paths_of_one_format_are_one_source() -> None:
    paths = _lab("a.csv"), _lab("b.csv"), "empty.csv"
    Path("empty.csv").touch()
    data = [word for path in paths for word in ("--data", path)]
    (source,) = configuration(*data).data.sources
    assert source.paths == paths


@pytest.mark.parametrize("other", ["lab.csv", "notes.log"])
def test_a_glob_of_several_formats_is_refused(other: str) -> None:
    Path("mix").mkdir()
    Path("mix/book.txt").write_text(TEXTS[0] * 9, encoding="utf-8")
    _lab(f"mix/{other}")
    with pytest.raises(ConfigError, match="glob matches files of several formats") as caught:
        configuration("--data", "mix/*")
    assert caught.value.where == str(Path("mix", other).resolve())
    assert configuration("--data", "mix/*.txt").data.sources[0].paths == ("mix/*.txt",)
    assert configuration("--data", "mix/*", "data.sources.0.format=txt").data.sources[0].paths == ("mix/*",)


def test_an_empty_file_is_named() -> None:
    Path("empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        configuration("--data", "empty.txt")
    Path("none").mkdir()
    for name in ("a.txt", "b.md"):
        Path("none", name).touch()
    with pytest.raises(DataError, match="All 2 txt files are empty"):
        configuration("--data", "none")


def test_the_warm_up_follows_the_length_unless_somebody_said_it() -> None:
    text = _txt()
    whole, short = configuration("--data", text), configuration("--data", text, "--steps", "40")
    assert whole.train.num_steps is not None
    assert whole.schedule.warmup_steps is not None
    assert 10 <= whole.schedule.warmup_steps <= whole.train.num_steps / 10
    assert short.schedule.warmup_steps == 4
    assert configuration("--data", text, "--steps", "40", "--warmup_steps", "20").schedule.warmup_steps == 20
    fraction = configuration("--data", text, "--steps", "40", "schedule.warmup_steps=null", "schedule.warmup_tokens=99")
    assert fraction.schedule.warmup_tokens == 99


def test_text_replaces_the_sources_of_a_named_configuration() -> None:
    config = configuration("gpt2-124m", "--data", _jsonl())
    assert config.model.preset == "gpt2-124m"
    assert [source.paths for source in config.data.sources] == [("a.jsonl",)]


def test_what_is_ambiguous_is_asked_for_and_then_taken(capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.jsonl").write_text(json.dumps({"title": "A", "abstract": "B"}) + "\n", encoding="utf-8")
    assert main(["train", "--data", "two.jsonl", "--dry-run"]) == 2
    assert "data.sources.0.text_field=title" in capsys.readouterr().err
    assert configuration("--data", "two.jsonl", "data.sources.0.text_field=abstract").data.sources[0].format == "jsonl"
    Path("strange.xyz").write_text("text", encoding="utf-8")
    Path("other.xyz").write_text("text", encoding="utf-8")
    assert main(["train", "--data", "*.xyz", "--dry-run"]) == 2
    assert "data.sources.0.format=txt" in capsys.readouterr().err
    assert main(["train", "--data", "nothing.txt", "--dry-run"]) == 4


@pytest.mark.parametrize(
    "words",
    [
        ["quickstart", "--data", "notes/"],
        ["mine.yaml"],
        ["quickstart", "data.sources=[{name: n, format: txt, paths: [notes/]}]"],
    ],
)
def test_other_text_does_not_inherit_what_the_quickstart_was_tuned_for(words: list[str]) -> None:
    _notes()
    Path("mine.yaml").write_text(
        "preset: quickstart\ndata:\n  sources:\n    - {name: n, format: txt, paths: [notes/]}\n", encoding="utf-8"
    )
    own, quickstart = configuration(*words), load_config("quickstart")
    assert quickstart.optimizer.lr == 1e-2
    assert quickstart.eval.prompts
    assert own.optimizer.lr < quickstart.optimizer.lr
    assert own.eval.prompts == ()
    assert own.optimizer.name == "adamw"
    assert own.model.hidden_size == quickstart.model.hidden_size


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("make", [_folder, _jsonl, _csv, _parquet, _txt, _token_shards])
def test_own_text_trains_at_the_first_command(
    make: Callable[[], str], backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint computes the same logits for a prompt in a padded batch of transformers as alone."""
    pytest.importorskip(backend)
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "log.matmul_peak=false"]
    code = main(["train", "--data", make(), "--backend", backend, "--device", "cpu", "--steps", "2", *shape])
    output = capsys.readouterr()
    assert code == 0, output.err
    (checkpoint,) = Path("runs").glob("*/checkpoints/step-00000002")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    if make is _token_shards:
        padding = model.generation_config.pad_token_id
        batch = {
            "input_ids": torch.tensor([[5, 6, 7, 8, 9], [5, 6, padding, padding, padding]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        }
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        special = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
        assert special == {"<|endoftext|>"}
        assert tokenizer.model_max_length == model.config.max_position_embeddings
        batch = tokenizer(["The cat sat on the mat.", "The cat"], padding=True, return_tensors="pt")
    with torch.no_grad():
        padded_BTV = model(**batch).logits
        short_T = batch["input_ids"][1][batch["attention_mask"][1].bool()]
        alone_TV = model(short_T[None]).logits[0]
    assert len(short_T) < padded_BTV.shape[1]
    torch.testing.assert_close(padded_BTV[1, : len(short_T)], alone_TV, rtol=1e-5, atol=1e-5)
