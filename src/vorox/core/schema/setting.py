"""The declaration of a setting: type, default and bounds, and what the rest of the program must know of it, as data.

``setting(...)`` returns a pydantic field that carries ``SettingFacts``. The digest, the rules of a resume, the settings
without effect, what an engine lacks and the synonyms are read from there (``core/config/schema_fields.py``); the
functions that act on the facts stay where they are used. A fact that a section states holds for all settings in it.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

FUNCTION: Final = "package.module:function"
"""Stands for every user function among the values of a setting."""

Engine = Literal["torch", "jax"]
ENGINES: Final[tuple[Engine, ...]] = typing.get_args(Engine)
"""``backends/engine_table.py`` says what each has."""
Digest = Literal["identity", "bits", "none"]
Location = Literal["model", "tokenizer"]
"""What a setting decides. identity: which run it is; bits: numbers of a run, decided when it is created; none: no bit
of the parameters, so runs that differ in it alone are the same run."""

Resume = Literal["logged", "refused", "allowed", "recorded", "mixture", "length"]
"""A change at a resume. logged: allowed, recorded from the resumed step on; refused: it would be another model, data or
order; allowed: an exception where it stands, as of a place; recorded: sources may be added and removed, which the plan
records, but not change within; mixture: may change, in a source of the same name too, which the plan records; length:
the plan records the new length or warm-up."""

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Need:
    """A condition on another setting, without which a setting has no effect.

    Attributes:
        key: The other setting: dotted, or a name in the same section.
        values: Its values that meet the condition; ``FUNCTION`` stands for every user function. Empty: any that is
            neither null nor false, 0 or empty.
        never: Its only values that do not; ``FUNCTION`` as there.
        contains: A text that its value, or an entry of it, contains.
        remedy: The condition in words, for messages; empty: the key with its values.
        is_feature: The setting is no detail of the other one, but a feature that it does not support: a value that the
            user sets is refused, and never reset.
    """

    key: str
    values: tuple[Scalar | tuple[()], ...] = ()
    never: tuple[Scalar, ...] = ()
    contains: str = ""
    remedy: str = ""
    is_feature: bool = False


@dataclass(frozen=True, slots=True)
class Implied:
    """A default under a value of another setting."""

    value: Scalar
    key: str
    under: Scalar


@dataclass(frozen=True, slots=True)
class SettingFacts:
    """What is known of a setting beside its type; ``None``: as its section.

    Attributes:
        digest: What it decides.
        resume: Whether it may change at a resume.
        engines: The engines that support it; or, by value, those that support this value.
        needs: Without these it has no effect.
        alternatives: Settings of the same section of which, with this one, at most one is given.
        implied: Another default.
        location: It names the place of the model or the tokenizer, whose content a run records.
        synonyms: Names of the setting in other trainers, valid at the top and in its section.
    """

    digest: Digest | None = None
    resume: Resume | None = None
    engines: tuple[Engine, ...] | Mapping[str, tuple[Engine, ...]] = ENGINES
    needs: tuple[Need, ...] = ()
    alternatives: tuple[str, ...] = ()
    implied: Implied | None = None
    location: Location | None = None
    synonyms: tuple[str, ...] = ()


_REQUIRED: Final[Any] = ...


def setting(
    default: Any = _REQUIRED,
    *,
    description: str,
    default_factory: Callable[[], Any] | None = None,
    digest: Digest | None = None,
    resume: Resume | None = None,
    engines: tuple[Engine, ...] | Mapping[str, tuple[Engine, ...]] = ENGINES,
    needs: Need | tuple[Need, ...] = (),
    alternatives: tuple[str, ...] = (),
    implied: Implied | None = None,
    location: Location | None = None,
    synonyms: tuple[str, ...] = (),
    **bounds: Any,
) -> Any:
    """Declare a setting.

    Args:
        default: The default; required without one.
        description: Of its meaning and values.
        default_factory: Makes the default, of a section or mapping.
        digest, resume, engines, needs, alternatives, implied, location, synonyms: See ``SettingFacts``.
        bounds: As of ``pydantic.Field``: ``ge``, ``gt``, ``le``, ``lt``, ``min_length``, ``max_length``, ``pattern``.
    """
    if default_factory is not None:
        field = Field(default_factory=default_factory, description=description, **bounds)
    else:
        field = Field(default, description=description, **bounds)
    conditions = needs if isinstance(needs, tuple) else (needs,)
    facts = SettingFacts(digest, resume, engines, conditions, alternatives, implied, location, synonyms)
    field.metadata.append(facts)
    return field


def facts_of(field: FieldInfo) -> SettingFacts:
    """Return what a field declares."""
    return next((found for found in field.metadata if isinstance(found, SettingFacts)), SettingFacts())
