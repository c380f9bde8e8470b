"""Who may use the dashboard: token, Host, Origin, headers; and what a request may name."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventually import PATIENCE_SECONDS, wait_until
from vorox.cli import main

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from vorox.dashboard.runs.run_index import RunIndex
from vorox.dashboard.server import application
from vorox.web.access import Access

HOSTILE = "<img src=x onerror=alert(1)>"
TOKEN = "correct-horse-battery"


def sample_into(directory: Path, prompt: str, completion: str) -> None:
    record = {"kind": "sample", "fields": {"step": 1, "prompt": prompt, "completion": completion}}
    (directory / "events.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two run directories; the name of one is HTML."""
    for name in ("plain", HOSTILE):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        attempts = [{"attempt": 1, "outcome": "finished", "started_at": "2026-01-01T00:00:00Z", "notes": {}}]
        (directory / "run.json").write_text(json.dumps({"attempts": attempts}), encoding="utf-8")
        line = json.dumps({"step": 1, "attempt": 1, "time": 1.0, "values": {"loss": 2.5, HOSTILE: 1.0}})
        (directory / "metrics.jsonl").write_text(line + "\n", encoding="utf-8")
        sample_into(directory, "a -> b", HOSTILE)
    return tmp_path / "runs"


def client(root: Path, *, host: str = "127.0.0.1", token: str | None = TOKEN, header: str | None = None) -> TestClient:
    app = application(RunIndex(root), Access(host, 7860, token))
    return TestClient(app, base_url=f"http://{header or '127.0.0.1:7860'}", follow_redirects=False)


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/live", "/static/main.js", "/nothing", "/?token=wrong"])
def test_every_path_needs_the_token(root: Path, path: str) -> None:
    answer = client(root).get(path)
    assert answer.status_code == 401
    assert "vorox dash" in answer.text
    assert TOKEN not in answer.text


def test_the_url_exchanges_the_token_for_a_cookie(root: Path) -> None:
    browser = client(root)
    answer = browser.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert browser.get("/").status_code == 200
    assert browser.get("/api/runs").status_code == 200
    assert client(root).get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("given", ["c", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), TOKEN[1:], "x" * len(TOKEN), ""])
def test_only_the_whole_token_is_accepted(root: Path, given: str) -> None:
    browser = client(root)
    assert browser.get("/api/runs", headers={"Authorization": f"Bearer {given}"}).status_code == 401
    assert browser.get("/", params={"token": given}).status_code == 401
    name = Access("127.0.0.1", 7860, TOKEN).cookie
    assert browser.get("/api/runs", headers={"Cookie": f"{name}={given}"}).status_code == 401


def test_the_cookie_reveals_no_token_and_opens_no_other_server(root: Path) -> None:
    """A browser sends a cookie of 127.0.0.1 to the servers of all its ports."""
    answer = client(root).get(f"/?token={TOKEN}")
    value = answer.cookies[Access("127.0.0.1", 7860, TOKEN).cookie]
    assert TOKEN not in value
    other = Access("127.0.0.1", 7861, TOKEN)
    another = TestClient(application(RunIndex(root), other), base_url="http://127.0.0.1:7861")
    assert another.get("/api/runs", headers={"Cookie": f"{other.cookie}={value}"}).status_code == 401
    assert another.get("/api/runs", headers={"Authorization": f"Bearer {value}"}).status_code == 401


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200)])
def test_an_image_of_another_page_is_not_served_even_without_a_token(root: Path, site: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
    assert client(root, token=None).get("/api/samples", params={"id": "plain"}, headers=headers).status_code == status


@pytest.mark.parametrize(
    "header", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "10.0.0.1", "", "[evil", "[::1"]
)
def test_a_rebound_name_is_refused(root: Path, header: str) -> None:
    browser = client(root, token=None)
    assert browser.get("/api/runs", headers={"Host": header}).status_code == 403


@pytest.mark.parametrize("header", ["127.0.0.1:7860", "localhost:7860", "localhost:9000", "[::1]:7860"])
def test_names_of_this_machine_are_served(root: Path, header: str) -> None:
    assert client(root, token=None).get("/api/runs", headers={"Host": header}).status_code == 200


def test_a_public_address_serves_addresses_but_no_foreign_name(root: Path) -> None:
    browser = client(root, host="0.0.0.0")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert browser.get("/api/runs", headers={**headers, "Host": "192.168.1.5:7860"}).status_code == 200
    assert browser.get("/api/runs", headers={**headers, "Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1:9999",
        "null",
        "https://localhost:7860",
        "http://127.0.0.1:78600",
        "http://127.0.0.1:7860.evil.example",
        "http://[",
        "http://127.0.0.1:7860@evil.example",
        "http://127.0.0.1",
    ],
)
def test_other_origins_are_refused(root: Path, origin: str) -> None:
    headers = {"Origin": origin, "Authorization": f"Bearer {TOKEN}"}
    assert client(root).get("/api/runs", headers=headers).status_code == 403
    assert client(root).post("/api/generate", headers=headers, json={}).status_code == 403
    same = {**headers, "Origin": "http://127.0.0.1:7860"}
    assert client(root).get("/api/runs", headers=same).status_code == 200


