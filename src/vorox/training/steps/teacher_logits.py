"""Stored logits of a teacher: the largest logits of rows, found by the digests of the rows

In: the digests of rows and a teacher's logits. Out: ``teacher.json`` with what they were computed with, and files
``rows-000000.safetensors`` with digests, tokens, logits and a checksum of every row. A row is found by its digest
alone, so seed, batch size, epochs and ranks of the student are free. Files are committed one at a time and never
changed; a writer that stopped continues with the rows that are missing.

Shape legend: N rows, T positions, K tokens, A micro-batches of B rows.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.batch import IGNORED_LABEL, Batch, TeacherLogits
from vorox.core.errors import ConfigError, DataError
from vorox.core.files import atomic
from vorox.core.files.atomic import canonical_json, pretty_json
from vorox.core.files.file_holder import FileLock
from vorox.core.files.json_reader import read_json
from vorox.core.pluralize import pluralize
from vorox.models.arrays.weights_file import Array, WeightsFile, entry_of, write_weights

HEADER_NAME = "teacher.json"
LOGITS_FILES = (HEADER_NAME, "rows-*.safetensors")
"""The files of a directory of stored logits."""
FORMAT = "vorox-teacher-logits/1"
FILE_BYTES = 1 << 26
"""Size of a file; a row that is larger has one of its own."""
_KEY = "train.distillation.logits"
_COMMAND = "vorox data teacher-logits"
_LOCK = "teacher.lock"

Precision = Literal["fp16", "fp32"]
DigestArray = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LogitsHeader:
    """What stored logits were computed with.

    Attributes:
        teacher: Fingerprint of its weights.
        vocab_size: Its tokens.
        tokenizer: Fingerprint of the tokenizer of the rows.
        row_tokens: Positions of a row, T.
        top_k: Logits of a position, K.
        precision: Number format of the logits.
        document_mask: Whether attention was confined to a document.
        environment: Versions and device that computed them.
    """

    teacher: str
    vocab_size: int
    tokenizer: str
    row_tokens: int
    top_k: int
    precision: Precision
    document_mask: bool
    environment: Mapping[str, str | int | bool]

    @property
    def identity(self) -> str:
        """Hash of all fields; a checkpoint records it as the fingerprint of the teacher."""
        return hashlib.sha256(canonical_json(self.to_json())).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def read_header(directory: Path) -> LogitsHeader:
    """Read what stored logits were computed with.

    Raises:
        ConfigError: The directory has no stored logits of this format.
    """
    path = directory / HEADER_NAME
    try:
        values = read_json(path, dict)
        if values.pop("format") != FORMAT:
            raise ValueError
        return LogitsHeader(**values)
    except FileNotFoundError as error:
        raise ConfigError(
            f"No stored logits at {directory}", where=_KEY, hint=f"write them with `{_COMMAND} CONFIG --to {directory}`"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} does not describe stored logits of format {FORMAT}", where=_KEY) from error


class LogitsReader:
    """Stored logits, opened for reading. Thread-safe; rows that a writer adds later are not seen.

    Raises:
        ConfigError: The directory has no stored logits.
        CheckpointError: A file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.header = directory, read_header(directory)
        self._files = [WeightsFile(path) for path in sorted(directory.glob(LOGITS_FILES[1]))]
        digests = [file.read("digests") for file in self._files]
        all_digests = np.concatenate([np.zeros(0, np.uint64), *digests])
        self._order = np.argsort(all_digests, kind="stable")
        self._digests: DigestArray = all_digests[self._order]
        self._first_rows = np.cumsum([0, *map(len, digests)])

    @property
    def num_rows(self) -> int:
        return len(self._digests)

    @property
    def num_files(self) -> int:
        return len(self._files)

    def find(self, digests: DigestArray) -> npt.NDArray[np.int64]:
        """Return the number of each row among the stored ones; -1 where it is missing."""
        if not self.num_rows:
            return np.full(digests.shape, -1, np.int64)
        places = np.minimum(np.searchsorted(self._digests, digests), self.num_rows - 1)
        return np.where(self._digests[places] == digests, self._order[places], -1)

    def read(self, batch: Batch) -> TeacherLogits:
        """Read the logits of the rows of a batch; rows that only pad it have zeros.

        A row with masked documents has those of the stored row, and zeros at the positions without a label: those of
        masked documents are among them, and no loss reads them.

        Raises:
            DataError: A row is missing or damaged.
        """
        shape = (*batch.row_digests_AB.shape, batch.row_tokens, self.header.top_k)
        trained_N = batch.row_digests_AB.reshape(-1)
        digests_N = trained_N if batch.stored_digests_AB is None else batch.stored_digests_AB.reshape(-1)
        numbers_N = self.find(digests_N)
        missing = np.flatnonzero((numbers_N < 0) & (digests_N != 0))
        if missing.size:
            raise DataError(
                f"Stored logits lack {missing.size} of {pluralize(digests_N.size, 'row')} of step {batch.step + 1:,}, "
                f"the first with digest {int(digests_N[missing[0]]):016x}",
                where=f"{_KEY}: {self.directory}",
                hint=f"the rows have changed, or the run is longer: `{_COMMAND}` with the data settings of this run "
                "and the same directory adds the missing rows, unless a document of them was erased from the cache",
            )
        ids_NTK, logits_NTK = (
            np.zeros((digests_N.size, *shape[2:]), np.int32),
            np.zeros((digests_N.size, *shape[2:]), np.float32),
        )
        for row in np.flatnonzero(digests_N != 0).tolist():
            ids_NTK[row], logits_NTK[row] = self._read_row(int(numbers_N[row]), int(digests_N[row]))
        unread_NT = batch.labels_ABT.reshape(digests_N.size, -1) == IGNORED_LABEL
        unread_NT &= (trained_N != digests_N)[:, None]
        ids_NTK[unread_NT], logits_NTK[unread_NT] = 0, 0
        return TeacherLogits(ids_NTK.reshape(shape), logits_NTK.reshape(shape))

    def _read_row(self, number: int, digest: int) -> tuple[Array, Array]:
        index = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        file, row = self._files[index], number - int(self._first_rows[index])
        ids_TK, logits_TK = (file.read_rows(name, row, row + 1)[0] for name in ("ids", "logits"))
        if int(file.read_rows("checksums", row, row + 1)[0]) != _checksum(digest, ids_TK, logits_TK):
            raise DataError(
                f"Stored logits of row {digest:016x} are damaged", where=str(file.path),
                hint=f"remove the file, and run `{_COMMAND}` again to compute its rows",
            )  # fmt: skip
        return ids_TK, logits_TK


