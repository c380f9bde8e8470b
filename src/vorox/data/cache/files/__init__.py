"""The files of a cache, and whether they are sound: chunks, manifest, quarantine lists, leases."""
