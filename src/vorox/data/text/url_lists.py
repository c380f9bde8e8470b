"""Published URL lists as sources: functions that a source names as its path."""

from __future__ import annotations

from vorox.core.errors import DataError
from vorox.data import storage
from vorox.data.storage import canonical_uri

DOLMA_URLS = "hf://allenai/dolma/urls/v1_7.txt"
"""One URL per line: all 2,419 files of version 1.7, on the server of its authors."""

_LIST_BYTES = 16 << 20


def dolma() -> list[str]:
    """Return the URLs of all files of Dolma 1.7, from the list in its repository on the Hugging Face Hub."""
    return addresses_in(DOLMA_URLS)


def addresses_in(location: str) -> list[str]:
    """Return the URLs in a text file, one per line; blank lines and comments (#) are skipped.

    Raises:
        DataError: The file cannot be read, or a line is not a URL.
    """
    (file,) = storage.list_files(canonical_uri(location), ())
    with storage.open_range(file, 0, min(file.size_bytes, _LIST_BYTES)) as reader:
        lines = reader.read().decode("utf-8", "replace").splitlines()
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    wrong = next((line for line in found if "://" not in line), None)
    if wrong is not None:
        raise DataError(f"The list has a line that is not a URL: {wrong[:80]!r}", where=file.uri)
    return found
