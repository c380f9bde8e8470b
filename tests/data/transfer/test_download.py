"""Downloads equal what the hub lists: resumed at the byte, verified, never outside the directory."""

from __future__ import annotations

import errno
import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servers.environment import pointed_at
from servers.faults import fault_proxy
from servers.hub import SIGNATURE, HubServer, hub_server
from vorox.core.errors import ConfigError, DataError, DoesNotFitError
from vorox.core.files.atomic import FileOperation, observe
from vorox.core.files.file_holder import FileLock
from vorox.data.storage import RetryPolicy, retry_budget
from vorox.data.text.shard_format import read_shard
from vorox.data.transfer import download as module
from vorox.data.transfer.download import DownloadReport, download

NAME = "kjj0/fineweb10B-gpt2"
PIECE = 1 << 20


def shard(seed: int, num_tokens: int = 900) -> bytes:
    tokens = np.random.default_rng(seed).integers(0, 50257, num_tokens).astype("<u2")
    return struct.pack("<256i", 20240520, 1, num_tokens, *[0] * 253) + tokens.tobytes()


FILES: dict[str, bytes | None] = {
    "README.md": b"about",
    "fineweb_val_000000.bin": shard(0),
    **{f"fineweb_train_{number:06d}.bin": shard(number) for number in range(1, 5)},
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        server.commit(NAME, FILES)
        yield server


def names_in(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in {module.RECORD_NAME, ".download.lock"}
    )


def large(server: HubServer, size: int = 5 * PIECE + 12345) -> bytes:
    data = np.random.default_rng(9).bytes(size)
    server.commit("owner/set", {"data/large.dat": data, "data/small.txt": b"small"})
    return data


class TestNamed:
    def test_shards_by_name(self, hub: HubServer, tmp_path: Path) -> None:
        report = download("fineweb10B", tmp_path / "out", shards=2)
        wanted = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
        assert names_in(tmp_path / "out") == wanted
        for name in wanted:
            assert (tmp_path / "out" / name).read_bytes() == FILES[name]
            assert len(read_shard(tmp_path / "out" / name)) == 900
        record = json.loads((tmp_path / "out" / module.RECORD_NAME).read_bytes())
        assert record["commit"] == report.commit == hub.references[NAME]["main"]
        content = FILES["fineweb_train_000001.bin"]
        assert content is not None
        versions = {file["name"]: file["version"] for file in record["files"]}
        assert versions["fineweb_train_000001.bin"] == "blob:" + hashlib.sha256(content).hexdigest()

    def test_no_number_means_all(self, hub: HubServer, tmp_path: Path) -> None:
        assert len(download("fineweb10B", tmp_path).files) == 5
        assert download("fineweb10B", tmp_path / "val", shards=0).files[0].name == "fineweb_val_000000.bin"

    def test_second_time_nothing_is_fetched(self, hub: HubServer, tmp_path: Path) -> None:
        download("fineweb10B", tmp_path, shards=1)
        hub.log.clear()
        again = download("fineweb10B", tmp_path, shards=2)
        assert [file.fetched_bytes for file in again.files] == [0, 0, len(FILES["fineweb_train_000002.bin"] or b"")]
        assert not [request for request in hub.log.requests if "000001.bin" in request.path]

    @pytest.mark.parametrize("name", ["fineweb", "/data/x", "s3://bucket/x"])
    def test_an_unknown_name(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match="is unknown") as caught:
            download(name, tmp_path)
        assert "fineweb10B" in caught.value.hint


class TestLocations:
    def test_patterns_folders_and_revisions(self, hub: HubServer, tmp_path: Path) -> None:
        old = hub.references[NAME]["main"]
        hub.commit(NAME, {"fineweb_train_000001.bin": shard(77)})
        by_pattern = download(f"hf://datasets/{NAME}@{old}/*train*.bin", tmp_path / "a", shards=1)
        assert names_in(tmp_path / "a") == ["fineweb_train_000001.bin"]
        assert (tmp_path / "a" / "fineweb_train_000001.bin").read_bytes() == FILES["fineweb_train_000001.bin"]
        assert by_pattern.commit == old
        large(hub)
        download("hf://owner/set", tmp_path / "b")
        assert names_in(tmp_path / "b") == ["data/large.dat", "data/small.txt"]
        download("hf://datasets/owner/set/data/small.txt", tmp_path / "c")
        assert names_in(tmp_path / "c") == ["data/small.txt"]

    @pytest.mark.parametrize("where", [f"{NAME}/nothing-*.bin", f"{NAME}@v9/*.bin", "no/such/x.bin"])
    def test_missing_repositories_and_files(self, hub: HubServer, tmp_path: Path, where: str) -> None:
        with pytest.raises(DataError) as caught:
            download(f"hf://datasets/{where}", tmp_path / "out")
        assert caught.value.hint
        assert not (tmp_path / "out").exists()

    def test_a_repository_that_needs_a_token(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.token = "hf_secret_token_of_somebody"
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(DataError) as caught:
            download("fineweb10B", tmp_path / "out")
        assert "HF_TOKEN" in caught.value.hint
        assert "hf_wrong" not in str(caught.value)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        assert len(download("fineweb10B", tmp_path / "out", shards=1).files) == 2


class TestInterruption:
    def interrupted(self, location: str, output: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start a download that dies after some pieces."""
        left = [after]
        write = module._write

        def stopped(writer: Any, data: bytes) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            write(writer, data)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_write", stopped)
            with pytest.raises(KeyboardInterrupt):
                download(location, output)

    def test_resumes_at_the_byte(self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = large(hub)
        self.interrupted("hf://owner/set", tmp_path, 3, monkeypatch)
        (partial,) = (tmp_path / "data").iterdir()
        assert partial.name.startswith(".large.dat.")
        assert partial.read_bytes() == data[: partial.stat().st_size]
        assert partial.stat().st_size == 3 * PIECE
        hub.log.clear()
        report = download("hf://owner/set", tmp_path)
        assert (tmp_path / "data" / "large.dat").read_bytes() == data
        assert report.files[0].fetched_bytes == len(data) - 3 * PIECE
        starts = [request.range[0] for request in hub.log.requests if request.range and "cdn" in request.path]
        assert min(starts) == 3 * PIECE

    def test_a_torn_piece_is_kept_to_the_byte(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = large(hub)
        self.interrupted("hf://owner/set", tmp_path, 2, monkeypatch)
        (partial,) = (tmp_path / "data").iterdir()
        with partial.open("r+b") as file:
            file.truncate(PIECE + 4321)
        assert download("hf://owner/set", tmp_path).files[0].fetched_bytes == len(data) - PIECE - 4321
        assert (tmp_path / "data" / "large.dat").read_bytes() == data

    def test_a_new_version_does_not_resume_the_old_one(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        large(hub)
        self.interrupted("hf://owner/set", tmp_path, 3, monkeypatch)
        newer = np.random.default_rng(10).bytes(4 * PIECE)
        hub.commit("owner/set", {"data/large.dat": newer})
        assert download("hf://owner/set", tmp_path).files[0].fetched_bytes == len(newer)
        assert (tmp_path / "data" / "large.dat").read_bytes() == newer

    def test_a_full_disk_keeps_what_arrived(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = large(hub)
        left = [2]
        write = module._write

        def full(writer: Any, piece: bytes) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(writer, piece)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_write", full)
            with pytest.raises(DataError, match="the disk is full") as caught:
                download("hf://owner/set", tmp_path)
        assert "resumes them" in caught.value.saved
        assert download("hf://owner/set", tmp_path).files[0].fetched_bytes == len(data) - 2 * PIECE

    def test_errors_and_truncated_bodies_change_nothing(self, hub: HubServer, tmp_path: Path) -> None:
        data = large(hub)
        patient = RetryPolicy(first_backoff_seconds=0.01, longest_backoff_seconds=0.05)
        with (
            fault_proxy(hub.url, seed=3, error_503_fraction=0.3, truncated_fraction=0.3) as proxy,
            pointed_at(hub.environment(proxy.url)),
            retry_budget(patient),
        ):
            download("hf://owner/set", tmp_path / "a")
            download("fineweb10B", tmp_path / "b")
            assert proxy.faults["answer"] > 0
            assert proxy.faults["truncate"] > 0
        assert (tmp_path / "a" / "data" / "large.dat").read_bytes() == data
        for name in names_in(tmp_path / "b"):
            assert (tmp_path / "b" / name).read_bytes() == FILES[name]

    def test_a_file_is_invisible_until_it_is_complete(self, hub: HubServer, tmp_path: Path) -> None:
        def fail(operation: FileOperation) -> None:
            if operation.kind == "rename" and operation.target is not None and operation.target.suffix == ".bin":
                raise OSError(errno.EIO, "Input/output error", str(operation.path))

        with observe(fail), pytest.raises(DataError, match="Input/output error"):
            download("fineweb10B", tmp_path, shards=0)
        assert all(name.startswith(".") for name in names_in(tmp_path))
        assert download("fineweb10B", tmp_path, shards=0).files[0].fetched_bytes == 0


class TestRefusals:
    def test_a_damaged_partial_file_is_downloaded_again(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = large(hub)
        TestInterruption().interrupted("hf://owner/set", tmp_path, 3, monkeypatch)
        (partial,) = (tmp_path / "data").iterdir()
        content = bytearray(partial.read_bytes())
        content[100] ^= 1
        partial.write_bytes(content)
        with pytest.raises(DataError, match="not the one that the hub lists") as caught:
            download("hf://owner/set", tmp_path)
        assert "large.dat" in caught.value.where
        assert not partial.exists()
        assert download("hf://owner/set", tmp_path).files[0].fetched_bytes == len(data)

    @pytest.mark.parametrize("content", [b"another", b""])
    def test_a_file_of_other_content_is_not_overwritten(self, hub: HubServer, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "fineweb_val_000000.bin").write_bytes(content)
        with pytest.raises(DataError, match="with other content") as caught:
            download("fineweb10B", tmp_path, shards=0)
        assert caught.value.where.endswith("fineweb_val_000000.bin")
        assert (tmp_path / "fineweb_val_000000.bin").read_bytes() == content

    @pytest.mark.parametrize(
        "name", ["a\\..\\evil.bin", "/evil.bin", "C:evil.bin", "a/b:stream", "DOWNLOAD.json", "a\nb"]
    )
    def test_no_name_leads_out_of_the_directory(self, hub: HubServer, tmp_path: Path, name: str) -> None:
        hub.commit("owner/evil", {name: b"evil", "good.txt": b"good"})
        with pytest.raises(DataError, match="not a safe name") as caught:
            download("hf://owner/evil", tmp_path / "out" / "deeper")
        assert caught.value.hint
        assert not (tmp_path / "out").exists()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["../evil.bin", "a/../../evil.bin", "..\\evil.bin"])
    def test_parents_are_hidden_from_patterns_and_refused_by_name(
        self, hub: HubServer, tmp_path: Path, name: str
    ) -> None:
        hub.commit("owner/evil", {name: b"evil", "good.txt": b"good"})
        download("hf://owner/evil", tmp_path / "out" / "deeper")
        assert names_in(tmp_path) == ["out/deeper/good.txt"]
        with pytest.raises((DataError, ConfigError)):
            download(f"hf://owner/evil/{name}", tmp_path / "out" / "other")
        assert names_in(tmp_path) == ["out/deeper/good.txt"]

    def test_no_link_leads_out_of_the_directory(self, hub: HubServer, tmp_path: Path) -> None:
        hub.commit("owner/evil", {"link/evil.bin": b"evil"})
        (tmp_path / "out").mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "out" / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DataError, match="not a safe name"):
            download("hf://owner/evil", tmp_path / "out")
        assert list((tmp_path / "elsewhere").iterdir()) == []

    def test_a_shard_with_a_wrong_header(self, hub: HubServer, tmp_path: Path) -> None:
        hub.commit("owner/set", {"bad.bin": shard(3)[:-2]})
        with pytest.raises(DataError, match="The header states 900 tokens"):
            download("hf://owner/set/*.bin", tmp_path)
        assert not (tmp_path / "bad.bin").exists()

    def test_too_little_disk_space_is_reported_first(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 65 << 20})())
        large(hub, 1000)
        download("hf://owner/set", tmp_path / "fits")
        large(hub, 3 * PIECE)
        with pytest.raises(DoesNotFitError, match="more bytes") as caught:
            download("hf://owner/set", tmp_path / "out")
        assert "--shards" in caught.value.hint
        assert names_in(tmp_path / "out") == []

    def test_one_download_at_a_time(self, hub: HubServer, tmp_path: Path) -> None:
        with FileLock(tmp_path / ".download.lock"), pytest.raises(ConfigError, match="in use by"):
            download("fineweb10B", tmp_path)

    def test_no_secret_is_written(self, hub: HubServer, tmp_path: Path) -> None:
        hub.token = "hf_secret_token_of_somebody"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_TOKEN", hub.token)
            report = download("fineweb10B", tmp_path, shards=1)
        text = (tmp_path / module.RECORD_NAME).read_text() + repr(report)
        assert hub.token not in text
        assert SIGNATURE not in text


def test_progress_counts_every_file_to_its_end(hub: HubServer, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report: DownloadReport = download(
        "fineweb10B", tmp_path, shards=1, on_progress=lambda *progress: told.append(progress)
    )
    for file in report.files:
        assert (f"fetch {file.name}", file.size_bytes, file.size_bytes) in told
