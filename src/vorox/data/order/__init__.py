"""The order of rows: plan, mixture, growth, and the loader that reads rows in that order."""