def test_a_form_of_another_site_cannot_post(root: Path) -> None:
    answer = client(root, token=None).post("/api/generate", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_a_body_is_bounded_while_it_arrives(root: Path) -> None:
    """A chunked body declares no length."""
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 16
            yield b" " * (1 << 16)

    headers = {"Content-Type": "application/json"}
    answer = client(root, token=None).post("/api/generate", content=chunks(), headers=headers)
    assert answer.status_code == 413
    assert "larger than 128 KiB" in answer.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"id": "plain", "step": NaN}', b'{"id": "plain", "step": 1e999}', b'{"id": "plain", "step": -Infinity}',
        b'{"id": "plain", "step": true}', b'{"id": "plain", "step": "1"}', b'{"id": "plain", "seed": 1e30}',
        b"[" * 100_000, b'{"id": ' + b"[" * 50_000, b"{", b"\xff", b'"text"', b"5",
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(root: Path, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client(root, token=None).post("/api/generate", content=body, headers=headers)
    assert answer.status_code == 400, answer.text


def test_the_policy_allows_no_inline_script_and_no_other_host(root: Path) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/nothing"):
        headers = client(root, token=None).get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert not re.search(r"https?:|\*", policy)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert client(root, token=None).get("/static/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize("name", ["../plain", "..", "/etc", "plain/../plain", "missing", ""])
def test_only_known_runs_are_served(root: Path, name: str) -> None:
    answer = client(root, token=None).get("/api/samples", params={"id": name})
    assert answer.status_code == 400
    assert "not found" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py"])
def test_static_files_stay_in_their_folder(root: Path, path: str) -> None:
    assert client(root, token=None).get(path).status_code == 404


def test_hostile_text_is_data(root: Path) -> None:
    browser = client(root, token=None)
    assert {run["id"] for run in browser.get("/api/runs").json()["runs"]} == {"plain", HOSTILE}
    answer = browser.get("/api/samples", params={"id": HOSTILE})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"steps": [1], "prompts": [{"prompt": "a -> b", "texts": [HOSTILE]}]}
    assert browser.get("/api/curves", params={"id": HOSTILE}).json()["metrics"][HOSTILE]["values"] == [1.0]


def test_the_page_never_sets_html() -> None:
    static = Path(__file__).parents[2] / "src" / "vorox" / "dashboard" / "static"
    for path in sorted(static.rglob("*.js")):
        if "vendor" not in path.parts:
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(", text), (
                path
            )


def test_an_export_cannot_leave_its_data_element(root: Path, tmp_path: Path) -> None:
    sample_into(root / "plain", "p", "</script><script>alert(1)</script>")
    assert main(["dash", str(root), "--export", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "</script><script>alert" not in page
    assert HOSTILE not in page
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page.replace(' href="#', " #"))
    assert not re.search(r"^import\b", page, re.MULTILINE)


def test_the_dashboard_takes_its_token_from_the_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other users see a command line, but not the environment."""
    monkeypatch.setenv("VOROX_TOKEN", "short")
    assert main(["dash", str(root)]) == 2
    assert "fewer than 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--host", "0.0.0.0", "--no-token"], 2, "needs a token"),
        (["--token", "short"], 2, "fewer than 8"),
        (["--host", "192.0.2.1"], 2, "Cannot listen"),
    ],
)
def test_unsafe_or_impossible_addresses_are_refused(
    root: Path, words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dash", str(root), *words]) == code
    assert text in capsys.readouterr().err


def test_a_missing_package_names_the_command_that_installs_it(root: Path) -> None:
    program = (
        "import sys; sys.modules['starlette'] = sys.modules['starlette.requests'] = None; "
        f"from vorox.cli import main; sys.exit(main(['dash', {str(root)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "starlette" in done.stderr
    assert "[dash]" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for a child process")
def test_ctrl_c_ends_the_server_while_a_page_follows_its_events(root: Path) -> None:
    command = [sys.executable, "-u", "-m", "vorox", "dash", str(root), "--port", "0", "--no-token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(found[0] for line in server.stdout if (found := re.search(r"http://[^/\s]+", line)))
        wait_until(lambda: is_open(url))
        with urllib.request.urlopen(f"{url}/api/live", timeout=PATIENCE_SECONDS) as events:
            assert events.readline() == b"event: watching\n"
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=PATIENCE_SECONDS)
    assert errors == ""


def is_open(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True
