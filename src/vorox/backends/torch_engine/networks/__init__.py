"""Models that the engine trains: native and foreign, whole or in a pipeline; adapters, teacher and reference."""
