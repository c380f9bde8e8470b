"""Where bytes are, whatever the scheme: listings, immutable versions, ranged reads; and writing to stores."""

from vorox.data.storage.background import close_connections
from vorox.data.storage.fetched import Fetched, reading_from
from vorox.data.storage.local import local_path, root_of
from vorox.data.storage.locations import (
    STANDARD_LIBRARY,
    NoSuchEnding,
    StoredFile,
    absolute,
    has_magic,
    place_in,
    scheme_of,
)
from vorox.data.storage.remote import shared_reads
from vorox.data.storage.retry import RetryBudget, RetryPolicy, StoreUnreachable, in_one_budget, retry_budget
from vorox.data.storage.verbs import (
    check_writable,
    list_files,
    list_objects,
    open_range,
    open_seekable,
    put_bytes,
    put_file,
    remove_object,
)
from vorox.data.storage.versions import ContentVersions, content_hash
from vorox.data.storage.waiting import Waiter, WaitingForData, untold, waiting_for_data
from vorox.data.storage.writing import WRITABLE_SCHEMES, ConditionFailed

__all__ = [
    "STANDARD_LIBRARY",
    "WRITABLE_SCHEMES",
    "ConditionFailed",
    "ContentVersions",
    "Fetched",
    "NoSuchEnding",
    "RetryBudget",
    "RetryPolicy",
    "StoreUnreachable",
    "StoredFile",
    "Waiter",
    "WaitingForData",
    "absolute",
    "check_writable",
    "close_connections",
    "content_hash",
    "has_magic",
    "in_one_budget",
    "list_files",
    "list_objects",
    "local_path",
    "open_range",
    "open_seekable",
    "place_in",
    "put_bytes",
    "put_file",
    "reading_from",
    "remove_object",
    "retry_budget",
    "root_of",
    "scheme_of",
    "shared_reads",
    "untold",
    "waiting_for_data",
]
