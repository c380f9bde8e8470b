"""What the pages show, as plain JSON values: a run, its data and ranks, comparisons, estimates."""
