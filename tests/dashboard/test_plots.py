"""Plots against the numbers that went in, read back from the SVG; and the report against the run's own records."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest

import tiny_runs
from vorox import open_run
from vorox.cli import main
from vorox.dashboard.metrics.downsampling import moving_average

matplotlib = pytest.importorskip("matplotlib")

Scale = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
Array = npt.NDArray[np.float64]
HOSTILE = "_$x_a$ <img src=x onerror=alert(1)>&amp;"
SVG = "{http://www.w3.org/2000/svg}"
NUM_STEPS, STEP_TOKENS, NONFINITE_STEP = 40, 2048, 17


def write_run(directory: Path, *, seed: int, first_loss: float = 4.0) -> dict[str, Array]:
    """A run as its metrics file shows it, one step not finite, resumed after step 20; return its columns."""
    chooser = np.random.default_rng(seed)
    steps = np.arange(1, NUM_STEPS + 1)
    loss = np.linspace(first_loss, 2, NUM_STEPS) + chooser.normal(0, 0.02, NUM_STEPS)
    loss[NONFINITE_STEP - 1] = math.nan
    seconds = np.cumsum(chooser.uniform(10, 90, NUM_STEPS))
    seconds -= seconds[0]
    columns = {
        "steps": steps.astype(float), "tokens": steps * float(STEP_TOKENS), "seconds": seconds, "loss": loss,
        "learning_rate": 1e-3 * steps, "tokens_per_second": chooser.uniform(900, 1100, NUM_STEPS),
        "memory/host_peak_bytes": 1e9 + 1e7 * steps, "eval/loss": loss + 0.1,
    }  # fmt: skip
    seconds[20:] -= seconds[20] - seconds[19]  # the time between attempts does not count
    lines = [json.dumps({"resume_step": 20, "attempt": 2})]
    for index, step in enumerate(steps.tolist()):
        values = {name: columns[name][index] for name in list(columns)[3:7]} | {"tokens_total": step * STEP_TOKENS}
        if step % 10 == 0:
            values["eval/loss"] = columns["eval/loss"][index]
        texts = {name: "NaN" if value != value else value for name, value in values.items()}
        attempt = 1 + (step > 20)
        record = {"step": step, "attempt": attempt, "time": 1e9 + 500 * attempt + seconds[index], "values": texts}
        lines.insert(index + (step > 20), json.dumps(record))
    directory.mkdir(parents=True)
    (directory / "config.yaml").touch()
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return columns


def groups_of(svg: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {group.get("id", ""): group for group in svg.iter(f"{SVG}g")}


def points_of(group: ElementTree.Element) -> Array:
    """The points of a curve on the page; a gap in it is no point."""
    path = group.find(f"{SVG}path")
    assert path is not None
    return np.array([[float(x), float(y)] for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))])


def ticks_of(axis: ElementTree.Element) -> tuple[Array, Array]:
    """The values of an axis' labelled ticks, and where their labels are."""
    sizes = {"k": 1e3, "M": 1e6, "G": 1e9, "": 1.0}
    found = [
        (float(match[1]) * sizes[match[2]], float(text.get("x", "")), float(text.get("y", "")))
        for text in axis.iter(f"{SVG}text")
        if (match := re.fullmatch(r"([\d.]+) ?([kMG]?)B?", text.text or ""))
    ]
    table = np.array(found)
    return table[:, 0], table[:, 1:]


def linear(values: Array) -> Array:
    return values


