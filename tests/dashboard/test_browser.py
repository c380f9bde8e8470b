"""The dashboard in a browser: every page with real runs, live updates, hostile names, and the exported file."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import tiny_runs
from eventually import PATIENCE_SECONDS
from vorox.cli import main

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
CHROMIUM = Path("/usr/bin/chromium")
PATIENCE_MS = 1000 * PATIENCE_SECONDS
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
HOSTILE = "<img src=x onerror=alert(1)>"
PAGES = ("curves", "samples", "data", "health", "plan", "checkpoints", "re_execution", "settings")
OPENED = {"samples": "eval.prompts", "data": "Mixture", "health": "Warnings and errors",
          "plan": "Estimate against actual", "checkpoints": "Commands for step", "settings": "Attempts",
          "re_execution": "Where the time went",
          "curves": "Gradient norm"}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs of 12 steps, and one whose name is HTML."""
    place = tmp_path_factory.mktemp("dashboard")
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_runs.use_numpy_engine(monkeypatch)
        for number, lr in enumerate((0.01, 0.02)):
            config = tiny_runs.configuration(place, [f"run.name=run-{number}", f"optimizer.lr={lr}"])
            directory = tiny_runs.run(config).run_directory
        assert main(["replay", str(directory)]) == 0
    hostile = place / "runs" / HOSTILE
    hostile.mkdir()
    (hostile / "run.json").write_text(json.dumps({"attempts": [{"attempt": 1, "outcome": "killed"}]}), encoding="utf-8")
    (hostile / "events.jsonl").write_text(sample_of(1, HOSTILE, HOSTILE), encoding="utf-8")
    (hostile / "metrics.jsonl").write_text(line_of(1) + line_of(2), encoding="utf-8")
    return place / "runs"


@pytest.fixture(scope="module")
def torch_run(runs: Path) -> str:
    """A finished run of the PyTorch engine in the same folder: its id."""
    return tiny_runs.run(tiny_runs.configuration(runs.parent, ["run.name=prompted"])).run_directory.name


def line_of(step: int) -> str:
    values = {"loss": 5.0 / step, "learning_rate": 0.1, "tokens_total": 64.0 * step}
    return json.dumps({"step": step, "attempt": 1, "time": float(step), "values": values}) + "\n"


def sample_of(step: int, prompt: str, completion: str) -> str:
    fields = {"step": step, "prompt": prompt, "completion": completion}
    return json.dumps({"kind": "sample", "fields": fields}) + "\n"


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    """The URL that ``vorox dash`` prints."""
    command = [sys.executable, "-u", "-m", "vorox", "dash", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        killer = threading.Timer(1200, server.kill)
        killer.start()
        try:
            yield next(line.strip() for line in server.stdout if "http://" in line)
        finally:
            killer.cancel()
            server.terminate()


class Watched:
    """A page of the browser, with everything it logged and requested."""

    def __init__(self, page: playwright.Page) -> None:
        self.page, self.problems, self.requests = page, list[str](), list[str]()
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: (self.problems.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address: str, text: str) -> None:
        self.page.goto(address)
        self.page.get_by_text(text, exact=False).first.wait_for()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["wide light", "narrow dark"])
def browser(request: pytest.FixtureRequest) -> Iterator[Watched]:
    width, scheme = request.param
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"], timeout=PATIENCE_MS)
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(PATIENCE_MS)
        yield Watched(context.new_page())
        chromium.close()


def run_ids(runs: Path) -> list[str]:
    return sorted(path.name for path in runs.iterdir() if path.name.startswith("run-"))


def fits(browser: Watched) -> bool:
    return browser.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def is_whole(browser: Watched) -> bool:
    """Whether no table of stacked rows has to be scrolled sideways, and every cell that has a name has a value."""
    tables = browser.page.locator(".stacked")
    sizes = tables.evaluate_all("all => all.map((one) => one.scrollWidth - one.clientWidth)")
    named = tables.locator("tbody tr td:first-child").all_text_contents()
    return max(sizes, default=0) <= 0 and all(name.strip() for name in named)


