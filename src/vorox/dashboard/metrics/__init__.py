"""The metrics of a run as columns: decoded, read while it trains, down-sampled for charts."""
