"""Where bytes are, whatever the scheme: listings, immutable versions, ranged reads."""

from vorox.data.storage.fetched import Fetched, reading_from
from vorox.data.storage.local import local_path, root_of
from vorox.data.storage.locations import STANDARD_LIBRARY, StoredFile, absolute, has_magic, place_in, scheme_of
from vorox.data.storage.retry import RetryBudget, RetryPolicy, in_one_budget, retry_budget
from vorox.data.storage.transport import close_connections
from vorox.data.storage.verbs import list_files, open_range, open_seekable
from vorox.data.storage.versions import ContentVersions, content_hash
from vorox.data.storage.waiting import WaitingForData, waiting_for_data

__all__ = [
    "STANDARD_LIBRARY",
    "ContentVersions",
    "Fetched",
    "RetryBudget",
    "RetryPolicy",
    "StoredFile",
    "WaitingForData",
    "absolute",
    "close_connections",
    "content_hash",
    "has_magic",
    "in_one_budget",
    "list_files",
    "local_path",
    "open_range",
    "open_seekable",
    "place_in",
    "reading_from",
    "retry_budget",
    "root_of",
    "scheme_of",
    "waiting_for_data",
]
