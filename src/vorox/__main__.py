"""``python -m vorox`` is ``vorox``: it imports nothing from the working directory either, also under torchrun."""

import os
import sys

if __name__ == "__main__":
    # ``python -m`` has put the working directory in front: remove it before anything else is imported.
    if not sys.flags.safe_path and sys.path[0] in {"", os.getcwd()}:  # noqa: PTH109
        del sys.path[0]
    from vorox.cli import run

    run()
