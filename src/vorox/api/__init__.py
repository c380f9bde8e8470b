"""The public Python API, one module per noun; ``vorox`` itself offers its names."""
