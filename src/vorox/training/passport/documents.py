"""The documents of a passport by file name, each in the form of its own standard."""

from __future__ import annotations

from vorox.training.passport.croissant import croissant
from vorox.training.passport.cyclonedx import cyclonedx
from vorox.training.passport.description import Files, Passport, library
from vorox.training.passport.spdx import spdx

CARD_NAME = "README.md"
"""The model card, where a repository of the Hugging Face Hub has it."""
DOCUMENT_NAMES = ("bom.cdx.json", "croissant.json", "model.spdx.json")


def require_libraries() -> None:
    """Refuse a passport before any work if a package that writes it is not installed.

    Raises:
        ConfigError: One is not.
    """
    for name in ("cyclonedx", "packageurl", "mlcroissant", "spdx_python_model", "huggingface_hub"):
        library(name)


def documents(passport: Passport, files: Files) -> dict[str, bytes]:
    """Return the documents that programs read, by name; the model card is for people."""
    return dict(
        zip(DOCUMENT_NAMES, (cyclonedx(passport, files), croissant(passport), spdx(passport, files)), strict=True)
    )
