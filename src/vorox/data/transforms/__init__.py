"""Transforms of documents between reading and packing: filters, deduplication, augmentation."""
