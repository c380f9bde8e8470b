"""What a device can compute in more than one way: a resume or a replay takes it from the record of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vorox.models.decoder.document_separation import DocumentAttention


@dataclass(slots=True)
class RecordedChoices:
    """What this device has for new runs, or what a recorded run had.

    Attributes:
        document_attention: How the native decoder separates the documents of packed rows; every device has ``mask``.
    """

    document_attention: DocumentAttention = "mask"

    def adopt(self, recorded: Mapping[str, object], available: DocumentAttention) -> None:
        """Compute as a recorded run of this engine did, where this device can."""
        if recorded.get("engine") == "torch":
            self.document_attention = available if recorded["document_attention"] == available else "mask"

    def facts(self) -> dict[str, str]:
        """Return what the record of a run has of these."""
        return {"document_attention": self.document_attention}
