"""Images of documents: from a record to the cache of its rows, and back to pixels.

A record names its images (a path, bytes, a data: URI); their encoded bytes are kept in the cache by their hash, once
each, and are read and decoded again when a batch needs them. Invariants: a stored image can be decoded; what is read
has the hash that its row names; a path leads to a regular file inside the folder of the source, or nowhere.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import posixpath
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import numpy.typing as npt
import xxhash

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import make_directory, write_file
from vorox.data.documents import BadRecord, Document, PlacedImage, Record, UnreadableRecord
from vorox.data.images.decoding import measure_image
from vorox.data.images.layout import ImageLayout
from vorox.data.images.tokens import find_images
from vorox.data.storage import NoMatchingSuffix, NoSuchLocation, list_files, open_range, scheme_of

MARK = "<image>"
"""Where an image belongs, in the text of a record."""

MAX_IMAGE_BYTES = 1 << 28
"""Larger files are no images for a model."""

_SHOWN_CHARACTERS = 200
_FAILURES = frozenset({
    errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ENOTCONN,
})  # fmt: skip
"""Errors of a disk, a mount or this process; all others are due to the path."""

DIRECTORY_NAME = "images"
"""Folder of a cache with the images of its rows."""

_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")


def read_images(value: object, name: str) -> tuple[PlacedImage, ...]:
    """Return the images of a record, with their bytes or paths.

    Args:
        value: The value of ``images_field``: a path, bytes, a data: URI, ``{bytes, path}``, a list of them, or null.
        name: The field, for messages.

    Raises:
        UnreadableRecord: The value is none of these.
    """
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(image for item in cast("Sequence[object]", value) for image in read_images(item, name))
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, object]", value)
        value = fields.get("bytes") or fields.get("path")
    if isinstance(value, str) and (found := _DATA_URI.match(value)):
        try:
            return (PlacedImage(base64.b64decode(value[found.end() :], validate=True)),)
        except binascii.Error as error:
            raise UnreadableRecord(f"field {name!r} has a data: URI that is not base64") from error
    if isinstance(value, str | bytes) and value:
        return (PlacedImage(value),)
    raise UnreadableRecord(
        f"field {name!r} is {type(value).__name__}; an image is a path, bytes, a data: URI or {{bytes, path}}"
    )


def place_images(document: Document) -> Document:
    """Return the document with its images at the characters where its text has ``MARK``, and without these marks.

    Raises:
        UnreadableRecord: The numbers of marks and of images differ.
    """
    images = document.images
    parts = document.text.split(MARK)
    if images is None or (len(parts) == 1 and not images):
        return document
    if len(parts) == 1:
        return replace(document, images=tuple(replace(image, character=0) for image in images))
    if len(parts) - 1 != len(images):
        raise UnreadableRecord(f"the text has {len(parts) - 1} times {MARK}, but the record has {len(images)} images")
    marks = [len(MARK) * index + sum(map(len, parts[: index + 1])) for index in range(len(images))]
    starts = [mark - len(MARK) * index for index, mark in enumerate(marks)]

    def moved(character: int) -> int:
        """Return where a character of the text is without the marks before it."""
        return character - sum(min(len(MARK), max(0, character - mark)) for mark in marks)

    return replace(
        document,
        text="".join(parts),
        answers=tuple((moved(start), moved(end)) for start, end in document.answers),
        images=tuple(replace(image, character=start) for image, start in zip(images, starts, strict=True)),
    )


class ConfinedPath(str):
    """The location of an image that is inside the folder of its source."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Where the images of a file's records may be.

    Attributes:
        record_uri: The file of the records, which paths are relative to.
        root: The folder of the source, local or in a store, which no path leaves.
    """

    record_uri: str
    root: str

    @classmethod
    def of(cls, uri: str, relative_path: str) -> ImageFolder:
        """Return the folder of a file, from its path relative to the location of its source."""
        head = uri.removesuffix(relative_path) if relative_path else uri
        root = head if head != uri and head.endswith("/") else uri.rpartition("/")[0]
        return cls(uri, root.rstrip("/"))

    def confine(self, path: str) -> ConfinedPath:
        """Return the location that a path of a record means.

        Raises:
            UnreadableRecord: It is outside the folder of the source, also by way of links, or in another store.
        """
        scheme = scheme_of(self.record_uri)
        try:
            is_elsewhere = scheme_of(path) not in (None, scheme)
        except ConfigError:
            is_elsewhere = True
        if is_elsewhere:
            raise UnreadableRecord(f"the image {path!r} is in another store than the record")
        try:
            place, root = self._remote(path) if scheme is not None else self._local(path)
        except (OSError, ValueError) as error:
            raise UnreadableRecord(f"the image {_short(path)} has no valid path: {error}") from error
        if not place.startswith(f"{root.rstrip('/')}/"):
            raise UnreadableRecord(
                f"the image {_short(path)} is outside the folder of its source, {self.root}: move it there, or name a "
                "folder that holds both in the source's paths"
            )
        return ConfinedPath(place)

    def _local(self, path: str) -> tuple[str, str]:
        whole = Path(self.record_uri).parent / path
        return os.path.realpath(whole), os.path.realpath(self.root)

    def _remote(self, path: str) -> tuple[str, str]:
        whole = path if scheme_of(path) else f"{self.record_uri.rpartition('/')[0]}/{path}"
        scheme, _, rest = whole.partition("://")
        is_web = scheme.lower() in {"http", "https"}
        if "\\" in rest or (is_web and (set(rest) & set("?#") or "/.." in unquote(rest))):
            raise ValueError("it has a backslash, a query or parent folders")
        return f"{scheme}://{posixpath.normpath(rest)}", self.root


def placed(record: Record, folder: ImageFolder) -> Record:
    """Return the record with its images placed in its text; an unreadable one if they do not match.

    Args:
        record: The record.
        folder: Where its images may be.
    """
    if not isinstance(record, Document) or record.images is None:
        return record
    try:
        images = tuple(
            replace(image, content=folder.confine(image.content)) if isinstance(image.content, str) else image
            for image in record.images
        )
        return place_images(replace(record, images=images))
    except UnreadableRecord as error:
        return _bad(record, error)


def _bad(document: Document, error: Exception) -> BadRecord:
    place = (document.file_index, document.ordinal, document.byte_offset, document.byte_length)
    return BadRecord(*place, None, str(error))


def load_images(document: Document, layout: ImageLayout) -> Document:
    """Return the document with the bytes, the hash and the number of tokens of its images.

    Raises:
        UnreadableRecord: An image cannot be found or decoded.
        DataError: A store cannot be read.
    """
    loaded: list[PlacedImage] = []
    for image in document.images or ():
        content = image.content
        name = "an image"
        if isinstance(content, str):
            assert isinstance(content, ConfinedPath), "``placed`` confines paths"
            name = f"the image {_short(content)}"
            content = _read_remote(content) if scheme_of(content) is not None else _read_local(content)
        try:
            size = measure_image(content)
        except ValueError as error:
            raise UnreadableRecord(f"{name} cannot be decoded: {error}") from error
        try:
            num_tokens = layout.num_tokens(size)
        except ValueError as error:
            raise UnreadableRecord(f"{name} does not fit the model: {error}") from error
        digest = xxhash.xxh3_64_intdigest(content)
        loaded.append(replace(image, content=content, digest=digest, num_tokens=num_tokens))
    return replace(document, images=tuple(loaded))


def _read_remote(uri: ConfinedPath) -> bytes:
    try:
        files = list_files(uri, ())
    except NoSuchLocation as error:
        raise UnreadableRecord(f"the image {_short(uri)} does not exist") from error
    except NoMatchingSuffix:
        files = []
    if [file.uri for file in files] != [uri]:
        raise UnreadableRecord(f"the image {_short(uri)} is a folder or a pattern")
    _check_size(uri, files[0].size_bytes)
    with open_range(files[0]) as reader:
        return reader.read()


def _read_local(path: ConfinedPath) -> bytes:
    """Return the bytes of a regular file; devices and pipes are never opened.

    Raises:
        UnreadableRecord: There is no such file.
        DataError: The disk fails.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - it need not be a valid ``Path``
            raise UnreadableRecord(f"the image {_short(path)} is not a regular file")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableRecord(f"the image {_short(path)} is not a regular file")
            _check_size(path, status.st_size)
            return file.read(status.st_size)
    except OSError as error:
        if error.errno in _FAILURES:
            raise DataError(
                f"An image cannot be read: {error.strerror}", where=path,
                hint="check its disk, then run the same command again",
            ) from error  # fmt: skip
        raise UnreadableRecord(f"the image {_short(path)} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnreadableRecord(f"the image {_short(path)} has no valid path: {error}") from error


def _check_size(path: str, size_bytes: int) -> None:
    if size_bytes > MAX_IMAGE_BYTES:
        raise UnreadableRecord(
            f"the image {_short(path)} has {size_bytes:,} bytes, more than {MAX_IMAGE_BYTES:,}"
        )  # fmt: skip


def _short(path: str) -> str:
    return repr(path if len(path) <= _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}...")


class ImageStore:
    """The images of a cache, by the hash of their bytes. Thread-safe; several builders may write the same image.

    Args:
        directory: The cache.
        layout: How images are placed in its rows.
    """

    def __init__(self, directory: Path, layout: ImageLayout) -> None:
        self._directory, self._layout = directory, layout

    def keep(self, documents: Sequence[Any]) -> tuple[list[Any], list[BadRecord]]:
        """Store the images of documents; return the documents with their hashes, and the unreadable ones."""
        kept: list[Any] = []
        bad: list[BadRecord] = []
        for document in documents:
            if isinstance(document, Document) and document.images:
                try:
                    document = load_images(document, self._layout)
                except UnreadableRecord as error:
                    bad.append(_bad(document, error))
                    continue
                for image in document.images or ():
                    self._write(image.digest, cast("bytes", image.content))
                stored = tuple(replace(image, content=b"") for image in document.images or ())
                document = replace(document, images=stored)
            kept.append(document)
        return kept, bad

    def _write(self, digest: int, content: bytes) -> None:
        path = self._path(digest)
        if not path.exists():
            make_directory(path.parent)
            write_file(path, content)

    def read_all(self, tokens_NC: npt.NDArray[Any]) -> dict[int, bytes]:
        """Return the bytes of the images in stored rows, by their hash."""
        return {digest: self.read(digest) for digest in dict.fromkeys(find_images(tokens_NC)[1])}

    def read(self, digest: int) -> bytes:
        """Return the bytes of an image.

        Raises:
            DataError: It is missing or damaged.
        """
        path = self._path(digest)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _lost(path, f"cannot be read: {error.strerror}") from error
        if xxhash.xxh3_64_intdigest(content) != digest:
            raise _lost(path, "does not match its hash")
        return content

    def _path(self, digest: int) -> Path:
        return image_path(self._directory, digest)


def image_path(directory: Path, digest: int) -> Path:
    """Return the path of an image in a cache."""
    name = f"{digest:016x}"
    return directory / DIRECTORY_NAME / name[:2] / name


def _lost(path: Path, what: str) -> DataError:
    return DataError(
        f"An image of the cache {what}", where=str(path),
        hint="remove the cache directory and build it again from the source",
    )  # fmt: skip
