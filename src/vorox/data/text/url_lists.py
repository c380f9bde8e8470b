"""Sources that are a published list of addresses; each function is named as a path of a source."""

from __future__ import annotations

from vorox.core.errors import DataError
from vorox.data import storage
from vorox.data.storage import canonical_uri

DOLMA_URLS = "hf://allenai/dolma/urls/v1_7.txt"
"""One address a line: all 2,419 files of version 1.7, on the server of its authors."""

_LIST_BYTES = 16 << 20


def dolma() -> list[str]:
    """Return the addresses of all files of Dolma 1.7, by the list in its repository on the Hugging Face Hub."""
    return addresses_in(DOLMA_URLS)


def addresses_in(location: str) -> list[str]:
    """Return the addresses in a text file, one a line; empty lines and comments (#) are left out.

    Raises:
        DataError: The file cannot be read, or a line is no address.
    """
    (file,) = storage.list_files(canonical_uri(location), ())
    with storage.open_range(file, 0, min(file.size_bytes, _LIST_BYTES)) as reader:
        lines = reader.read().decode("utf-8", "replace").splitlines()
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    wrong = next((line for line in found if "://" not in line), None)
    if wrong is not None:
        raise DataError(f"the list of addresses has a line that is none: {wrong[:80]!r}", where=file.uri)
    return found