def test_every_page(browser: Watched, runs: Path, url: str) -> None:
    ids, base = run_ids(runs), url.split("?")[0]
    browser.open(url, ids[0])
    browser.page.get_by_text(HOSTILE).first.wait_for()
    assert fits(browser)
    for page in PAGES:
        browser.open(f"{base}#/run/{ids[0]}/{page}", OPENED[page])
        assert fits(browser), page
        assert not browser.page.locator(".problem").count(), page
        assert is_whole(browser), page
        tab = browser.page.locator(".tabs [aria-current]").bounding_box()
        assert tab is not None
        assert tab["x"] >= 0, page
        assert tab["x"] + tab["width"] <= browser.page.evaluate("innerWidth"), page
    browser.open(f"{base}#/compare?ids={'/'.join(ids)}", "differs at step")
    browser.page.get_by_text("optimizer.lr", exact=True).first.wait_for()
    browser.page.get_by_text("bit-exact, 12 steps; from step 0 to step 12, 3 checkpoints compared").wait_for()
    browser.page.get_by_text(f"Not checked: {ids[0]}.").wait_for()
    assert fits(browser)
    assert is_whole(browser)
    browser.open(f"{base}#/run/{HOSTILE}/samples", "Samples by step")
    assert browser.page.get_by_text(HOSTILE).count() >= 3
    assert not browser.page.locator("main img").count()
    assert browser.problems == []
    assert {re.match(r"[a-z]+:(//[^/]+)?", request)[0] for request in browser.requests} <= {base.rstrip("/"), "data:"}


def test_labels_of_an_axis_in_bytes_differ(browser: Watched, runs: Path, url: str) -> None:
    browser.open(url, run_ids(runs)[0])
    labels = """(step) => import('/static/format.js').then(({ bytes }) =>
        [0, 1, 2].map((number) => bytes(2 ** 29 + number * step, step)))"""
    assert browser.page.evaluate(labels, 2**18) == ["512.0 MiB", "512.3 MiB", "512.5 MiB"]
    assert browser.page.evaluate(labels, 2**16) == ["512.00 MiB", "512.06 MiB", "512.13 MiB"]
    assert browser.page.evaluate(labels, 2**20) == ["512 MiB", "513 MiB", "514 MiB"]


def test_a_commit_stays_on_one_line_in_a_crowded_table(browser: Watched, runs: Path, url: str) -> None:
    browser.open(url, run_ids(runs)[0])
    crowd = "all => all.map((one) => (one.closest('td').style.maxWidth = '20px', one.getClientRects().length))"
    lines = browser.page.locator("td code").evaluate_all(crowd)
    assert lines
    assert set(lines) == {1}


