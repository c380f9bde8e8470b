"""Which setting names the weights that a run starts from."""

from __future__ import annotations

from vorox.core.config.layers.tree import ConfigTree
from vorox.core.errors import ConfigError

FROM_WEIGHTS, NAME_OR_PATH = "train.from_weights", "model.name_or_path"
"""The settings that name an origin."""
_FOREIGN = "huggingface"
"""``KIND`` of ``models/huggingface/spec.py``, whose import takes as long as reading a configuration."""


def naming_setting(tree: ConfigTree) -> str | None:
    """Return the setting that names the weights: the later of the two; the other is removed.

    Raises:
        ConfigError: One layer sets both.
    """
    given = [key for key in (FROM_WEIGHTS, NAME_OR_PATH) if isinstance(tree.get(key), str)]
    if len(given) < 2:
        return given[0] if given and (given[0] == FROM_WEIGHTS or tree.get("model.kind") == _FOREIGN) else None
    weights, model = tree.origin(FROM_WEIGHTS), tree.origin(NAME_OR_PATH)
    if weights.layer == model.layer:
        raise ConfigError(
            f"{FROM_WEIGHTS} and {NAME_OR_PATH} both name the weights to start from",
            where=", ".join(dict.fromkeys((weights.text, model.text))), hint=f"remove {NAME_OR_PATH}",
        )  # fmt: skip
    if weights.layer > model.layer:
        for key in (NAME_OR_PATH, "model.revision", "model.pretrained"):
            tree.reset(key)
        return FROM_WEIGHTS
    tree.reset(FROM_WEIGHTS)
    return NAME_OR_PATH
