"""Reports as Markdown: the record of a run's training content, and model cards."""
