"""Images of documents: from a record to the cache of its rows, and back to pixels.

A record names its images (a path, bytes, a data: URI); their encoded bytes are kept in the cache by their hash, once
each, and are read and decoded again when a batch needs them. Invariants: a stored image can be decoded; what is read
has the hash that its row names.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy.typing as npt
import xxhash

from vorox.core.atomic import make_directory, write_file
from vorox.core.errors import ConfigError, DataError
from vorox.data.documents import BadRecord, Document, PlacedImage, Record, SourceFile, UnreadableRecord
from vorox.data.image_decoding import measure_image
from vorox.data.image_layout import ImageLayout
from vorox.data.image_tokens import find_images
from vorox.data.storage import list_files, open_range, scheme_of

MARK = "<image>"
"""Where an image belongs, in the text of a record."""

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


def placed(record: Record) -> Record:
    """Return the record with its images placed in its text; an unreadable one if they do not match."""
    if not isinstance(record, Document) or record.images is None:
        return record
    try:
        return place_images(record)
    except UnreadableRecord as error:
        return _bad(record, error)


def _bad(document: Document, error: Exception) -> BadRecord:
    place = (document.file_index, document.ordinal, document.byte_offset, document.byte_length)
    return BadRecord(*place, None, str(error))


def load_images(document: Document, files: Sequence[SourceFile], layout: ImageLayout) -> Document:
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
            name = f"the image {content!r}"
            content = _read_file(content, files[document.file_index].uri)
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


def _read_file(path: str, record_uri: str) -> bytes:
    """Return the bytes of an image, whose path is relative to the file of its record.

    Raises:
        UnreadableRecord: The path names no file, or one in another store.
        DataError: It cannot be read.
    """
    scheme = scheme_of(record_uri)
    try:
        is_elsewhere = scheme_of(path) not in (None, scheme)
    except ConfigError:
        is_elsewhere = True
    if is_elsewhere:
        raise UnreadableRecord(f"the image {path!r} is in another store than the record")
    if scheme is not None:
        uri = path if scheme_of(path) else f"{record_uri.rpartition('/')[0]}/{path}"
        (file,) = list_files(uri, ())
        with open_range(file) as reader:
            return reader.read()
    place = Path(record_uri).parent / path
    try:
        return place.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError) as error:
        raise UnreadableRecord(f"the image {path!r} does not exist beside the record's file") from error
    except OSError as error:
        raise DataError(
            f"An image cannot be read: {error.strerror}", where=str(place),
            hint="check that the file is readable, then run the same command again",
        ) from error  # fmt: skip


class ImageStore:
    """The images of a cache, by the hash of their bytes. Thread-safe; several builders may write the same image.

    Args:
        directory: The cache.
        layout: How images are placed in its rows.
    """

    def __init__(self, directory: Path, layout: ImageLayout) -> None:
        self._directory, self._layout = directory / DIRECTORY_NAME, layout

    def keep(self, documents: Sequence[Any], files: Sequence[SourceFile]) -> tuple[list[Any], list[BadRecord]]:
        """Store the images of documents; return the documents with their hashes, and the unreadable ones."""
        kept: list[Any] = []
        bad: list[BadRecord] = []
        for document in documents:
            if isinstance(document, Document) and document.images:
                try:
                    document = load_images(document, files, self._layout)
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
        name = f"{digest:016x}"
        return self._directory / name[:2] / name


def _lost(path: Path, what: str) -> DataError:
    return DataError(
        f"An image of the cache {what}", where=str(path),
        hint="remove the cache directory and build it again from the source",
    )  # fmt: skip
