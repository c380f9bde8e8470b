"""Who builds which unit: the queue, schedulers in one process or many, commits, the report."""
