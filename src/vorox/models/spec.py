"""The interface of model specifications: what every other part knows of a model, without tensors.

``DecoderSpec`` (``decoder/spec.py``) describes the native decoder, which both engines compute. The parameter table is
the source of names, shapes, initial distributions and weight decay for engines, checkpoints, exports and cost
estimates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from vorox.models.matrix_layout import PLAIN_MATRIX, MatrixLayout

Kind = Literal["embedding", "matrix", "router", "head", "norm", "bias", "state", "tensor"]
Init = Literal["normal", "uniform", "ones", "zeros", "log_range", "time_step"]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One row of the parameter table.

    Attributes:
        name: Canonical name.
        shape: Stored shape; matrices are ``[out, in]`` unless ``layout`` says otherwise.
        init: Initial distribution; ``log_range`` is log 1, log 2, ..., ``time_step`` the inverse softplus of
            log-uniform values within ``bounds``.
        std: Standard deviation of a normal or uniform initialisation around 0, else 0.
        decay: Whether weight decay applies. ``optimizer.decay_embeddings`` decides for embeddings.
        kind: Role; ``matrix`` holds the matrices of a block, which Muon orthogonalises and pruning prunes, ``router``
            those of the router of a mixture of experts, ``norm`` a scale, ``state`` a constant of a recurrence, such as
            A_log, ``tensor`` any other weight, such as a convolution.
        axes: Logical axis of each dimension, for sharding.
        trainable: Whether the optimizer updates it; other parameters are constants of the training state.
        bounds: Range of a ``time_step`` initialisation.
        layout: The matrices of a ``matrix``.
        is_routed: Whether it belongs to experts of which a token reaches only some.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    std: float
    decay: bool
    kind: Kind
    axes: tuple[str, ...]
    trainable: bool = True
    bounds: tuple[float, float] = (0.0, 0.0)
    layout: MatrixLayout = PLAIN_MATRIX
    is_routed: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def matrix_shapes(self) -> list[tuple[int, int]]:
        """Shape ``(out, in)`` of every matrix of a ``matrix``; empty for other roles."""
        return self.layout.shapes(self.shape) if self.kind == "matrix" else []


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Bytes for each row of a micro-batch that the blocks save for the backward pass.

    Attributes:
        all_blocks_bytes: By all blocks together.
        largest_block_bytes: By the block that saves most.
        block_input_bytes: Input of one block.
    """

    all_blocks_bytes: float
    largest_block_bytes: float
    block_input_bytes: float


class ModelSpec(ABC):
    """A model with all dimensions resolved.

    Attributes:
        num_layers: Number of blocks.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the embedding.
        max_positions_tokens: Maximum sequence length.
        has_chunks: Whether the window of a layer is a chunk: positions attend within their own chunk.
        free_to_change: Keys of ``to_json`` that do not affect the meaning of stored weights.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions_tokens: int
    has_chunks: bool = False
    free_to_change: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The parameter table, in the order of the forward pass."""

    @property
    def width_factor(self) -> float:
        """The width as a multiple of the one that learning rates were tuned at: matrices learn at lr / width_factor."""
        return 1.0

    @property
    @abstractmethod
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer with attention, in positions; ``None`` for full attention."""

    @property
    @abstractmethod
    def attention_width(self) -> int:
        """Width of the queries of a layer, over all heads."""

    @property
    def attention_widths(self) -> tuple[int, ...]:
        """``attention_width`` of each layer with attention; empty if all are equal."""
        return ()

    @property
    @abstractmethod
    def saved_per_position(self) -> int:
        """Elements per position that a block saves for its backward pass, without T x T matrices."""

    @property
    def scan_flops_per_position(self) -> float:
        """FLOPs of all state-space scans for one position, forward and backward."""
        return 0.0

    @property
    def has_whole_logits(self) -> bool:
        """Whether the logits of a micro-batch are computed together, not in chunks of the loss."""
        return False

    def saved_activations(self, sequence_length_tokens: int, dtype_bytes: int) -> SavedActivations:
        """Estimate what the blocks save for each row.

        Args:
            sequence_length_tokens: Positions of a row.
            dtype_bytes: Bytes per element of the compute precision.
        """
        block = sequence_length_tokens * self.saved_per_position * dtype_bytes
        return SavedActivations(block * self.num_layers, block, sequence_length_tokens * self.hidden_size * dtype_bytes)

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the spec for manifests; two models are the same if and only if it is equal."""

    @abstractmethod
    def summary(self) -> str:
        """Return the dimensions for people, without the vocabulary."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters; a tied head counts once."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def num_frozen_parameters(self) -> int:
        """Number of elements of the frozen model that an adapter changes; it is not part of the training state."""
        return 0

    @property
    def num_frozen_matmul_weights(self) -> int:
        """The part of ``num_matmul_weights`` that is frozen and gets no gradient."""
        return 0

    def frozen_bytes(self, dtype_bytes: int) -> int:
        """Return the device memory of frozen parameters; adapted layers are stored in the compute precision."""
        del dtype_bytes
        return 0

    @property
    def active_experts(self) -> float:
        """Share of the experts that a token is multiplied by."""
        return 1.0

    @property
    def num_matmul_weights(self) -> int:
        """Elements of all matrices that a token is multiplied by; a tied embedding counts as the head."""
        rows = [row for row in self.parameters if row.kind in ("matrix", "router")]
        routed = sum(row.num_elements for row in rows if row.is_routed)
        others = sum(row.num_elements for row in rows if not row.is_routed)
        return others + round(routed * self.active_experts) + self.vocab_size * self.hidden_size

    @property
    def num_converted_weights(self) -> int:
        """Elements of the trained matrices, of all experts, that a lower compute precision needs a copy of."""
        return sum(row.num_elements for row in self.parameters if row.kind == "matrix") + (
            self.vocab_size * self.hidden_size
        )

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Return what differs from the JSON of the model that stored weights belong to, one text per key."""
        wanted = self.to_json()
        return [
            f"{name} = {stored.get(name)} (here {wanted.get(name)})"
            for name in sorted({*wanted, *stored})
            if name not in self.free_to_change and stored.get(name) != wanted.get(name)
        ]
