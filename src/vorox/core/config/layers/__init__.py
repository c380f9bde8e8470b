"""The layers of a configuration (presets, files, overrides, defaults), merged into one tree with origins."""
