"""Where bytes are, whatever the scheme: listings, immutable versions, ranged reads."""

from vorox.data.storage.local import (
    STANDARD_LIBRARY,
    ContentVersions,
    StoredFile,
    absolute,
    content_hash,
    list_files,
    local_path,
    open_range,
    root_of,
)

__all__ = [
    "STANDARD_LIBRARY",
    "ContentVersions",
    "StoredFile",
    "absolute",
    "content_hash",
    "list_files",
    "local_path",
    "open_range",
    "root_of",
]
