"""A dataset for other training loops, over streams (``RemoteIterableDataset``)."""
