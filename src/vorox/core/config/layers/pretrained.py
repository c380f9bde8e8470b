"""What the rules of a configuration need to know about the weights that it starts from.

``training.origin.model_origin`` reads it from files and hands it to ``resolve_config``; nothing here reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Initial weights of a configuration.

    Attributes:
        location: Their location; a hub repository includes its commit.
        label: The setting and its value, for origins of values: ``train.from_weights=DIR``.
        hidden_size: Width of the model; ``None`` if it is not known before the download.
        max_positions_tokens: Longest row that the model reads; ``None`` without a limit, or if it is not known.
        is_adapter: Whether an adapter is trained (LoRA, DoRA, QLoRA), not the weights themselves.
        notes: Decisions that the user should read, one line each.
        peak_lr: Peak learning rate of the run that trained them, for AdamW; ``None`` if it is not known.
        row_tokens: Row length that holds the conversations of the run; ``None`` if it is not measured.
        train_tokens: Tokens of the training text, as estimated; ``None`` if it is not measured.
        is_trained: False for the architecture alone (``model.pretrained=false``).
    """

    location: str
    label: str
    hidden_size: int | None
    max_positions_tokens: int | None
    is_adapter: bool
    notes: tuple[str, ...] = ()
    peak_lr: float | None = None
    row_tokens: int | None = None
    train_tokens: int | None = None
    is_trained: bool = True
