"""Text sources: file listing, formats, units of records and the holdout rule."""
