"""Code that only a recorded configuration names runs where its user started the run or trusted it, and nowhere else."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import tiny_runs
from vorox.cli import main
from vorox.cli.commands import app
from vorox.core.errors import ConfigError
from vorox.core.user_code import trusted_code
from vorox.core.user_code.extensions import load_function
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import read_run_record

PART = "from pathlib import Path\nPath({mark!r}).write_text('ran')\ndef f(*a, **k):\n    return {{}}\n"
KEYS = (
    "model.kind", "model.mlp", "model.block", "model.activation", "model.attention_kernel", "loss.name",
    "optimizer.name", "schedule.name", "schedule.weight_decay", "train.forward_backward", "eval.functions",
    "log.sinks", "log.metrics", "data.sources.0.format", "data.sources.0.paths",
    "data.sources.0.paths://", "data.sources.0.transforms", "tokenizer.kind",
)  # fmt: skip
LISTS = ("eval.functions", "log.sinks", "log.metrics", "data.sources.0.paths")


@pytest.fixture(autouse=True)
def another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home of its own, and a process that has read and been told nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    forget()
    yield
    forget()


def forget() -> None:
    for known in (trusted_code._stated, trusted_code._recorded, trusted_code._trusted):  # pyright: ignore
        known.clear()
    trusted_code._Command.words, trusted_code._Command.takes_flag = (), False  # pyright: ignore


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this user with a sink of its own, its store, and the sink's file."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "mine.py").write_text(
        "class Sink:\n    name = 'mine'\n    def write(self, step, values): pass\n"
        "    def flush(self): pass\n    def close(self): pass\n"
        "def sink(**k):\n    return Sink()\n"
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
        tiny_runs.use_numpy_engine(monkeypatch)
        tiny_runs.run(tiny_runs.configuration(directory, [f"log.sinks=[{directory / 'mine.py'}:sink]"]))
    return directory


@pytest.fixture
def mine(trained: Path, tmp_path: Path) -> Path:
    """A copy of everything, so that the sink's file has a path of its own."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    shutil.copytree(trained / "state", tmp_path / "state")
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    return run


def strange_run(directory: Path, key: str) -> tuple[Path, Path]:
    """A run directory of somebody else that names code under a key; and the file that the code writes."""
    run, mark = directory / "runs" / "strange", directory / "RAN"
    run.mkdir(parents=True)
    part = run / "part.py"
    part.write_text(PART.format(mark=str(mark)))
    values = json.loads(tiny_runs.configuration(directory).model_dump_json())
    value: Any = f"{part}:f"
    if key.endswith("://"):
        value = [f"{value}://x"]
    elif key.endswith("transforms"):
        value = [{"name": value}]
    elif key in LISTS:
        value = [value]
    *above, last = key.removesuffix("://").split(".")
    place = values
    for name in above:
        place = place[int(name)] if name.isdigit() else place[name]
    place[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    (run / "run.json").write_text(json.dumps({"run_id": "strange", "attempts": []}))
    return run, mark


@pytest.mark.parametrize("key", KEYS)
def test_no_key_of_a_run_of_others_loads_code(key: str, tmp_path: Path) -> None:
    run, mark = strange_run(tmp_path, key)
    name = f"{run / 'part.py'}:f"
    recorded_config(run)
    with pytest.raises(ConfigError, match="names code that you have not trusted") as caught:
        load_function(name, kind="part", where=key)
    digest = hashlib.sha256((run / "part.py").read_bytes()).hexdigest()
    assert name in caught.value.what
    assert digest in caught.value.what
    assert caught.value.hint.endswith("vorox runs show runs/strange --trust-code")
    assert not mark.exists()


READING_KEYS = (
    "model.mlp", "model.block", "log.sinks", "data.sources.0.format", "data.sources.0.transforms", "tokenizer.kind",
)  # fmt: skip


@pytest.mark.parametrize("key", READING_KEYS)
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize(
    "words",
    ["data verify RUN", "data peek RUN", "data stats RUN", "data build RUN", "data grow RUN", "data repair RUN",
     "data fill RUN", "config show RUN", "plan RUN", "train RUN --dry-run", "train RUN", "tune RUN optimizer.lr=1e-3",
     "launch slurm RUN", "parity RUN"],
)  # fmt: skip
def test_no_command_that_takes_a_configuration_runs_that_of_a_run(
    words: str, is_recorded: bool, key: str, tmp_path: Path
) -> None:
    """By its id, by its path and by the path of its file, with run.json and without."""
    run, mark = strange_run(tmp_path, key)
    if not is_recorded:
        (run / "run.json").unlink()
    for name in ("strange", "runs/strange"):
        forget()
        main(words.replace("RUN", name).split())
        assert not mark.exists()


@pytest.mark.parametrize("key", READING_KEYS)
@pytest.mark.parametrize(
    "words",
    ["runs list", "runs show strange", "runs record strange", "checkpoints verify strange",
     "data where strange --step 1", "data where strange --step 1 --slot 0 --text", "dash strange --export page.html",
     "train --resume strange", "generate strange -p x", "replay strange", "export strange --to hf",
     "runs report strange --to r.html"],
)  # fmt: skip
def test_no_command_runs_it(words: str, key: str, tmp_path: Path) -> None:
    _, mark = strange_run(tmp_path, key)
    main([word if word != "strange" else "runs/strange" for word in words.split()])
    assert not mark.exists()


def test_the_page_of_the_plan_names_the_code_instead(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    from vorox.dashboard.runs.run_index import RunIndex
    from vorox.dashboard.server import Answers

    run, mark = strange_run(tmp_path, "model.mlp")
    with pytest.raises(ConfigError, match="names code that you have not trusted"):
        Answers(RunIndex(run.parent)).get("plan", {"id": "strange"})
    assert not mark.exists()


def test_a_relative_path_is_not_that_of_the_viewers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, mark = strange_run(tmp_path, "model.mlp")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(run / "part.py"), "part.py"))
    monkeypatch.chdir(run)
    main(["dash", ".", "--export", "page.html"])
    with pytest.raises(ConfigError, match="have not trusted"):
        load_function("part.py:f", kind="part", where="model.mlp")
    assert not mark.exists()


