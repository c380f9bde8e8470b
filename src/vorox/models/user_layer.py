"""User functions in the place of MLP or block: their parameters, as rows of the parameter table.

An MLP (``model.mlp``), the function ``f(x, weights)``, acts on each position alone. Its attribute ``parameters``, a
function of the model specification, returns the shape of each weight by name, or a pair of shape and initial values:
``ones``, ``zeros`` or the standard deviation of a normal distribution. By default, vectors start at zero and all others
with ``init_std``; vectors are never decayed. A weight of three dimensions is a stack of matrices. A block
(``model.block``) is a module that ``f(spec, layer)`` returns; the table has its parameters, and the engine takes the
initial values from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from vorox.core.errors import ConfigError, VoroxError
from vorox.core.user_code.extensions import load_function
from vorox.models.matrix_layout import PLAIN_MATRIX, MatrixLayout
from vorox.models.parameter_roles import is_decayed, role
from vorox.models.spec import Kind, ModelSpec, ParameterSpec

_KEY = "model.mlp"
_BLOCK_KEY = "model.block"
Initial = str | float


def load_layer(path: str) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Return the function of ``model.mlp``."""
    return load_function(path, kind="MLP", where=_KEY)


def layer_parameters(path: str, spec: ModelSpec, prefix: str, init_std: float) -> list[ParameterSpec]:
    """Return the rows of one layer.

    Args:
        path: The import path.
        spec: The model.
        prefix: Start of the canonical names.
        init_std: Standard deviation where the function names none.

    Raises:
        ConfigError: The function declares no parameters, or a shape or initial value is not valid.
    """
    declare = getattr(load_layer(path), "parameters", None)
    declared: object = declare(spec) if callable(declare) else None
    if not isinstance(declared, Mapping) or not declared:
        raise ConfigError(
            f"{path} declares no parameters", where=_KEY,
            hint="set its attribute: f.parameters = lambda spec: {'up': (4 * spec.hidden_size, spec.hidden_size), ...}",
        )  # fmt: skip
    return [
        _row(path, f"{prefix}{name}", value, init_std)
        for name, value in cast("Mapping[str, object]", declared).items()
        if _is_name(path, name)
    ]


def load_block(path: str) -> Callable[[ModelSpec, int], Any]:
    """Return the function of ``model.block``."""
    return load_function(path, kind="block", where=_BLOCK_KEY)


def block_parameters(path: str, spec: ModelSpec, prefix: str) -> list[ParameterSpec]:
    """Return the rows of one layer, in the order of its module.

    Args:
        path: The import path.
        spec: The model.
        prefix: Start of the canonical names, ``blocks.<layer>.``.

    Raises:
        ConfigError: The function fails, or returns no module with parameters.
    """
    try:
        module = load_block(path)(spec, int(prefix.split(".")[1]))
    except VoroxError:
        raise
    except Exception as error:  # a user's function can raise anything
        raise ConfigError(f"{path} failed with {type(error).__name__}: {error}", where=_BLOCK_KEY) from error
    named = list(module.named_parameters()) if hasattr(module, "named_parameters") else []
    if not named:
        raise ConfigError(
            f"{path} returned {type(module).__name__}, not a torch.nn.Module with parameters", where=_BLOCK_KEY,
            hint="it is called as f(spec, layer)",
        )  # fmt: skip
    if module.state_dict().keys() - {name for name, _ in named}:
        raise ConfigError(
            f"{path} has buffers that checkpoints would have to store, or parameters with two names", where=_BLOCK_KEY,
            hint="register buffers with persistent=False, and tie no weights inside of a block",
        )  # fmt: skip
    return [_module_row(f"{prefix}module.{name}", tuple(parameter.shape)) for name, parameter in named]


def _module_row(name: str, shape: tuple[int, ...]) -> ParameterSpec:
    kind, layout = _role(name, shape, is_stack="expert" in name)
    return ParameterSpec(name, shape, "zeros", 0.0, is_decayed(kind), kind, ("layer",) * len(shape), layout=layout)


def _role(name: str, shape: tuple[int, ...], *, is_stack: bool) -> tuple[Kind, MatrixLayout]:
    """Return the role of a weight; one of three dimensions may be a stack of matrices, such as those of experts."""
    kind = role(name, shape)
    if kind == "tensor" and len(shape) == 3 and is_stack and min(shape[1:]) > 1:
        return "matrix", MatrixLayout(shape[0])
    return kind, PLAIN_MATRIX


def _is_name(path: str, name: object) -> bool:
    if isinstance(name, str) and name.isidentifier():
        return True
    raise ConfigError(f"{path} names a weight {name!r}", where=_KEY, hint="a name is letters, digits and underscores")


def _row(path: str, name: str, value: object, init_std: float) -> ParameterSpec:
    shape, initial = _shape_and_initial(value)
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ConfigError(
            f"{path} declares {name} as {value!r}", where=_KEY,
            hint="a weight is a shape, (out, in), or a pair of shape and 'ones', 'zeros' or a standard deviation",
        )  # fmt: skip
    is_vector = len(shape) == 1
    if initial is None:
        initial = "zeros" if is_vector else init_std
    if initial not in ("ones", "zeros") and not isinstance(initial, int | float):
        raise ConfigError(
            f"{path} initialises {name} with {initial!r}", where=_KEY,
            hint="use 'ones', 'zeros' or a standard deviation",
        )  # fmt: skip
    kind, layout = _role(name, shape, is_stack=True)  # an MLP has no convolutions
    axes, decay = ("layer",) * len(shape), is_decayed(kind)
    if isinstance(initial, str):
        start = "ones" if initial == "ones" else "zeros"
        return ParameterSpec(name, shape, start, 0.0, decay, kind, axes, layout=layout)
    return ParameterSpec(name, shape, "normal", float(initial), decay, kind, axes, layout=layout)


def _shape_and_initial(value: object) -> tuple[tuple[int, ...], Initial | None]:
    """Split a declaration; an empty shape if it is not valid."""
    if not isinstance(value, tuple | list):
        return (), None
    items = tuple(cast("tuple[Any, ...]", value))
    if len(items) == 2 and isinstance(items[0], tuple | list):
        return tuple(cast("tuple[int, ...]", items[0])), items[1]
    return items, None
