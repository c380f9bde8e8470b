"""``python -m vorox`` is ``vorox``."""

from __future__ import annotations

import sys

from vorox.cli import main

if __name__ == "__main__":
    sys.exit(main())