def load_sink(run: Path) -> object:
    (name,) = recorded_config(run).log.sinks[:1]
    return load_function(name, kind="sink", where="log.sinks.0")


def test_ones_own_run_never_asks_also_after_a_move(mine: Path, tmp_path: Path) -> None:
    assert load_sink(mine)
    forget()
    shutil.move(mine, tmp_path / "elsewhere")
    assert load_sink(tmp_path / "elsewhere")


def test_the_store_belongs_to_the_user_alone(mine: Path, tmp_path: Path) -> None:
    (entry,) = (tmp_path / "state" / "vorox" / "trusted").iterdir()
    if os.name != "nt":
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600
        entry.chmod(0o666)  # anybody could have written it
        with pytest.raises(ConfigError, match="have not trusted"):
            load_sink(mine)


def test_the_record_of_a_real_run_has_the_types_that_readers_rely_on(mine: Path) -> None:
    (attempt,) = read_run_record(mine)["attempts"]
    assert attempt["notes"]["total_steps"] == 12


def test_another_user_is_asked(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another"))
    with pytest.raises(ConfigError, match="have not trusted"):
        load_sink(mine)


def test_edited_code_asks_again_and_the_flag_answers(
    mine: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of the sink is another one, named by the recorded configuration of a known run."""
    edited = tmp_path / "mine.py"
    edited.write_text((trained / "mine.py").read_text() + "# edited\n")
    config = mine / "config.yaml"
    config.write_text(config.read_text().replace(str(trained / "mine.py"), str(edited)))
    with pytest.raises(ConfigError, match="have not trusted"):
        load_sink(mine)
    forget()
    assert main(["runs", "show", str(mine), "--trust-code"]) == 0
    printed = capsys.readouterr().err
    assert f"{edited}:sink" in printed
    assert hashlib.sha256(edited.read_bytes()).hexdigest() in printed
    forget()
    assert load_sink(mine), "another process finds it in the store"
    forget()
    edited.write_text(edited.read_text() + "# again\n")
    with pytest.raises(ConfigError, match="have not trusted"):
        load_sink(mine)


def test_what_the_user_names_is_trusted(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vorox.training.origin.configuration import load_config

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another"))
    (name,) = recorded_config(mine).log.sinks
    recorded_config(mine, [f"log.sinks=[{name}]"])
    assert load_function(name, kind="sink", where="log.sinks.0"), "an override"
    forget()
    recorded_config(mine)
    load_config(mine / "config.yaml")
    with pytest.raises(ConfigError, match="not trusted"):
        load_function(name, kind="sink", where="log.sinks.0")  # the file of a run is no word of the user
    load_config(shutil.copy(mine / "config.yaml", tmp_path / "mine.yaml"))
    assert load_function(name, kind="sink", where="log.sinks.0"), "a file"


def test_a_resume_of_others_code_is_refused_before_anything_changes(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another"))
    tiny_runs.use_numpy_engine(monkeypatch)
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    words = ["train", "--resume", str(mine), "train.num_steps=14"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"vorox train --resume {mine} train.num_steps=14 --trust-code" in said
    assert {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "of another").exists()
    forget()
    assert main([*words, "--trust-code"]) == 0
    forget()
    assert main(["train", "--resume", str(mine), "train.num_steps=16"]) == 0, "the store has it now"


def test_a_module_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "strange_package"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')\n")
    (package / "part.py").write_text("def f(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert trusted_code.file_of("strange_package.part:f") == package / "part.py"
    assert trusted_code.file_of("strange_package:f") == package / "__init__.py"
    assert trusted_code.file_of("strange_package.none:f") is None
    assert trusted_code.file_of("no_such_package.part:f") is None
    assert not (tmp_path / "RAN").exists()


def test_the_flag_is_for_commands_that_run_the_code_of_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly the commands whose help lists it."""
    root: Any = typer.main.get_command(app)
    num_taking = 0
    for name, command in root.commands.items():
        for inner, declared in getattr(command, "commands", {"": command}).items():
            words = [word for word in (name, inner) if word]
            takes = any("--trust-code" in parameter.opts for parameter in declared.params)
            num_taking += takes
            assert main([*words, "--trust-code", "--help"]) == (0 if takes else 2), words
            captured = capsys.readouterr()
            assert takes or "runs show RUN --trust-code" in captured.err
    assert num_taking > 8
    assert trusted_code.take_flag(["generate", "r", "--trust-code", "-p", "x"], bool) == ["generate", "r", "-p", "x"]
    assert trusted_code.take_flag(["generate", "--", "--trust-code"], bool) == ["generate", "--", "--trust-code"]


def test_what_is_no_run_is_trusted_by_a_command_that_takes_it(tmp_path: Path) -> None:
    """Averaged weights name code too, and `vorox runs show` does not know them."""
    (tmp_path / "mine.py").write_text("def act(x): return x\n")
    averaged = tmp_path / "averaged"
    averaged.mkdir()
    trusted_code.mark_recorded({"model": {"activation": f"{tmp_path / 'mine.py'}:act"}}, averaged)
    with pytest.raises(ConfigError) as caught:
        trusted_code.require_trusted(f"{tmp_path / 'mine.py'}:act", "model.activation")
    assert caught.value.hint.endswith("vorox generate averaged --trust-code")


def test_text_that_looks_like_a_function_is_text(tmp_path: Path) -> None:
    assert list(trusted_code.function_names({"webhook": "env:HOME", "a": ["x y:z", "s3://b/c", 5, None]})) == []
    assert list(trusted_code.function_names(["a.py:f", {"b": "m.n:g"}, "lake.py:depot://x/y"])) == [
        "a.py:f", "m.n:g", "lake.py:depot"
    ]  # fmt: skip


OWN = """from helpers import scale
from shapes.square import area as area_of
class Sink:
    name = 'mine'
    def write(self, step, values): pass
    def flush(self): pass
    def close(self): pass
def sink(**k):
    return Sink()
"""


def own_code(folder: Path) -> dict[str, Path]:
    """A sink that imports modules of its folder, also indirectly and inside a function, and others."""
    texts = {
        "mine.py": OWN,
        "helpers.py": "import json\nimport numpy\ndef scale():\n    from deep import inner\n",
        "deep/__init__.py": "", "deep/inner.py": "from . import near\nfrom .far import thing\n", "deep/near.py": "",
        "deep/far.py": "thing = 1\n", "shapes/square.py": "area = 1\n", "other.py": "", "numpy2.py": "",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


def test_the_hash_covers_the_modules_that_a_function_imports_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle: what Python itself imports from the folder."""
    files = own_code(tmp_path / "code")
    counted = {"mine.py", "helpers.py", "deep/__init__.py", "deep/inner.py", "deep/near.py", "deep/far.py"}
    counted |= {"shapes/square.py"}
    program = (
        "import sys, helpers, mine\nhelpers.scale()\n"
        "for m in list(sys.modules.values()):\n    print(getattr(m, '__file__', None) or '')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path / "code")}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    imported = {path for path in map(Path, done.stdout.splitlines()) if path.is_relative_to(tmp_path / "code")}
    assert {files[name] for name in counted} == imported
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    for name in (f"{files['mine.py']}:sink", "mine:sink"):
        path = trusted_code.file_of(name)
        assert path is not None
        assert set(trusted_code.code_files(name, path)) == imported
        before = trusted_code.file_digest(name)
        for other, file in files.items():
            text = file.read_text()
            file.write_text(text + "# edited\n")
            assert (trusted_code.file_digest(name) != before) == (other in counted), other
            file.write_text(text)
        shutil.copytree(tmp_path / "code", tmp_path / "moved", dirs_exist_ok=True)
        assert trusted_code.file_digest(f"{tmp_path / 'moved' / 'mine.py'}:sink") == before, "a move keeps it"


def test_of_an_installed_package_only_its_own_modules_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    for name, text in {
        "mine/__init__.py": "", "mine/loss.py": "import big\nfrom .parts import f\nfrom mine import more\n",
        "mine/parts.py": "def f(): pass\n", "mine/more.py": "", "big/__init__.py": "",
    }.items():  # fmt: skip
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    path = trusted_code.file_of("mine.loss:f")
    assert path is not None
    found = {str(file.relative_to(site)) for file in trusted_code.code_files("mine.loss:f", path)}
    assert found == {"mine/__init__.py", "mine/loss.py", "mine/parts.py", "mine/more.py"}


@pytest.mark.parametrize(
    "source",
    [
        "-" * 900_000 + "1",
        "a" + ".b" * 400_000,
        "\0",
        f"import {'a.' * 90_000}a",
        f"import {'a' * 300}",
        ")(",
        "from . import *",
    ],
)  # fmt: skip
def test_hostile_source_is_hashed_and_not_run(source: str, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(source)
    assert trusted_code.file_digest(f"{tmp_path / 'part.py'}:f") == hashlib.sha256(source.encode()).hexdigest()


def test_a_file_that_is_no_source_is_never_trusted(tmp_path: Path) -> None:
    (tmp_path / "part.py").touch()
    os.truncate(tmp_path / "part.py", 1 << 40)
    assert trusted_code.file_digest(f"{tmp_path / 'part.py'}:f") is None


def test_an_edited_helper_asks_again(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = own_code(tmp_path / "code")
    config = mine / "config.yaml"
    name = f"{files['mine.py']}:sink"
    (known,) = recorded_config(mine).log.sinks
    config.write_text(config.read_text().replace(known, name))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    assert main(["runs", "show", str(mine), "--trust-code"]) == 0
    forget()
    assert load_sink(mine)
    forget()
    files["deep/far.py"].write_text("thing = 2\n")
    with pytest.raises(ConfigError, match="have not trusted") as caught:
        load_sink(mine)
    digest = hashlib.sha256(files["deep/far.py"].read_bytes()).hexdigest()
    assert f"which imports {files['deep/far.py']}  sha256 {digest}" in caught.value.what


def test_a_run_that_is_resumed_in_another_folder_names_the_folder_of_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was started where ``mine.py`` is; nothing is packed before the refusal."""
    home = tmp_path / "start here"
    own_code(home)
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    tiny_runs.use_numpy_engine(monkeypatch)
    outcome = tiny_runs.run(tiny_runs.configuration(home, ["log.sinks=[mine.py:sink]"]))
    shutil.rmtree(home / "cache")
    forget()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    run = outcome.run_directory
    assert main(["train", "--resume", str(run), "train.num_steps=14"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "needs the function mine.py:sink, and there is no such file here" in said
    assert f"cd '{home}' && vorox train --resume" in said
    assert "--trust-code" not in said
    assert not (home / "cache").exists()
    monkeypatch.chdir(home)
    forget()
    assert main(["train", "--resume", str(run), "train.num_steps=14"]) == 0
    (home / "mine.py").write_text(OWN + "# edited\n")
    shutil.rmtree(home / "cache")
    forget()
    assert main(["train", "--resume", str(run), "train.num_steps=16"]) == 2
    assert "have not trusted" in capsys.readouterr().err
    assert not (home / "cache").exists(), "refused before anything is packed"