def texts_of(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("position", "label", "unit", "first_loss", "scale", "axis"),
    [
        pytest.param("steps", "step", 1.0, 4.0, linear, "nats", marks=pytest.mark.slow),
        pytest.param("tokens", "tokens", 1.0, 9.0, np.log, "nats, log scale", marks=pytest.mark.slow),
        ("seconds", "minutes of training", 60.0, 9.0, np.log, "nats, log scale"),
    ],
)
def test_curves_are_the_numbers_of_the_runs(
    position: str, label: str, unit: float, first_loss: float, scale: Scale, axis: str, tmp_path: Path
) -> None:
    """One affine map of position and value explains every point of every curve of a panel, and its ticks."""
    names = ["one", HOSTILE]
    runs = [write_run(tmp_path / name, seed=seed, first_loss=first_loss) for seed, name in enumerate(names)]
    words = ["runs", "plot", *(str(tmp_path / name) for name in names), "--x", position, "--smoothing", "0.5"]
    assert main([*words, "--to", str(tmp_path / "plot.svg")]) == 0
    svg = ElementTree.parse(tmp_path / "plot.svg").getroot()
    groups, texts = groups_of(svg), texts_of(svg)
    panels: dict[str, Scale] = {"loss": scale} | dict.fromkeys(
        ("learning_rate", "tokens_per_second", "memory/host_peak_bytes"), linear
    )
    for panel, (metric, transform) in enumerate(panels.items()):
        drawn, expected = [], []
        for index, run in enumerate(runs):
            curves = {f"{metric}-{index}": (slice(None), run[metric])}
            if metric in {"loss", "tokens_per_second"}:
                curves[f"{metric}-{index}-smooth"] = (slice(None), moving_average(run[metric], 0.5))
            if metric == "loss":
                curves[f"eval/loss-{index}"] = (slice(9, None, 10), run["eval/loss"])
                markers = list(groups[f"eval/loss-{index}"].iter(f"{SVG}use"))
                assert len(markers) == NUM_STEPS // 10
            for name, (rows, values) in curves.items():
                x, y = run[position][rows] / unit, transform(values[rows])
                points = points_of(groups[name])
                assert len(points) == np.isfinite(y).sum(), name
                drawn.append(points)
                expected.append(np.stack([x, y], axis=1)[np.isfinite(y)])
        for column, tolerance in ((0, 0.01), (1, 0.02)):  # of a unit of the page; values have six digits
            line, want = np.concatenate(drawn)[:, column], np.concatenate(expected)[:, column]
            fit = np.polyfit(want, line, 1)
            assert np.abs(np.polyval(fit, want) - line).max() < tolerance, metric
            values, places = ticks_of(groups[f"matplotlib.axis_{2 * panel + column + 1}"])
            offsets = places[:, column] - np.polyval(fit, transform(values) if column else values)
            assert len(values) >= 2
            assert np.ptp(offsets) < 0.1, "labels stand where their values are, or all equally far below"
            assert abs(offsets[0]) < 5 * column + 0.1
    assert texts.count(label) == 4
    assert {axis, "learning rate", "tokens per second", "peak memory"} <= set(texts)
    assert {"Loss", "Learning rate", "Throughput", "Memory (host)"} <= set(texts)
    assert {*names, "training", "moving average, weight 0.5", "validation"} <= set(texts)
    assert not list(svg.iter(f"{SVG}img"))


@pytest.mark.slow
def test_equal_runs_give_equal_bytes_under_any_style_of_the_user(tmp_path: Path) -> None:
    for name in ("run", "again/run"):
        write_run(tmp_path / name, seed=1)
    for ending in ("png", "svg"):
        files = [tmp_path / f"{number}.{ending.upper()}" for number in range(2)]
        assert main(["runs", "plot", str(tmp_path / "run"), "--to", str(files[0])]) == 0
        with matplotlib.rc_context({"axes.labelsize": 20, "axes.facecolor": "red", "svg.fonttype": "path"}):
            assert main(["runs", "plot", str(tmp_path / "again" / "run"), "--to", str(files[1])]) == 0
        assert files[0].read_bytes() == files[1].read_bytes()
    assert (tmp_path / "0.PNG").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
