"""What a run measures beside its steps: validation, samples, harness tasks, losses of documents."""