class LogitsWriter:
    """Adds rows to stored logits, a context manager; one writer at a time. At its end, all rows are on disk.

    Args:
        directory: A new directory, or stored logits with the same header.
        header: What the rows are computed with.

    Raises:
        ConfigError: The directory holds something else, logits of another header, or has a writer.
    """

    def __init__(self, directory: Path, header: LogitsHeader) -> None:
        self._directory, self.header = directory, header
        self._rows: list[tuple[int, Array, Array]] = []
        self._added: set[int] = set()
        if not (directory / HEADER_NAME).exists():
            if directory.exists() and any(path.name != _LOCK for path in directory.iterdir()):
                raise ConfigError(
                    f"{directory} is not empty and has no stored logits", where="--to", hint="use a new directory"
                )
            atomic.make_directory(directory.absolute())
        self._lock = FileLock(directory / _LOCK, blocking=False, purpose=f"directory {directory}").acquire()
        try:
            if not (directory / HEADER_NAME).exists():
                atomic.write_file(directory / HEADER_NAME, pretty_json(header.to_json()))
            _check_same(directory, read_header(directory), header)
            atomic.sweep_temporary(directory)
            self._stored = LogitsReader(directory)
        except BaseException:
            self._lock.release()
            raise
        names = [path.stem.partition("-")[2] for path in directory.glob(LOGITS_FILES[1])]
        self._next_file = max((int(name) + 1 for name in names if name.isdigit()), default=0)
        row_bytes = header.row_tokens * header.top_k * (4 + (2 if header.precision == "fp16" else 4))
        self._file_rows = max(1, FILE_BYTES // row_bytes)

    @property
    def num_rows(self) -> int:
        """Rows in the directory, with those added since."""
        return self._stored.num_rows + len(self._added)

    def missing(self, digests_N: DigestArray) -> npt.NDArray[np.int64]:
        """Return the indices of the rows that have no logits yet, each digest once; rows that pad a batch are none."""
        wanted = (self._stored.find(digests_N) < 0) & (digests_N != 0)
        found = [index for index in np.flatnonzero(wanted).tolist() if int(digests_N[index]) not in self._added]
        return np.array(list({int(digests_N[index]): index for index in reversed(found)}.values())[::-1], np.int64)

    def add(self, digest: int, ids_TK: npt.NDArray[np.int32], logits_TK: npt.NDArray[np.float32]) -> None:
        """Add a row; logits that fp16 cannot hold become its lowest number."""
        stored_TK: Array = logits_TK
        if self.header.precision == "fp16":
            stored_TK = np.maximum(logits_TK, np.finfo(np.float16).min).astype(np.float16)
        self._rows.append((digest, ids_TK, stored_TK))
        self._added.add(digest)
        if len(self._rows) >= self._file_rows:
            self._commit()

    def _commit(self) -> None:
        if not self._rows:
            return
        digests = np.array([digest for digest, _, _ in self._rows], np.uint64)
        checksums = [_checksum(digest, ids, logits.astype(np.float32)) for digest, ids, logits in self._rows]
        arrays: dict[str, Array] = {
            "digests": digests,
            "checksums": np.array(checksums, np.uint64),
            "ids": np.stack([ids for _, ids, _ in self._rows]),
            "logits": np.stack([logits for _, _, logits in self._rows]),
        }
        content = io.BytesIO()
        entries = [entry_of(name, array) for name, array in arrays.items()]
        write_weights(content, entries, arrays.items(), metadata={"format": FORMAT})
        atomic.write_file(self._directory / f"rows-{self._next_file:06d}.safetensors", content.getbuffer())
        self._next_file += 1
        self._rows.clear()

    def __enter__(self) -> LogitsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._commit()  # rows that were computed are kept, also after an error
        finally:
            self._lock.release()


def _check_same(directory: Path, stored: LogitsHeader, wanted: LogitsHeader) -> None:
    """Check that new rows are computed like the stored ones."""
    before, now = stored.to_json(), wanted.to_json()
    changed = [key for key in now if before[key] != now[key]]
    if changed:
        was, is_now = (json.dumps({key: values[key] for key in changed}) for values in (before, now))
        raise ConfigError(
            f"{directory} holds logits of another computation: {was}, now {is_now}", where="--to",
            hint="use a new directory, or restore what has changed",
        )  # fmt: skip


def _checksum(digest: int, ids_TK: Array, logits_TK: Array) -> int:
    """Return the xxh3-64 hash of a row's digest, its tokens as int32 and its logits as fp32."""
    found = xxhash.xxh3_64(digest.to_bytes(8, "little"))
    found.update(np.ascontiguousarray(ids_TK, "<i4").tobytes())
    found.update(np.ascontiguousarray(logits_TK, "<f4").tobytes())
    return found.intdigest()
