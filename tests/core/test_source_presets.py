"""Named sources fill in what an entry does not say, and say where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from vorox.core.config import load_config, resolve_config
from vorox.core.config.layers.presets import source_presets
from vorox.core.errors import ConfigError
from vorox.core.schema.data import SourceConfig


def written(folder: Path, *entries: str) -> str:
    path = folder / "run.yaml"
    path.write_text("preset: quickstart\ndata:\n  sources:\n" + "".join(f"    - {entry}\n" for entry in entries))
    return str(path)


def test_there_are_the_names_that_are_promised() -> None:
    assert {"fineweb-edu", "fineweb", "dolma", "c4", "the-stack", "the-stack-dedup", "the-stack-smol", "stdlib"} <= set(
        source_presets()
    )


@pytest.mark.parametrize("name", list(source_presets()))
def test_every_named_source_is_a_valid_entry(tmp_path: Path, name: str) -> None:
    (source,) = load_config(written(tmp_path, f"{{name: x, preset: {name}}}")).data.sources
    assert source.preset == name
    said = source.model_dump(mode="json", exclude={"name", "preset"})
    assert {key: said[key] for key in source_presets()[name]} == dict(source_presets()[name])


def test_what_the_entry_says_wins_wherever_it_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "{name: x, preset: fineweb-edu, hf_config: sample-100BT}", "{name: y, preset: c4}")
    resolved = resolve_config(path, ["data.sources.1.text_field=body"])
    first, second = resolved.config.data.sources
    assert (first.format, first.hf_config) == ("parquet", "sample-100BT")
    assert (second.text_field, second.hf_config) == ("body", "en")
    assert resolved.origin("data.sources.0.format") == f"data.sources.0.preset=fineweb-edu ({path}:4)"
    assert resolved.origin("data.sources.1.text_field") == "override data.sources.1.text_field=body"


def test_what_has_no_meaning_beside_the_entrys_own_keys_goes(tmp_path: Path) -> None:
    """A local copy of c4 has no hub configuration; python_stdlib has no fields."""
    path = written(tmp_path, "{name: x, preset: c4, paths: [copy/]}", "{name: y, preset: c4, format: python_stdlib}")
    assert load_config(path).data.sources == (
        SourceConfig(name="x", preset="c4", format="jsonl", paths=("copy/",)),
        SourceConfig(name="y", preset="c4", format="python_stdlib"),
    )


def test_a_preset_from_the_command_line_does_not_override_what_the_file_says(tmp_path: Path) -> None:
    path = written(tmp_path, "{name: x, format: csv, paths: [a.csv]}")
    (source,) = load_config(path, ["data.sources.0.preset=fineweb-edu"]).data.sources
    assert source == SourceConfig(name="x", preset="fineweb-edu", format="csv", paths=("a.csv",))


def test_a_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "{name: x, preset: fineweb-edu}"))
    from vorox.core.config import dump_yaml

    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: x, preset: fineweb-ed}", "did you mean fineweb-edu"),
        ("{name: x, preset: zzz}", "there are fineweb-edu, "),
        ("{name: x, format: bin, paths: [a]}", "their tokenizer is not set"),
        ("{name: x, format: bin, paths: [a], tokenizer: t.json}", "a newly trained tokenizer (tokenizer.kind=bpe)"),
        ("{name: x, format: txt, paths: [a], hf_split: test}", "hf_split=test has no effect"),
        ("{name: x, format: txt, paths: [a], delimiter: ;}", "needs data.sources.0.format=csv"),
        ("{name: x, format: csv, paths: [a], delimiter: ab}", "delimiter"),
        ("{name: x, format: parquet}", "format parquet but no paths"),
        ("{name: x, format: txt, paths: [a], fallback: ['s3://key:hf_AbCdEf123456@host/a']}", "contains a password"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, entry))
    assert message in str(caught.value)
