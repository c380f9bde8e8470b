"""The public Python API, one module per noun; ``vorox`` re-exports its names."""