def test_runs_of_one_name_are_told_apart_and_a_run_named_twice_is_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first/run", "second/run"):
        write_run(tmp_path / name, seed=1)
    assert main(["runs", "plot", "first/run", "second/run", "first/../first/run", "--to", "both.svg"]) == 0
    svg = ElementTree.parse("both.svg").getroot()
    assert [text for text in texts_of(svg) if text.endswith("/run")] == ["first/run", "second/run"]
    assert {name for name in groups_of(svg) if re.fullmatch(r"loss-\d", name)} == {"loss-0", "loss-1"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("plot run --to plot.jpg", "plot.jpg does not end in .png or .svg"),
        ("plot run --to plot", "name it plot.png"),
        ("report run --to plot.svg", "name it plot.html"),
        ("plot empty --to plot.png", "empty has no metrics to plot"),
        ("plot nobody --to plot.png", "nobody"),
        ("plot run --to plot.png --x epochs", "--x"),
        ("plot run --to plot.png --smoothing 1", "--smoothing"),
        ("plot run 1 2 3 4 5 6 7 --to plot.png", "at most 7 runs, not 8"),
    ],
)
def test_mistakes(
    words: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "run", seed=0)
    for number in range(1, 8):
        shutil.copytree("runs/run", f"runs/{number}")
    Path("runs/empty").mkdir()
    Path("runs/empty/config.yaml").touch()
    assert main(["runs", *words.split()]) == 2
    assert text in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not list(Path().glob("plot*"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [["plot", "run", "--to", "plot.png"], ["report", "run", "--to", "page.html"]])
def test_a_missing_package_names_the_command_that_installs_it(words: list[str]) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None; "
        f"from vorox.cli import main; sys.exit(main(['runs', *{words!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the package matplotlib" in done.stderr
    assert "pip install" in done.stderr
    assert "[plot]" in done.stderr


class Page(HTMLParser):
    """Elements, attributes and table cells of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.sections: dict[str, list[list[str]]] = {}
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        if tag in {"h1", "h2"}:
            self.headings.append("")
        elif tag == "tr":
            self.sections.setdefault(self.headings[-1], []).append([])
        elif tag in {"td", "th"}:
            self.sections[self.headings[-1]][-1].append("")
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"h1", "h2"} & set(self._open):
            self.headings[-1] += data
        elif {"td", "th"} & set(self._open):
            self.sections[self.headings[-1]][-1][-1] += data


def test_the_report_shows_what_the_run_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    for seed, name in enumerate(("wiki", "code")):
        tiny_runs.write_text(tmp_path / name, seed=seed)
    sources: list[dict[str, Any]] = [
        {"name": name, "format": "jsonl", "paths": [str(tmp_path / name)], "weight": weight}
        for name, weight in (("wiki", 3), ("code", 1))
    ]
    config = tiny_runs.configuration(tmp_path, [f"data.sources={json.dumps(sources)}", "checkpoint.keep_last=9"])
    directory = tiny_runs.run(config).run_directory
    run = directory.rename(directory.with_name(HOSTILE))
    text = "<script>alert(1)</script> \x00\x1b[2J 'so' -> it\nends"
    with (run / "events.jsonl").open("a", encoding="utf-8") as events:
        for step in range(1, 13):
            fields = {"step": step, "prompt": HOSTILE, "completion": text}
            events.write(json.dumps({"kind": "sample", "fields": fields}) + "\n")
    for name in ("one", "two"):
        assert main(["runs", "report", str(run), "--to", str(tmp_path / f"{name}.html")]) == 0
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()

    markup = (tmp_path / "one.html").read_text(encoding="utf-8")
    page, opened = Page(markup), open_run(run)
    assert page.headings[0] == HOSTILE
    assert not page.tags.keys() & {"script", "img", "link", "iframe", "a"}
    assert not {name for name in page.attributes if name.startswith("on") or name in {"src", "href"}}
    svg = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", markup, re.DOTALL)[0])
    metrics = opened.metrics()
    assert len(points_of(groups_of(svg)["loss-0"])) == sum("loss" in values for values in metrics.values())

    rows = Counter(row.source for step in range(1, 13) for row in opened.where(step))
    assert [row[:3] + row[4:5] for row in page.sections["Data"][1:]] == [
        [name, share, f"{rows[name] / rows.total():.1%}", str(rows[name])]
        for name, share in (("wiki", "75.0%"), ("code", "25.0%"))
    ]
    shown = text.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert page.sections["Samples"][1:] == [[f"\n{HOSTILE}", step, f"\n{shown}"] for step in ("1", "5", "8", "12")]
    assert [row[0] for row in page.sections["Checkpoints"][1:]] == ["4", "8", "12"]
    losses = {step: values["eval/loss"] for step, values in metrics.items() if "eval/loss" in values}
    best = min(losses, key=losses.__getitem__)
    results = {row[0]: row[2:] for row in page.sections["Results"][1:]}
    assert results["eval/loss"] == [f"{losses[step]:.5g} (step {step})" for step in (12, best)]
    assert [row[3] for row in page.sections["Attempts"][1:]] == ["finished"]


def test_the_report_of_a_run_that_left_next_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record = {"attempts": [{"attempt": 1, "outcome": HOSTILE}]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert main(["runs", "report", str(tmp_path / "run"), "--to", str(tmp_path / "run.html")]) == 0
    markup = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "No metrics are recorded." in markup
    titles = ["attempt", "started", "ended", "outcome", "commit"]
    assert Page(markup).sections == {"Attempts": [titles, ["1", "-", "-", HOSTILE, "-"]]}
