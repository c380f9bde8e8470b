"""Choices that affect bits; a resume or a replay takes them over from the record of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from vorox.models.decoder.document_separation import DocumentAttention

Products = Literal["blas", "onednn"]
GradientSums = Literal["whole", "buckets"]
DocumentStates = Literal["rows", "resets"]
LossChunks = Literal["operations", "compiled"]
HeadProducts = Literal["rounded", "fp32"]


@dataclass(slots=True)
class RecordedChoices:
    """What this version chooses for new runs, or what a recorded run had.

    Attributes:
        gradient_products: Library of the products that add to the gradients of weights, in the fp32 CPU kernels.
        document_attention: How the native decoder separates the documents of packed rows.
        gradient_sums: How replicas add their gradients: whole buffers after the backward pass, or buckets within it.
        document_states: How Mamba layers in transformers separate them: each document as a row of its own, or states
            that start at zero in every document.
        loss_chunks: How the loss of a compiled model is computed: operation by operation, or as a compiled graph.
        head_products: How products of half precision are added to the gradient of the head on CUDA: rounded to half
            precision before, or as fp32 sums.
    """

    gradient_products: Products = "blas"
    document_attention: DocumentAttention = "mask"
    gradient_sums: GradientSums = "buckets"
    document_states: DocumentStates = "rows"
    loss_chunks: LossChunks = "operations"
    head_products: HeadProducts = "rounded"

    def adopt(self, recorded: Mapping[str, object], products: Products, available: RecordedChoices) -> None:
        """Compute as a recorded run of this engine did.

        Older ones used ``products`` for gradients, dense masks, sums of whole buffers, one document per row where Mamba
        layers in transformers now reset their states, an uncompiled loss, and rounded products for the head's
        gradient. ``available`` is what this device and its settings have.
        """
        if recorded.get("engine") != "torch":
            return
        self.gradient_products = "blas" if recorded.get("gradient_products", products) == "blas" else products
        attention = available.document_attention
        self.document_attention = attention if recorded.get("document_attention") == attention else "mask"
        self.gradient_sums = "buckets" if recorded.get("gradient_sums") == "buckets" else "whole"
        self.document_states = "resets" if recorded.get("document_states") == "resets" else "rows"
        is_compiled = recorded.get("loss_chunks") == available.loss_chunks == "compiled"
        self.loss_chunks = "compiled" if is_compiled else "operations"
        is_fp32 = recorded.get("head_products") == available.head_products == "fp32"
        self.head_products = "fp32" if is_fp32 else "rounded"

    def facts(self) -> dict[str, str]:
        """Return what the record of a run has of these, but the products; what it had before them is left out."""
        chosen: dict[str, tuple[str, str]] = {
            "document_attention": (self.document_attention, "mask"),
            "gradient_sums": (self.gradient_sums, "whole"),
            "document_states": (self.document_states, "rows"),
            "loss_chunks": (self.loss_chunks, "operations"),
            "head_products": (self.head_products, "rounded"),
        }
        return {name: choice for name, (choice, earlier) in chosen.items() if choice != earlier}


def available_choices(
    device: torch.device, dtype: torch.dtype, attention: DocumentAttention, *, compiled: bool
) -> RecordedChoices:
    """Return what a new run chooses on a device."""
    return RecordedChoices(
        document_attention=attention,
        document_states="resets",
        loss_chunks="compiled" if compiled else "operations",
        head_products="fp32" if device.type == "cuda" and dtype != torch.float32 else "rounded",
    )
