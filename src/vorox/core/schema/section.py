"""What all sections of the configuration have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

ImportPath = Annotated[str, StringConstraints(pattern=r"^[^:\s]+:[A-Za-z_]\w*$")]
"""A function of the user: ``package.module:function`` or ``path/to/file.py:function`` (``core/extensions.py``)."""


class Section(BaseModel):
    """Frozen, without unknown keys, every field described. Derived values are functions, never fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
