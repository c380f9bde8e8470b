"""Base class of all sections of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

ImportPath = Annotated[str, StringConstraints(pattern=r"^[^:\s]+:[A-Za-z_]\w*$")]
"""A user function: ``package.module:function`` or ``path/to/file.py:function`` (``core/user_code/extensions.py``)."""


class Section(BaseModel):
    """A section: frozen, no unknown keys, every field described. Derived values are methods, never fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
