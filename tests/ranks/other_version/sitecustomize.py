"""Python runs this at its start where the folder is on its path: the process then has another version of jaxlib."""

from __future__ import annotations

from vorox.core.platform import environment

_package_versions = environment.package_versions
environment.package_versions = lambda: {**_package_versions(), "jaxlib": "0.0.1"}
