"""Images that records of others name: regular files inside the source, of some formats, never the end of a build."""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pictures import picture
from servers import s3_server
from vorox.data.documents import BadRecord, Document, PlacedImage, UnreadableRecord
from vorox.data.images.decoding import decode_image, measure_image
from vorox.data.images.layout import ImageLayout
from vorox.data.images.reading import MAX_IMAGE_BYTES, ImageFolder, load_images, placed

GOOD = picture("red", 1)


def load(path: str, folder: ImageFolder) -> bytes | str:
    """Return the bytes of an image, or why it is unreadable."""
    found = placed(Document(0, 0, 0, 0, "", images=(PlacedImage(path),)), folder)
    if isinstance(found, BadRecord):
        return found.reason
    assert isinstance(found, Document)
    try:
        (image,) = load_images(found, ImageLayout(4)).images or ()
    except UnreadableRecord as error:
        return str(error)
    assert isinstance(image.content, bytes)
    return image.content


@pytest.fixture
def source(tmp_path: Path) -> ImageFolder:
    """A source with records in a folder of its own, and a private file beside it."""
    for name in ("source/deep/a.png", "source/pictures/b.png", "private.png", "source-other/c.png"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(GOOD)
    (tmp_path / "source/deep/records.jsonl").touch()
    return ImageFolder.of(str(tmp_path / "source/deep/records.jsonl"), "deep/records.jsonl")


def test_files_inside_the_source_are_read(source: ImageFolder, tmp_path: Path) -> None:
    (tmp_path / "source/link.png").symlink_to(tmp_path / "source/pictures/b.png")
    for path in ("a.png", "./a.png", "../pictures/b.png", "../link.png", str(tmp_path / "source/pictures/b.png")):
        assert load(path, source) == GOOD


def test_no_path_leaves_the_source(source: ImageFolder, tmp_path: Path) -> None:
    (tmp_path / "source/link.png").symlink_to(tmp_path / "private.png")
    (tmp_path / "source/folder").symlink_to(tmp_path)
    for path in ("../../private.png", str(tmp_path / "private.png"), "../link.png", "../folder/private.png",
                 "../../source-other/c.png", "../..", "/dev/zero", "/proc/self/environ", "/etc/passwd"):  # fmt: skip
        assert "is outside the folder of its source" in str(load(path, source)), path


def test_what_is_no_regular_file_is_a_bad_record(source: ImageFolder, tmp_path: Path) -> None:
    folder = tmp_path / "source/deep"
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "dangling.png").symlink_to(folder / "missing.png")
    with (folder / "huge.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    reasons = {
        "pipe.png": "is not a regular file",
        "folder.png": "is not a regular file",
        "loop.png": "cannot be read",
        "dangling.png": "cannot be read",
        "missing.png": "cannot be read: No such file",
        "huge.png": f"more than {MAX_IMAGE_BYTES:,}",
        "x" * 5000: "cannot be read",
        "a\0b": "has no valid path",
    }
    for path, reason in reasons.items():
        assert reason in str(load(path, source)), path
    if os.geteuid() != 0:  # root reads everything
        (folder / "secret.png").write_bytes(GOOD)
        (folder / "secret.png").chmod(0)
        assert "cannot be read: Permission denied" in str(load("secret.png", source))


def test_images_of_a_store_stay_below_its_prefix() -> None:
    folder = ImageFolder.of("s3://bucket/set/deep/records.jsonl", "deep/records.jsonl")
    inside = {"a.png": "set/deep/a.png", "../b.png": "set/b.png", "s3://bucket/set/b.png": "set/b.png"}
    with s3_server() as server:
        server.bucket("bucket")
        server.bucket("other")
        for bucket, key in (("bucket", "set/deep/a.png"), ("bucket", "set/b.png"), ("bucket", "private.png"),
                            ("other", "set/c.png"), ("bucket", "set/deep/many/x.png")):  # fmt: skip
            server.put(bucket, key, GOOD)
        for path in inside:
            assert load(path, folder) == GOOD
        for path in ("../../private.png", "s3://bucket/private.png", "s3://other/set/c.png",
                     "s3://bucket/set/../private.png", "s3://bucket/setting/x.png"):  # fmt: skip
            assert "is outside the folder of its source" in str(load(path, folder)), path
        assert "does not exist" in str(load("missing.png", folder))
        for path in ("many", "*.png", "ma[n]y/x.png"):
            assert "is a folder or a pattern" in str(load(path, folder)), path


def test_images_of_a_web_server_stay_on_it() -> None:
    folder = ImageFolder.of("https://example.com/set/records.jsonl", "records.jsonl")
    for path in ("https://169.254.169.254/latest/meta-data", "https://example.com:8443/set/a.png",
                 "https://example.com/private.png", "https://example.com.evil.org/set/a.png"):  # fmt: skip
        assert "is outside the folder of its source" in str(load(path, folder)), path
    for path in ("../private.png", "%2e%2e/private.png", "a.png?key=1", "a.png#x", "..\\private.png"):
        assert isinstance(load(path, folder), str), path


def encoded(form: str, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((48, 48), 50).convert(mode).save(buffer, form)
    return buffer.getvalue()


def test_other_formats_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS would start Ghostscript: a stand-in on the path leaves a file if anything runs it."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    for content in (postscript, encoded("EPS"), encoded("ICO"), encoded("TGA"), encoded("SGI"), encoded("PDF")):
        with pytest.raises(ValueError, match="it is no PNG, JPEG, WEBP, GIF, BMP, TIFF or PPM image"):
            measure_image(content)
    assert not (tmp_path / "started").exists()
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        assert measure_image(encoded(form)) == (48, 48)
        assert decode_image(encoded(form), 16).shape == (16, 16, 3)


def test_a_damaged_image_is_a_value_error_and_nothing_else() -> None:
    chooser = random.Random(random.randrange(1 << 30))
    seeds = [encoded(form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    seeds += [encoded("PNG", "P"), encoded("TIFF", "F"), encoded("GIF", "P"), encoded("TIFF", "1")]
    failures = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1500):
            content = bytearray(chooser.choice(seeds))
            for _ in range(chooser.randint(1, 8)):
                content[chooser.randrange(min(len(content), 400))] = chooser.randrange(256)
            for read in (measure_image, lambda content: decode_image(content, 8)):
                try:
                    read(bytes(content[: chooser.choice([len(content), chooser.randrange(1, len(content))])]))
                except ValueError:
                    failures += 1
    assert failures > 100


def test_an_exception_of_a_decoder_is_a_bad_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (IndexError("x"), RuntimeError("y"), MemoryError(), NotImplementedError("z"), OverflowError("w")):

        def fail(*arguments: Any, error: Exception = error, **options: Any) -> Any:
            raise error

        monkeypatch.setattr(Image.Image, "convert", fail)
        with pytest.raises(ValueError):
            measure_image(GOOD)


def test_a_bomb_is_refused_by_its_size() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for side in (12_000, 60_000):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        pixels = chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=r"pixels"):
                measure_image(content)
