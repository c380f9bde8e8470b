"""Reports on recorded runs: training records, document search, engine parity and the metadata database."""