def test_the_newest_of_many_samples_is_in_view(browser: Watched, runs: Path, url: str) -> None:
    sampled = runs / "sampled"
    sampled.mkdir(exist_ok=True)
    (sampled / "run.json").write_text(json.dumps({"attempts": [{"attempt": 1, "outcome": "killed"}]}), encoding="utf-8")
    lines = [sample_of(step, "a prompt", "words " * 9) for step in range(1, 13)]
    (sampled / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    (sampled / "metrics.jsonl").write_text(line_of(12), encoding="utf-8")
    browser.open(f"{url}#/run/sampled/samples", "a prompt")
    region = browser.page.get_by_role("region", name="Samples by step")
    around = region.bounding_box()
    assert around is not None
    for shown in (region.locator("td").last, region.get_by_text("a prompt", exact=True)):
        box = shown.bounding_box()
        assert box is not None
        assert box["x"] >= around["x"]
        assert box["x"] + box["width"] <= around["x"] + around["width"] + 1
    at_corner = "(one, [x, y]) => one.contains(document.elementFromPoint(x + 4, y + 4))"
    assert region.locator("tbody th").evaluate(at_corner, [box["x"], box["y"]]), "no sample lies over the prompt"
    if browser.page.evaluate("innerWidth") < 760:
        lefts = region.locator("td").evaluate_all("all => all.map((one) => one.getBoundingClientRect().left)")
        shown_lefts = [left for left in lefts if abs(left - around["x"]) < around["width"] - 1]
        assert shown_lefts == [pytest.approx(around["x"], abs=1)], "one sample at a time, and none is cut"
    assert fits(browser)
    assert browser.problems == []


def test_the_documents_of_a_step_lead_to_its_steps(browser: Watched, runs: Path, url: str) -> None:
    browser.open(url, "Runs")
    browser.open(f"{url.split('?')[0]}#/run/{run_ids(runs)[0]}/data?step=3", "documents in 4 rows")
    document = browser.page.locator("button.document").first
    document.focus()
    browser.page.keyboard.press("Enter")
    steps = browser.page.get_by_role("region", name="Steps of the document")
    steps.wait_for()
    assert steps.get_by_role("button", name="3", exact=True).count() >= 1
    assert browser.problems == []


def test_a_curve_shows_the_documents_of_the_step_under_the_cursor(browser: Watched, runs: Path, url: str) -> None:
    browser.open(f"{url}#/run/{run_ids(runs)[0]}/curves", "Documents of step")
    step = browser.page.get_by_role("spinbutton", name="Step")
    found = set[str]()
    for fraction in (0.2, 0.8):
        chart = browser.page.locator(".u-over").first
        box = chart.bounding_box()
        assert box is not None
        with browser.page.expect_response(lambda response: "/api/documents" in response.url):
            chart.hover(position={"x": fraction * box["width"], "y": box["height"] / 2})
        browser.page.locator(".document").first.wait_for()
        found.add(step.input_value())
    assert len(found) == 2, "another step at another place"
    assert all(1 <= int(value) <= 12 for value in found)
    assert browser.problems == []


@pytest.mark.torch
@pytest.mark.jax
def test_the_verdicts_of_two_engines_are_compared(browser: Watched, runs: Path, url: str, torch_run: str) -> None:
    """What ``vorox parity`` finds about a run appears while the page is open."""
    browser.open(f"{url}#/compare?ids={run_ids(runs)[0]}/{torch_run}", "Replay chains: ")
    browser.page.get_by_text("Parity: ").wait_for()
    before = browser.page.get_by_text("Equal over 2 steps").count()
    assert main(["parity", str(runs / torch_run), "--steps", "2", "runtime.num_threads=null"]) == 0
    browser.page.get_by_text("Equal over 2 steps").nth(before).wait_for()
    assert fits(browser)
    assert browser.problems == []


@pytest.mark.torch
def test_the_box_prompts_a_checkpoint(browser: Watched, runs: Path, url: str, torch_run: str) -> None:
    """The completion is that of ``vorox generate`` with the same seed."""
    browser.open(f"{url}#/run/{torch_run}/samples", "Prompt a checkpoint")
    browser.page.get_by_role("textbox", name="Prompt").fill("def ")
    browser.page.get_by_label("Tokens").fill("8")
    browser.page.get_by_role("button", name="Complete").click()
    answer = browser.page.locator(".answer pre")
    browser.page.locator(".answer pre, .answer .problem").wait_for()
    assert not browser.page.locator(".problem").count(), browser.page.locator(".problem").text_content()
    words = [
        "generate",
        str(runs / torch_run),
        "--prompt",
        "def ",
        "--tokens",
        "8",
        "--temperature",
        "0.8",
        "--seed",
        "0",
    ]
    done = subprocess.run([sys.executable, "-m", "vorox", *words], capture_output=True, text=True, check=True)
    assert (answer.text_content() or "").strip() == done.stdout.strip()
    assert browser.problems == []


def test_a_training_run_updates_the_page(browser: Watched, runs: Path, url: str) -> None:
    browser.open(url, "Live")
    browser.page.goto(f"{url.split('?')[0]}#/run/{HOSTILE}/curves")
    facts = browser.page.locator(".facts")
    facts.get_by_text("Loss").wait_for()
    facts.get_by_text(add_step(runs), exact=True).wait_for()
    assert browser.problems == []


def add_step(runs: Path) -> str:
    """Append a step to the hostile run; return its loss as the page shows it."""
    metrics = runs / HOSTILE / "metrics.jsonl"
    step = len(metrics.read_text(encoding="utf-8").splitlines()) + 1
    with metrics.open("a", encoding="utf-8") as file:
        file.write(line_of(step))
    return f"{5 / step:.3f}"


@pytest.mark.parametrize("browser", [(1280, "light")], indirect=True)
@pytest.mark.parametrize("meanwhile", ["the page loads", "the page cannot load", "nothing watches", "an answer fails"])
def test_no_change_is_missed(browser: Watched, runs: Path, url: str, meanwhile: str) -> None:
    """The last change of a run is shown, wherever it falls."""
    page, facts, held = browser.page, browser.page.locator(".facts"), list[playwright.Route]()
    if meanwhile == "nothing watches":  # this connection ends at once, the browser makes another after some seconds
        ended = "event: watching\ndata: {}\n\n"
        page.route("**/api/live", lambda route: route.fulfill(content_type="text/event-stream", body=ended), times=1)
    if meanwhile == "the page cannot load":
        page.route("**/api/curves?*", lambda route: route.fulfill(status=500, body="{}"), times=1)
    if meanwhile == "the page loads":
        page.route("**/api/curves?*", lambda route: held.append(route), times=1)
    browser.open(url, HOSTILE)
    page.goto(f"{url.split('?')[0]}#/run/{HOSTILE}/curves")
    facts.get_by_text("Loss").wait_for()
    if meanwhile == "an answer fails":
        page.route("**/api/runs?*", lambda route: route.fulfill(status=500, body="{}"), times=1)
    shown = add_step(runs)
    if meanwhile == "the page loads":
        page.wait_for_timeout(3000)  # the change is reported within a second
        held[0].continue_()
    facts.get_by_text(shown, exact=True).wait_for()


@pytest.mark.torch
def test_a_process_that_trains_updates_every_page(browser: Watched, runs: Path, url: str) -> None:
    """Every page updates live while a run trains, and shows the final state after the run is stopped."""
    tiny_runs.configuration(runs.parent)
    words = ["train", "tiny.yaml", "--name", "live", "--resume", "never", "train.num_steps=100000", "log.every_steps=1",
             "checkpoint.every_steps=20", "eval.every_steps=20", "eval.prompts=['the']", "eval.sample_tokens=4",
             "runtime.rehearsal=false"]  # fmt: skip
    command = [sys.executable, "-m", "vorox", *words]
    with subprocess.Popen(command, cwd=runs.parent, stdout=subprocess.PIPE, text=True) as training:
        killer = threading.Timer(900, training.kill)
        killer.start()
        try:
            assert training.stdout is not None
            name = Path(next(line for line in training.stdout if "Run directory:" in line).split()[-1]).name
            threading.Thread(target=training.stdout.read, daemon=True).start()
            base = url.split("?")[0]
            browser.open(f"{url}#/run/{name}/curves", "running")
            pages = [
                *(f"run/{name}/{page}" for page in PAGES if page != "settings"),
                "runs",
                f"compare?ids={name}/{run_ids(runs)[0]}",
            ]
            for page in pages:
                browser.page.goto(f"{base}#/{page}")
                place = browser.page.locator("main > .page")
                place.locator(".card, .runs").first.wait_for()
                for _ in range(2):
                    before = place.text_content()
                    playwright.expect(place).not_to_have_text(before or "", timeout=PATIENCE_MS)
                assert fits(browser), page
            browser.page.goto(f"{base}#/run/{name}/health")
            training.terminate()
            browser.page.get_by_text("stopped").first.wait_for()
        finally:
            killer.cancel()
            training.kill()
    assert browser.problems == []


def test_strangers_are_refused(browser: Watched, runs: Path, url: str, tmp_path: Path) -> None:
    """Without the right token nothing is shown; a page of another origin cannot read, nor send, with the cookie."""
    base = url.split("?")[0]
    send = """async ([url, options]) => {
        try { return await (await fetch(url, { credentials: 'include', ...options })).text(); }
        catch (error) { return 'blocked'; } }"""
    browser.page.goto(f"{base}?token=wrong-horse-battery")
    assert "vorox dash" in (browser.page.locator("body").text_content() or "")
    assert run_ids(runs)[0] not in browser.page.content()
    browser.open(url, run_ids(runs)[0])  # the browser has the cookie from here on
    assert run_ids(runs)[0] in browser.page.evaluate(send, [f"{base}api/runs", {}]), "the page itself may ask"
    (tmp_path / "index.html").write_text("<p>another site</p>", encoding="utf-8")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        try:
            browser.open(f"http://127.0.0.1:{site.server_port}/index.html", "another site")
            for path, options in (("api/runs", {}), ("api/generate", {"method": "POST", "body": "{}"})):
                assert browser.page.evaluate(send, [f"{base}{path}", options]) == "blocked"
        finally:
            site.shutdown()


def test_a_stall_is_shown_with_the_stacks_of_its_ranks(browser: Watched, runs: Path, url: str) -> None:
    watchdog = runs / run_ids(runs)[1] / "watchdog"
    watchdog.mkdir(exist_ok=True)
    record = {"attempt": 1, "at": "2026-01-01T00:00:00+00:00", "what": f"Rank 1 on host b {HOSTILE}", "where": "step 5",
              "traceback": f"rank 1:\n  File {HOSTILE} in all_reduce"}  # fmt: skip
    (watchdog / "stall-00001.json").write_text(json.dumps(record), encoding="utf-8")
    browser.open(f"{url}#/run/{run_ids(runs)[1]}/health", "Stall of attempt 1")
    browser.page.get_by_text("Rank 1 on host b").wait_for()
    browser.page.get_by_text("Stacks of all ranks").press("Enter")
    browser.page.locator("pre.trace", has_text="in all_reduce").wait_for()
    assert not browser.page.locator("main img").count()
    assert fits(browser)
    assert browser.problems == []


def test_an_exported_file_opens_from_disk(browser: Watched, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "runs.html"
    assert main(["dash", str(runs), "--export", str(file)]) == 0
    ids = run_ids(runs)
    browser.open(file.as_uri(), ids[0])
    for page in PAGES:
        browser.page.goto(f"{file.as_uri()}#/run/{ids[0]}/{page}")
        browser.page.get_by_text(OPENED[page]).first.wait_for()
        assert fits(browser), page
        assert not browser.page.locator(".problem").count(), page
    browser.page.get_by_text("Exported").wait_for()
    assert browser.problems == []
    assert {request.split(":")[0] for request in browser.requests} <= {"file", "data"}
