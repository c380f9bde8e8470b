"""Resolving the configured transforms to functions with checked arguments.

Names and arguments go in, ``Transform`` objects come out. A transform is a plain function, found by a short name or an
import path; the name of its first parameter determines its input:

    def shout(text, *, marks=1):                   one text in; a text, None (removed) or a list of texts out
    def swap(tokens, rng, *, fraction):            the ids of one document in; ids or None (removed) out

A parameter ``rng`` receives the random generator of the document, ``tokenizer`` the tokenizer and, in a function of
tokens, ``text`` their text (``None`` if the source consists of tokens). All other parameters are arguments, checked
against the function's signature and annotations before any text is read.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from pydantic import TypeAdapter, ValidationError

from vorox.core.errors import ConfigError
from vorox.core.files.atomic import canonical_json
from vorox.core.schema.data import DataConfig, SourceConfig, Split, TransformConfig
from vorox.core.user_code.extensions import identity_of, load_function
from vorox.data.transforms.signatures import Index, datasketch, exact_index, near_index

Kind = Literal["text", "tokens", "duplicates"]


class BuiltIn(NamedTuple):
    """What is known of a built-in transform.

    Attributes:
        path: Its function.
        make_index: Makes the index of a deduplication; ``None`` for other transforms.
        is_augmentation: Whether it changes text, which would break a conversation.
        special_tokens: Its arguments that name special tokens.
        check_library: Refuses it where its library is missing.
    """

    path: str
    make_index: Callable[[Mapping[str, Any]], Index] | None = None
    is_augmentation: bool = False
    special_tokens: tuple[str, ...] = ()
    check_library: Callable[[], object] | None = None


_MODULES = "vorox.data.transforms"
BUILT_IN: Mapping[str, BuiltIn] = {
    "length": BuiltIn(f"{_MODULES}.filters:length"),
    "token_length": BuiltIn(f"{_MODULES}.filters:token_length"),
    "repetition": BuiltIn(f"{_MODULES}.filters:repetition"),
    "exact_duplicates": BuiltIn(f"{_MODULES}.signatures:exact_duplicates", make_index=exact_index),
    "near_duplicates": BuiltIn(
        f"{_MODULES}.signatures:near_duplicates", make_index=near_index, check_library=datasketch
    ),
    "fill_in_the_middle": BuiltIn(
        f"{_MODULES}.augmentation:fill_in_the_middle",
        is_augmentation=True,
        special_tokens=("prefix", "suffix", "middle"),
    ),
    "token_dropout": BuiltIn(
        f"{_MODULES}.augmentation:token_dropout", is_augmentation=True, special_tokens=("replacement",)
    ),
    "local_model": BuiltIn(f"{_MODULES}.augmentation:local_model", is_augmentation=True),
}
"""By name; those of ``core/schema/data.py: TRANSFORMS``."""
_GIVEN: Mapping[Kind, tuple[str, ...]] = {
    "text": ("rng", "tokenizer"),
    "tokens": ("rng", "tokenizer", "text"),
    "duplicates": (),
}


@dataclass(frozen=True, slots=True)
class Transform:
    """A resolved transform.

    Attributes:
        number: Index in the list.
        name: Name as configured.
        kind: Type of the input; ``duplicates`` if the result depends on earlier documents.
        function: The function.
        args: The configured arguments, defaults included.
        given: Which of ``rng``, ``tokenizer`` and ``text`` the function receives.
        identity: Its entry in a recipe, JSON values only.
    """

    number: int
    name: str
    kind: Kind
    function: Callable[..., Any]
    args: Mapping[str, Any]
    given: frozenset[str]
    identity: Mapping[str, Any]

    @property
    def purpose(self) -> str:
        """Index and name: the key of its random generators and counts."""
        return f"{self.number}/{self.name}"

    @property
    def scope(self) -> str:
        """Scope of deduplication: ``corpus`` or ``unit``."""
        return str(self.args.get("scope", "corpus"))


def resolve_transforms(configs: Sequence[TransformConfig], split: str, key: str) -> tuple[Transform, ...]:
    """Resolve the transforms of a split.

    Args:
        configs: The configured transforms, in order.
        split: ``train`` or ``validation``.
        key: Key of the list in the configuration, for errors.

    Raises:
        ConfigError: A function cannot be found or imported or does not accept its arguments; or a transform of text
            follows one of tokens.
    """
    found = [
        _resolve(config, number, f"{key}.{number}") for number, config in enumerate(configs) if split in config.splits
    ]
    tokens_since: Transform | None = None
    for transform in found:
        if transform.kind != "tokens" and tokens_since is not None:
            raise ConfigError(
                f"Transform {transform.name} works on text but follows {tokens_since.name}, which works on tokens",
                where=f"{key}.{transform.number}", hint="put all transforms of text first",
            )  # fmt: skip
        if transform.kind == "tokens":
            if tokens_since is not None and transform.args.get("level") == "character":
                raise ConfigError(
                    f"Transform {transform.name} starts from the text and would undo {tokens_since.name}",
                    where=f"{key}.{transform.number}", hint="put it first, or set its level: token",
                )  # fmt: skip
            tokens_since = transform
    return tuple(found)


def recipe_of(transforms: Sequence[Transform], seed: int) -> tuple[Mapping[str, Any], ...]:
    """Return the transforms as entries of a recipe; the seed is included only for random transforms."""
    return tuple(
        {**transform.identity, **({"number": transform.number, "seed": seed} if "rng" in transform.given else {})}
        for transform in transforms
    )


def index_for(transform: Transform) -> Index:
    """Return an empty index for a deduplication."""
    make = _built_in(transform.name).make_index
    assert make is not None
    return make(transform.args)


def required_special_tokens(name: str, args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the special tokens that a transform with these arguments requires."""
    named = (args.get(argument) for argument in _built_in(name).special_tokens)
    return tuple(token for token in named if token is not None)


