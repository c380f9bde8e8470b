"""What each store refuses, and that no message contains a secret."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Fault, fault_proxy, gcs_server, http_server, hub_server, pointed_at, s3_server
from servers.hub import SIGNATURE
from servers.recorded import Handler, Request, serving
from servers.s3 import SECRET
from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.platform.installation import install_command
from vorox.data.storage import RetryPolicy, StoredFile, http, list_files, open_range, relative_name, retry_budget
from vorox.data.storage.hub import resolve_commit

BODY = b"text " * 2_000
TOKEN = "hf_Zq4rTb8sWm2nXc6vKd9e"
POLICY = RetryPolicy(retries_per_unit=2, first_backoff_seconds=0.001, stall_seconds=1.0, connect_seconds=1.0)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    with retry_budget(POLICY):
        yield


def refused(
    action: Callable[[], object], kind: type[VoroxError] = DataError, *, caplog: pytest.LogCaptureFixture | None = None
) -> VoroxError:
    """Return the error of an action, after searching it and its causes for secrets."""
    with pytest.raises(kind) as caught:
        action()
    error: BaseException | None = caught.value
    texts = [caplog.text] if caplog is not None else []
    while error is not None:
        texts += [str(error), repr(error)]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for secret in (SECRET, SIGNATURE, TOKEN):
        assert not any(secret in text for text in texts)
    assert caught.value.where
    assert caught.value.hint
    return caught.value


def read(location: str) -> bytes:
    (file,) = list_files(location, ())
    with open_range(file) as reader:
        return reader.read()


def read_file(file: StoredFile, start_byte: int = 0, end_byte: int | None = None) -> bytes:
    with open_range(file, start_byte, end_byte) as reader:
        return reader.read()


class TestAmazon:
    @pytest.fixture(scope="class")
    @classmethod
    def s3(cls) -> Iterator[object]:
        with s3_server() as server:
            server.bucket("corpora")
            server.put("corpora", "a.txt", BODY)
            yield server

    def test_missing_bucket(self, s3: object) -> None:
        for location in ("s3://nowhere/x.txt", "s3://nowhere", "s3://nowhere/*.txt"):
            assert "Bucket 'nowhere' does not exist" in refused(lambda location=location: list_files(location, ())).what

    @pytest.mark.parametrize(
        ("status", "code"), [(400, "ExpiredToken"), (403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch")]
    )
    def test_expired_or_wrong_credentials(
        self, s3: object, status: int, code: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "vorox")
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{SECRET}</Message></Error>".encode()
        with fault_proxy(s3.url) as proxy, pointed_at(s3.environment(proxy.url)):
            file = list_files("s3://corpora/a.txt", ())[0]
            proxy.log.clear()
            proxy.script(*[Fault("answer", status, {"Content-Type": "application/xml"}, body)] * 9)
            for action in (lambda: list_files("s3://corpora", (".txt",)), lambda: read_file(file)):
                error = refused(action, caplog=caplog)
                assert code in error.what
                assert "AWS_SESSION_TOKEN" in error.hint
            assert len(proxy.log.requests) == 2, "a retry does not renew expired credentials"

    def test_no_credentials_at_all(self, s3: object) -> None:
        names = [name for name in os.environ if name.startswith("AWS_") and "KEY" in name]
        with pointed_at(dict.fromkeys(names, "")):
            for name in names:
                del os.environ[name]
            assert "No credentials for S3" in refused(lambda: list_files("s3://corpora", (".txt",))).what

    def test_slow_down_is_not_a_refusal(self, s3: object) -> None:
        body = b"<?xml version='1.0'?><Error><Code>RequestTimeout</Code></Error>"
        with fault_proxy(s3.url) as proxy, pointed_at(s3.environment(proxy.url)):
            (file,) = list_files("s3://corpora/a.txt", ())
            proxy.script(Fault("answer", 400, {"Content-Type": "application/xml"}, body))
            with open_range(file) as reader:
                assert reader.read() == BODY
            assert proxy.faults == {"answer": 1}

    @pytest.mark.parametrize("versioned", [False, True])
    def test_long_listings_have_pages(self, s3: object, versioned: bool) -> None:
        bucket = f"pages-{versioned}".lower()
        s3.bucket(bucket, versioned=versioned)
        for number in range(7):
            s3.put(bucket, f"{number}.txt", b"old")
            s3.put(bucket, f"{number}.txt", b"newer")
        s3.client.delete_object(Bucket=bucket, Key="3.txt")
        with fault_proxy(s3.url) as proxy, pointed_at(s3.environment(proxy.url)):
            forward = proxy._ask

            def ask_for_two(request: Request) -> tuple[int, dict[str, str], bytes, int]:
                request.path += "&max-keys=2" if "list-type" in request.path else ""
                return forward(request)

            proxy._ask = ask_for_two
            files = list_files(f"s3://{bucket}", (".txt",))
            assert sum("list-type" in request.path for request in proxy.log.requests) == 3
        assert [relative_name(f"s3://{bucket}", file.uri) for file in files] == [f"{n}.txt" for n in range(7) if n != 3]
        assert {file.size_bytes for file in files} == {5}

    def test_a_bucket_without_version_access_is_pinned_by_etags(self, s3: object) -> None:
        denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"
        with fault_proxy(s3.url) as proxy, pointed_at(s3.environment(proxy.url)):
            proxy.only = lambda request: request.method == "HEAD"
            proxy.script(Fault("answer", 403, {}, denied))
            (file,) = list_files("s3://corpora", (".txt",))
            assert (file.version or "").startswith("etag:")
            assert proxy.faults == {"answer": 1}

    def test_public_buckets_are_read_without_credentials(self, s3: object, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FSSPEC_S3_ANON", "true")
        s3.client.put_object_acl(Bucket="corpora", Key="a.txt", ACL="public-read")
        with fault_proxy(s3.url) as proxy, pointed_at(s3.environment(proxy.url)):
            assert read("s3://corpora/a.txt") == BODY
            assert proxy.log.requests
            assert not any("Authorization" in request.headers for request in proxy.log.requests)

    def test_expired_credentials_are_reloaded_during_a_run(
        self, s3: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A login or a rotation writes new ones; the same ones are not tried a second time."""
        path = tmp_path / "credentials"
        body = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code></Error>"

        def write(key: str) -> None:
            path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")

        write("AKIAFIRST00000000000")
        with (
            fault_proxy(s3.url) as proxy,
            pointed_at({**s3.environment(proxy.url), "AWS_SHARED_CREDENTIALS_FILE": str(path)}),
        ):
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            (file,) = list_files("s3://corpora/a.txt", ())
            write("AKIASECOND0000000000")
            proxy.log.clear()
            proxy.script(Fault("answer", 400, {}, body))
            assert read_file(file) == BODY
            keys = [request.headers["Authorization"].split("/")[0][-20:] for request in proxy.log.requests]
            assert keys == ["AKIAFIRST00000000000", "AKIASECOND0000000000"]
            proxy.script(*[Fault("answer", 400, {}, body)] * 9)
            assert "ExpiredToken" in refused(lambda: read_file(file)).what
            assert len(proxy.scripted) == 7

    def test_a_wrong_clock_is_reported(self, s3: object) -> None:
        body = b"<?xml version='1.0'?><Error><Code>RequestTimeTooSkewed</Code></Error>"
        with fault_proxy(s3.url) as proxy, pointed_at(s3.environment(proxy.url)):
            (file,) = list_files("s3://corpora/a.txt", ())
            proxy.script(*[Fault("answer", 403, {}, body)] * 9)
            error = refused(lambda: read_file(file))
            assert "RequestTimeTooSkewed" in error.what
            assert "clock" in error.hint
            assert len(proxy.scripted) == 8

    def test_a_folder_marker_is_not_a_file(self, s3: object) -> None:
        s3.bucket("markers")
        s3.client.put_object(Bucket="markers", Key="text/deep/", Body=b"")
        s3.put("markers", "text/deep/a.txt", BODY)
        s3.put("markers", "text/empty.txt", b"")
        files = list_files("s3://markers/text/**", ())
        assert [file.uri for file in files] == ["s3://markers/text/deep/a.txt", "s3://markers/text/empty.txt"]

    def test_a_pattern_lists_from_its_fixed_part(self, s3: object) -> None:
        s3.bucket("patterns")
        for name in ("a", "b-0", "b-1", "b", "c"):
            s3.put("patterns", f"text/{name}.txt", BODY)
        with fault_proxy(s3.url) as proxy, pointed_at(s3.environment(proxy.url)):
            files = list_files("s3://patterns/text/b-*", ())
            assert [file.uri[-7:] for file in files] == ["b-0.txt", "b-1.txt"]
            listed = [request.path for request in proxy.log.requests if request.method == "GET"]
            (searched,) = [path for path in listed if "prefix=text%2F&" in path]
            assert "start-after=text%2Fb" in searched

    def test_a_forked_process_is_refused_instead_of_hanging(self, s3: object) -> None:
        program = (
            "import os\n"
            "from vorox.core.errors import ConfigError\n"
            "from vorox.data.storage import list_files\n"
            "list_files('s3://corpora/a.txt', ())\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    try: list_files('s3://corpora/a.txt', ())\n"
            "    except ConfigError as error: os._exit(7 if 'spawn' in error.hint else 8)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list_files('s3://corpora/a.txt', ())))\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.split() == ["7", "1"]

    def test_a_name_that_s3_does_not_allow(self, s3: object) -> None:
        assert "does not allow this name" in refused(lambda: list_files("s3://a b/x", ()), ConfigError).what
        assert "lacks a bucket" in refused(lambda: list_files("s3:///x", ()), ConfigError).what

    def test_an_unreachable_server(self, s3: object) -> None:
        with pointed_at({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}):
            assert "no connection" in refused(lambda: list_files("s3://corpora", (".txt",))).what


class TestGoogle:
    def test_missing_bucket_pages_and_credentials(self) -> None:
        with gcs_server() as gcs:
            gcs.bucket("corpora")
            gcs.page_items = 2
            for number in range(5):
                gcs.put("corpora", f"{number}.txt", BODY)
            assert len(list_files("gs://corpora", (".txt",))) == 5
            assert "Bucket 'nowhere' does not exist" in refused(lambda: list_files("gs://nowhere/*.txt", ())).what
            with fault_proxy(gcs.url) as proxy, pointed_at(gcs.environment(proxy.url)):
                proxy.script(Fault("answer", 401, {}, b"<Error><Code>AuthenticationRequired</Code></Error>"))
                error = refused(lambda: list_files("gs://corpora", (".txt",)))
            assert "AuthenticationRequired" in error.what
            assert "GOOGLE_APPLICATION_CREDENTIALS" in error.hint

    def test_credentials_are_sent_to_google_but_not_to_an_emulator(self) -> None:
        with gcs_server() as gcs:
            gcs.bucket("corpora")
            gcs.put("corpora", "a.txt", BODY)
            assert read("gs://corpora/a.txt") == BODY
            assert not any("Authorization" in request.headers for request in gcs.log.requests)


class TestHub:
    def test_repositories_and_revisions(self) -> None:
        with hub_server() as hub:
            first = hub.commit("acme/corpora", {"data/a.txt": BODY, "data/sub/b.txt": b"small"})
            hub.commit("acme/corpora", {"data/a.txt": b"converted"}, reference="refs/convert/parquet")
            second = hub.commit("acme/corpora", {"data/a.txt": BODY + b"!", "data/sub/b.txt": b"small"})
            assert resolve_commit("hf://datasets/acme/corpora") == second
            assert read("hf://acme/corpora/data/a.txt") == BODY + b"!"
            assert read(f"hf://acme/corpora@{first}/data/a.txt") == BODY
            for revision in ("refs/convert/parquet", "refs%2Fconvert%2Fparquet"):
                assert read(f"hf://datasets/acme/corpora@{revision}/data/a.txt") == b"converted"
            before = list_files(f"hf://acme/corpora@{first}", (".txt",))
            after = list_files("hf://acme/corpora", (".txt",))
            assert before[1].version == after[1].version, "a file that a commit did not change keeps its version"
            assert before[0].version != after[0].version
            hub.page_items = 1
            assert len(list_files("hf://acme/corpora", (".txt",))) == 2
            assert "no repository 'no/such'" in refused(lambda: list_files("hf://no/such", (".txt",))).what
            error = refused(lambda: list_files("hf://acme/corpora@v9", (".txt",)))
            assert "revision 'v9'" in error.what
            assert "lacks a repository" in refused(lambda: list_files("hf://one", ()), ConfigError).what

    def test_the_token_is_sent_to_the_hub_only(self) -> None:
        with hub_server() as hub:
            hub.commit("acme/corpora", {"a.txt": BODY})
            hub.token = TOKEN
            assert "HF_TOKEN" in refused(lambda: list_files("hf://acme/corpora", (".txt",))).hint
            with fault_proxy(hub.url) as cdn, pointed_at(hub.environment()):
                hub.url, url = cdn.url, hub.url  # large files are now redirected to another origin
                with pointed_at({"HF_ENDPOINT": url}):
                    assert read("hf://acme/corpora/a.txt") == BODY
                    assert cdn.log.requests
                    assert not any("Authorization" in request.headers for request in cdn.log.requests)
                    asked = [request for request in hub.log.requests if not request.path.startswith("/cdn/")]
                    assert asked[-1].headers["Authorization"] == f"Bearer {TOKEN}"
                    cdn.script(Fault("answer", 403, {}, f"no {SIGNATURE}".encode()))
                    assert "refuses access" in refused(lambda: read("hf://acme/corpora/a.txt")).what
                    cdn.error_503_fraction = 1.0
                    assert "HTTP 503" in refused(lambda: read("hf://acme/corpora/a.txt")).what

    @pytest.mark.parametrize("large_from_bytes", [1, 1 << 20])
    def test_content_that_differs_from_the_listing(self, large_from_bytes: int) -> None:
        with hub_server() as hub:
            hub.large_from_bytes = large_from_bytes
            sha = hub.commit("acme/corpora", {"a.txt": BODY})
            (file,) = list_files("hf://acme/corpora", (".txt",))
            assert read_file(file) == BODY
            hub.commits["acme/corpora"][sha]["a.txt"] = BODY.replace(b"text", b"TEXT")
            assert "became blob:" in refused(lambda: read_file(file)).what
            del hub.commits["acme/corpora"][sha]
            assert "was deleted" in refused(lambda: read_file(file)).what

    def test_offline_is_respected(self) -> None:
        with hub_server() as hub, pointed_at({"HF_HUB_OFFLINE": "1"}):
            hub.commit("acme/corpora", {"a.txt": BODY})
            assert "HF_HUB_OFFLINE" in refused(lambda: list_files("hf://acme/corpora", ())).what
            assert hub.log.requests == []


class TestWeb:
    def test_the_headers_that_pin_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(BODY)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        with http_server(tmp_path) as web:
            for etags, modified, kind in [
                ("strong", True, "etag:"),
                ("weak", True, "modified:"),
                ("weak", False, "weak:"),
            ]:
                web.etags, web.modified, web.honours_preconditions = etags, modified, False
                (file,) = list_files(f"{web.url}/a.txt", ())
                assert (file.version or "").startswith(kind)
                with open_range(file) as reader:
                    assert reader.read() == BODY
                path.write_bytes(BODY[::-1])
                os.utime(path, (1_700_000_100, 1_700_000_100))
                assert "changed after" in refused(lambda file=file: read_file(file)).what
                path.write_bytes(BODY)
                os.utime(path, (1_700_000_000, 1_700_000_000))
            web.etags, web.modified = "none", False
            assert "neither ETag nor Last-Modified" in refused(lambda: list_files(f"{web.url}/a.txt", ())).what

    def test_a_length_that_changed(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(BODY)
        with http_server(tmp_path) as web:
            web.etags = "none"
            now = time.time()
            os.utime(path, (now, now))
            (file,) = list_files(f"{web.url}/a.txt", ())
            path.write_bytes(BODY + b"more")
            os.utime(path, (now, now))
            for part in ((0, 10), (10, 20)):
                error = refused(lambda part=part: read_file(file, *part))
                assert "10,004 bytes instead of 10,000" in error.what

    def test_a_server_without_ranges(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(BODY)
        with http_server(tmp_path) as web:
            web.ranges = False
            assert read(f"{web.url}/a.txt") == BODY
            (file,) = list_files(f"{web.url}/a.txt", ())
            assert "does not support range requests" in refused(lambda: read_file(file, 5, 9)).what

    def test_proxies_come_from_the_environment_and_netrc_is_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        netrc = tmp_path / "netrc"
        netrc.write_text(f"machine nowhere.invalid login user password {SECRET}\n")
        monkeypatch.setenv("NETRC", str(netrc))

        def respond(handler: Handler, request: Request) -> None:
            handler.send_part(request, BODY, {"ETag": '"1"'})

        with serving(respond) as (url, log), pointed_at({"http_proxy": url, "no_proxy": "127.0.0.1"}):
            assert read("http://nowhere.invalid/a.txt") == BODY
            assert {request.path for request in log.requests} == {"http://nowhere.invalid/a.txt"}
            assert not any("Authorization" in request.headers for request in log.requests)
            log.clear()
            (tmp_path / "b.txt").write_bytes(BODY)
            with http_server(tmp_path) as web:
                assert read(f"{web.url}/b.txt") == BODY
            assert log.requests == []

    def test_a_public_server_cannot_redirect_into_a_private_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Here the name of this machine is a public server and its number a private one."""
        (tmp_path / "a.txt").write_bytes(BODY)

        async def is_private(host: str) -> bool:
            return host != "localhost"

        with http_server(tmp_path) as private:

            def respond(handler: Handler, request: Request) -> None:
                handler.send(request, 302, {"Location": f"{private.url}/a.txt"}, b"")

            with serving(respond) as (url, _):
                assert read(f"{url}/a.txt") == BODY, "a private address may redirect to another one"
                private.log.clear()
                monkeypatch.setattr(http, "_is_private", is_private)
                error = refused(lambda: read(f"{url.replace('127.0.0.1', 'localhost')}/a.txt"))
                assert "redirects to a private address" in error.what
                assert private.log.requests == []

    @pytest.mark.parametrize(
        ("host", "private"),
        [("127.0.0.1", True), ("localhost", True), ("10.1.2.3", True), ("169.254.169.254", True), ("::1", True),
         ("::ffff:10.0.0.1", True), ("8.8.8.8", False), ("2001:4860:4860::8888", False)],
    )  # fmt: skip
    def test_which_addresses_are_private(self, host: str, private: bool) -> None:
        assert asyncio.run(http._is_private(host)) is private

    def test_index_links_to_other_folders_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a.txt").write_bytes(BODY)
        (tmp_path / "out.txt").write_bytes(BODY)
        with http_server(tmp_path) as web:
            assert [file.uri for file in list_files(f"{web.url}/in", (".txt",))] == [f"{web.url}/in/a.txt"]
            assert not any("out" in request.path for request in web.log.requests)


@pytest.mark.parametrize(
    ("module", "location", "extra"),
    [("aiohttp", "https://127.0.0.1:9/x", "http"), ("aiohttp", "hf://a/b", "http")],
)
def test_a_missing_extra_is_reported(module: str, location: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from vorox.core.errors import ConfigError\n"
        "from vorox.data.storage import list_files\n"
        f"try: list_files({location!r}, ())\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert install_command(extra) in done.stdout


def test_a_child_process_uses_its_own_connections(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BODY)
    with http_server(tmp_path) as web:
        program = (
            "import os, sys\n"
            "from vorox.data.storage import list_files, open_range\n"
            f"(file,) = list_files({web.url!r} + '/a.txt', ())\n"
            "def read():\n"
            "    with open_range(file) as reader: return len(reader.read())\n"
            "read()\n"
            "child = os.fork()\n"
            "if child == 0: os._exit(0 if read() == 10_000 else 1)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), read())\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60, check=True
        )
    assert done.stdout.split() == ["0", "10000"]


COMMIT, BLOB = "a" * 40, "b" * 40
ENTRY = {"type": "file", "path": "a.txt", "oid": BLOB, "size": 5}


@contextlib.contextmanager
def hub_that_answers(commit: bytes, files: bytes = b"[]", link: str = "") -> Iterator[None]:
    """A hub whose revisions and lists of files are what a test wants."""

    def respond(handler: Handler, request: Request) -> None:
        is_list = "/tree/" in request.path
        headers = {"Content-Type": "application/json"} | ({"Link": link} if is_list and link else {})
        handler.send(request, 200, headers, files if is_list else commit)

    with serving(respond) as (url, _), pointed_at({"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}):
        yield


@pytest.mark.parametrize(
    "answer", [b"[]", b"5", b"{}", b'{"sha": 5}', b'{"sha": "../../x"}', b"[" * 200_000, b'"' + b"x" * (1 << 20) + b'"']
)
def test_a_hub_whose_commit_is_none_is_refused(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_JSON_BYTES", 1 << 19)
    with hub_that_answers(answer):
        error = refused(lambda: list_files("hf://o/n", (".txt",)))
    assert "Unexpected response from the server" in error.what or "is not JSON" in error.what


@pytest.mark.parametrize(
    "entries",
    [
        {"a": 1}, [5], [{"type": "file"}], [ENTRY | {"path": 5}], [ENTRY | {"size": "x"}], [ENTRY | {"size": -5}],
        [ENTRY | {"size": 10**30}], [ENTRY | {"oid": "../x"}], [ENTRY | {"path": "a\nb.txt"}],
        [ENTRY | {"path": "a\x1b]0;x\x07.txt"}],
        [ENTRY | {"lfs": {"oid": BLOB}, "oid": 5}],
    ],
)  # fmt: skip
def test_a_hub_whose_list_of_files_is_none_is_refused(entries: object) -> None:
    with hub_that_answers(json.dumps({"sha": COMMIT}).encode(), json.dumps(entries).encode()):
        what = refused(lambda: list_files("hf://o/n", (".txt",))).what
    assert "Unexpected response from the server" in what or "is not JSON" in what


@pytest.mark.parametrize("files", [[ENTRY], []])
def test_a_list_of_files_that_does_not_end_is_refused(files: list[object]) -> None:
    link = f'<http://hub/api/datasets/o/n/tree/{COMMIT}?cursor=1>; rel="next"'
    with hub_that_answers(json.dumps({"sha": COMMIT}).encode(), json.dumps(files).encode(), link):
        assert "does not end" in (what := refused(lambda: list_files("hf://o/n", (".txt",))).what) or "empty" in what


@contextlib.contextmanager
def web_that_answers(status: int, headers: dict[str, str], body: bytes) -> Iterator[str]:
    with serving(lambda handler, request: handler.send(request, status, headers, body)) as (url, _):
        yield url


@pytest.mark.parametrize("span", ["bytes 0-0/-5", f"bytes 0-0/{10**30}", "bytes 0-0/x", "bytes -1-0/5", "0-0/5", ""])
def test_a_size_that_no_file_has_is_refused(span: str) -> None:
    with web_that_answers(206, {"ETag": '"a"', "Content-Range": span}, b"x") as url:
        assert "Content-Range" in refused(lambda: read(f"{url}/a.txt")).what


@pytest.mark.parametrize("target", ["http://[::1", "http://[", "http://:x/"])
def test_a_redirect_to_no_url_is_refused(target: str) -> None:
    with web_that_answers(302, {"Location": target}, b"") as url:
        refused(lambda: read(f"{url}/a.txt"))


@pytest.mark.parametrize("name", ["a%0ab.txt", "a\x1b]0;P\x07.txt"])
def test_a_link_with_control_characters_is_refused(name: str) -> None:
    with web_that_answers(200, {"Content-Type": "text/html", "ETag": '"x"'}, f'<a href="{name}">x</a>'.encode()) as url:
        assert "index page" in refused(lambda: list_files(f"{url}/", (".txt",))).what


def test_a_tree_of_folders_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vorox.data.storage.web._MAX_FOLDERS", 20)
    page = b'<a href="a/">a/</a><a href="b/">b/</a>'
    with web_that_answers(200, {"Content-Type": "text/html", "ETag": '"x"'}, page) as url:
        assert "more than 20 folders" in refused(lambda: list_files(f"{url}/", (".txt",))).what


def test_a_name_that_becomes_private_after_the_check_of_its_redirect_is_not_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DNS rebinding: the check asks for a name without a port, connecting asks with one."""
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any = None, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in {"public.test", "rebind.test"}:
            return real(host, port, *arguments, **options)
        if port:
            return real("127.0.0.1", port, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with serving(lambda handler, request: handler.send(request, 200, {"ETag": '"a"'}, b"secret")) as (inner, log):
        target = inner.replace("127.0.0.1", "rebind.test") + "/a.txt"
        with web_that_answers(302, {"Location": target}, b"") as url:
            error = refused(lambda: read(url.replace("127.0.0.1", "public.test") + "/a.txt"))
    assert "redirects to a private address" in error.what
    assert not log.requests
