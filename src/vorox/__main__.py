"""``python -m vorox`` is ``vorox``."""

from __future__ import annotations

from vorox.cli import run

if __name__ == "__main__":
    run()
