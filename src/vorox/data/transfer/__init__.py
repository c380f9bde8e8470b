"""Token data in the forms of other trainers: written from caches, fetched from the hub."""