def _built_in(name: str) -> BuiltIn:
    """Return what is known of a transform; of a user's, only its path."""
    return BUILT_IN.get(name) or BuiltIn(name)


def _resolve(config: TransformConfig, number: int, where: str) -> Transform:
    built_in = _built_in(config.name)
    path = built_in.path
    function = load_function(config.name, kind="transform", where=f"{where}.name", known=BUILT_IN, path=path)
    parameters = inspect.signature(function).parameters
    first = next(iter(parameters), "")
    if built_in.make_index is None and first not in ("text", "tokens"):
        raise ConfigError(
            f"The first parameter of {path} is named {first or 'nothing'!r}", where=f"{where}.name",
            hint="name it text for a function of a text, tokens for a function of token ids",
        )  # fmt: skip
    kind: Kind = "duplicates" if built_in.make_index is not None else "text" if first == "text" else "tokens"
    rest = {name: parameter for name, parameter in parameters.items() if name != first}
    given = frozenset(name for name in _GIVEN[kind] if name in rest)
    args = _checked(config, {name: rest[name] for name in rest if name not in given}, function, where)
    if built_in.check_library is not None:
        built_in.check_library()
    return Transform(number, config.name, kind, function, args, given, identity_of(path, function, args, where))


def _checked(
    config: TransformConfig, parameters: Mapping[str, inspect.Parameter], function: Callable[..., Any], where: str
) -> dict[str, Any]:
    """Return the checked arguments, including defaults, so that changing a default changes the recipe."""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    for name in config.args:
        if name not in named and not takes_any:
            near = difflib.get_close_matches(name, named, n=2)
            raise ConfigError(
                f"Transform {config.name} has no argument {name!r}", where=f"{where}.args.{name}",
                hint=f"did you mean {' or '.join(near)}?" if near else f"Its arguments: {', '.join(named) or 'none'}",
            )  # fmt: skip
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty]
    for name in missing:
        if name not in config.args:
            raise ConfigError(f"Transform {config.name} needs the argument {name!r}", where=f"{where}.args")
    hints = _hints(function)
    defaults = {name: parameter.default for name, parameter in named.items() if name not in missing}
    values = {name: _validated(config, name, value, hints, where) for name, value in config.args.items()}
    return {**defaults, **values}


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # annotations that cannot be evaluated are not checked
        return {}


def _validated(config: TransformConfig, name: str, value: Any, hints: Mapping[str, Any], where: str) -> Any:
    if name not in hints:
        return value
    try:
        return TypeAdapter(hints[name]).validate_json(canonical_json(value), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].lower()
        raise ConfigError(
            f"Transform {config.name} does not accept {name}={value!r}: {problem}", where=f"{where}.args.{name}"
        ) from error  # fmt: skip


def transforms_of(data: DataConfig, source: SourceConfig, split: str, source_key: str) -> tuple[Transform, ...]:
    """Resolve the transforms of a split of a source: the source's own list, else ``data.transforms``.

    Raises:
        ConfigError: As ``resolve_transforms``; or a transform of text is applied to a source of tokens.
    """
    own = source.transforms is not None
    configs = source.transforms if source.transforms is not None else data.transforms
    key = f"{source_key}.transforms" if own else "data.transforms"
    found = resolve_transforms(configs, split, key)
    if source.has_tokens:
        for transform in found:
            if transform.kind != "tokens" or transform.args.get("level") == "character":
                raise ConfigError(
                    f"Transform {transform.name} works on text, but source {source.name!r} consists of tokens",
                    where=f"{key}.{transform.number}",
                    hint=f"give the source its own transforms: {source_key}.transforms",
                )
    for transform in found:
        if source.chat_fields and _built_in(transform.name).is_augmentation:
            raise ConfigError(
                f"Transform {transform.name} changes text, but source {source.name!r} consists of conversations",
                where=f"{key}.{transform.number}", hint=f"give the source its own transforms: {source_key}.transforms",
            )  # fmt: skip
    return found


def check_transforms(data: DataConfig) -> None:
    """Resolve all transforms, so that mistakes are found before any text is read.

    Raises:
        ConfigError: As ``transforms_of``.
    """
    for index, source in enumerate(data.sources):
        for split in get_args(Split):
            transforms_of(data, source, split, f"data.sources.{index}")


def check_special_tokens(transforms: Sequence[Transform], tokenizer: Any) -> None:
    """Check that the tokenizer has the special tokens that the transforms insert.

    Raises:
        ConfigError: Special tokens are missing.
    """
    for transform in transforms:
        needed = required_special_tokens(transform.name, transform.args)
        missing = [token for token in needed if tokenizer.special_id(token) is None]
        if missing:
            raise ConfigError(
                f"Transform {transform.name} needs the special token{'s' if len(missing) > 1 else ''} "
                f"{', '.join(missing)}, which the tokenizer lacks", where="data.transforms",
                hint=f"set tokenizer.special_tokens=[{', '.join(missing)}], or name tokens that the tokenizer has",
            )  # fmt: skip
