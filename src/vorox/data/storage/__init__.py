"""Where bytes are, whatever the scheme: listings, immutable versions, ranged reads."""

from vorox.data.storage.local import local_path, root_of
from vorox.data.storage.locations import STANDARD_LIBRARY, StoredFile, absolute, has_magic, place_in, scheme_of
from vorox.data.storage.verbs import list_files, open_range, open_seekable
from vorox.data.storage.versions import ContentVersions, content_hash

__all__ = [
    "STANDARD_LIBRARY",
    "ContentVersions",
    "StoredFile",
    "absolute",
    "content_hash",
    "has_magic",
    "list_files",
    "local_path",
    "open_range",
    "open_seekable",
    "place_in",
    "root_of",
    "scheme_of",
]
