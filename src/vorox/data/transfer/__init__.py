"""Token data in the formats of other trainers: exported from caches, downloaded from the hub."""
