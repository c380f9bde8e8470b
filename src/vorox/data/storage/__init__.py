"""Files and object stores under one interface: listings, versions, ranged reads, uploads."""

from vorox.data.storage.connections import close_connections
from vorox.data.storage.failures import ObjectChanged
from vorox.data.storage.listing import list_files
from vorox.data.storage.local import listing_root, local_path
from vorox.data.storage.locations import (
    STANDARD_LIBRARY,
    NoMatchingSuffix,
    NoSuchLocation,
    StoredFile,
    canonical_uri,
    escape_glob,
    glob_root,
    has_magic,
    relative_name,
    scheme_of,
)
from vorox.data.storage.reading import PrefetchedRanges, cache_ranges, open_range, open_seekable, read_prefetched
from vorox.data.storage.requests import (
    RetryBudget,
    RetryPolicy,
    StoreUnreachable,
    abandon_late_requests,
    iterate_in_budget,
    retry_budget,
    run_in_context,
)
from vorox.data.storage.stalls import StallReporter, WaitingForData, silent, waiting_for_data
from vorox.data.storage.versions import ContentVersions, content_hash
from vorox.data.storage.writing import (
    WriteConflict,
    check_writable,
    list_objects,
    put_bytes,
    put_file,
    remove_object,
)

__all__ = [
    "STANDARD_LIBRARY",
    "ContentVersions",
    "NoMatchingSuffix",
    "NoSuchLocation",
    "ObjectChanged",
    "PrefetchedRanges",
    "RetryBudget",
    "RetryPolicy",
    "StallReporter",
    "StoreUnreachable",
    "StoredFile",
    "WaitingForData",
    "WriteConflict",
    "abandon_late_requests",
    "cache_ranges",
    "canonical_uri",
    "check_writable",
    "close_connections",
    "content_hash",
    "escape_glob",
    "glob_root",
    "has_magic",
    "iterate_in_budget",
    "list_files",
    "list_objects",
    "listing_root",
    "local_path",
    "open_range",
    "open_seekable",
    "put_bytes",
    "put_file",
    "read_prefetched",
    "relative_name",
    "remove_object",
    "retry_budget",
    "run_in_context",
    "scheme_of",
    "silent",
    "waiting_for_data",
]
