"""The import contract of docs/architecture.md: imports point only down, and frameworks stay in their package."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "vorox"
LAYER = {
    "core": 0,
    "records": 1,
    "data": 2,
    "models": 2,
    "runtime": 2,
    "experiments": 2,
    "web": 2,
    "planning": 3,
    "training": 4,
    "backends": 4,
    "planned_run": 5,
    "run": 6,
    "api": 7,
    "dashboard": 8,
    "serving": 8,
    "sweeps": 8,
    "cli": 9,
    "__main__": 10,
}
FRAMEWORKS = {
    "torch": "backends/torch_engine",
    "jax": "backends/jax_engine",
    "flax": "backends/jax_engine",
    "orbax": "backends/jax_engine",
    "starlette": ("dashboard", "serving", "web"),
    "matplotlib": ("dashboard/exports/plotting.py", "dashboard/exports/sweep_plot.py"),
    "optuna": "sweeps/search.py",
    "ray": ("sweeps/ray_trials.py", "data/cache/building/ray_workers.py", "cli/launch/ray_driver.py"),
}
ADAPTERS = {"data/dataset/torch_adapter.py": "torch"}
"""Modules that are the other framework's view of something of ours; nothing imports them before it is asked for."""
OPTIONAL = {
    "transformers", "tensorboard", "datasets", "wandb", "mlflow", "trackio", "gguf", "lm_eval", "tensorstore", "orbax",
    "torchao",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def package_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path, *, module_scope_only: bool = False) -> tuple[tuple[int, str], ...]:
    """(line, absolute module) of every import; those under ``if TYPE_CHECKING`` count, except for scope checks."""
    tree = parsed(path)
    nodes = ast.walk(tree) if not module_scope_only else iter(tree.body)
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            assert node.module is not None
            found.append((node.lineno, node.module))
            if node.module.split(".")[0] == "vorox":
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return tuple(found)


@pytest.mark.parametrize(
    "package",
    [
        "core",
        "core/config",
        "records",
        "data",
        "data/cache",
        "models",
        "planning",
        "training",
        "dashboard",
        "cli",
        "backends/torch_engine",
        "backends/jax_engine",
    ],
)
def test_rooms_of_a_package_import_in_one_direction(package: str) -> None:
    """A room is a folder of the package, or a module beside them; in some order, all imports point down."""
    arrows: dict[str, set[str]] = {}
    prefix = f"vorox.{package.replace('/', '.')}."
    for path in (SOURCE / package).rglob("*.py"):
        room = path.relative_to(SOURCE / package).parts[0].removesuffix(".py")
        others = {module.removeprefix(prefix).split(".")[0] for _, module in imports(path) if module.startswith(prefix)}
        arrows.setdefault(room, set()).update(others - {room})
    order = list(graphlib.TopologicalSorter(arrows).static_order())  # CycleError names the rooms of a circle
    assert len(order) > 5


def test_every_package_of_the_architecture_has_a_layer() -> None:
    packages = {package_of(path) for path in modules()} - {"__init__", "presets"}
    assert packages <= set(LAYER), f"packages without a layer: {sorted(packages - set(LAYER))}"


def test_imports_point_down() -> None:
    for path in modules():
        if package_of(path) not in {"__init__", "presets"}:
            check_direction(path)


def check_direction(path: Path) -> None:
    package = package_of(path)
    for line, module in imports(path):
        parts = module.split(".")
        if parts[0] != "vorox" or len(parts) == 1 or parts[1] == "__version__":
            continue
        target = parts[1]
        same_package = target == package
        down = LAYER[target] < LAYER[package]
        assert same_package or down, f"{name_of(path)}:{line}: {package} must not import {module}"
        if package == "backends":
            assert target in {"core", "models", "planning", "backends"}, (
                f"{name_of(path)}:{line}: an engine imports {module}"
            )


def test_frameworks_stay_in_their_package() -> None:
    for path in modules():
        check_frameworks(path)


def check_frameworks(path: Path) -> None:
    for line, module in imports(path):
        top = module.split(".")[0]
        if top in FRAMEWORKS and ADAPTERS.get(name_of(path)) != top:
            assert name_of(path).startswith(FRAMEWORKS[top]), f"{name_of(path)}:{line}: imports {module}"
    for line, module in imports(path, module_scope_only=True):
        assert module.removeprefix("vorox.").replace(".", "/") + ".py" not in ADAPTERS, f"{name_of(path)}:{line}"
        assert module.split(".")[0] not in OPTIONAL, f"{name_of(path)}:{line}: {module} must be imported lazily"


def test_modules_named_in_texts_exist() -> None:
    """What is imported by name, or started in a child process: a move must not be noticed by users first."""
    packages = {package_of(path) for path in modules()}
    composed = {("cli/commands/__init__.py", "vorox.cli.commands.")}
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr):
                first = node.values[0] if node.values else None
                start = first.value if isinstance(first, ast.Constant) else ""
                is_module = re.fullmatch(r"vorox\.(\w+)\..*", str(start))
                is_known = (name_of(path), start) in composed
                assert not is_module or is_known or is_module[1] not in packages, (
                    f"{name_of(path)}:{node.lineno}: {start}"
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = node.value.split(".")
                if parts[0] == "vorox" and parts[1:2] and parts[1] in packages and all(map(str.isidentifier, parts)):
                    assert is_there(parts[1:]), f"{name_of(path)}:{node.lineno}: {node.value}"


def is_there(parts: list[str]) -> bool:
    """Whether names lead to a module, or to a name in one."""
    place, owner = SOURCE / Path(*parts), SOURCE / Path(*parts[:-1])
    if place.is_dir() or place.with_suffix(".py").exists() or owner.with_suffix(".py").exists():
        return True
    package = owner / "__init__.py"
    return package.exists() and re.search(rf"\b{parts[-1]}\b", package.read_text(encoding="utf-8")) is not None


def test_engines_do_not_import_each_other() -> None:
    for path in modules():
        relative = path.relative_to(SOURCE).parts
        if relative[0] == "backends" and len(relative) > 2:
            others = [module for _, module in imports(path) if module.startswith("vorox.backends.")]
            assert all(module.split(".")[2] == relative[1] for module in others), name_of(path)


def test_no_cycles() -> None:
    """Over all imports of modules: at the top, inside functions, for type checking, and of a package's ``__init__``."""
    names = {
        ".".join(("vorox", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in modules()
    }
    graph = {name: imported_modules(path, names) - {name} for name, path in names.items()}
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "import cycle: " + " -> ".join((*trail[trail.index(name) :], name))
        if name in finished:
            return
        for target in sorted(graph[name]):
            visit(target, (*trail, name))
        finished.add(name)

    for name in sorted(graph):
        visit(name, ())


def imported_modules(path: Path, names: Collection[str]) -> set[str]:
    """Every module of ours that a module imports anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & set(names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                candidates = (f"{node.module}.{alias.name}", node.module)
                found |= set(next(([name] for name in candidates if name in names), []))
    return found


ALWAYS_INSTALLED = {
    re.split(r"[><=\[]", one)[0].lower().replace("pyyaml", "yaml")
    for one in tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
}
ALWAYS_INSTALLED |= {"annotated_types", "pydantic_core"}  # with pydantic
NOT_ON_WINDOWS = {"readline", "resource"}
SELDOM_NEEDED = {
    ("cli/__init__.py", "vorox.cli.failure"),
    ("cli/environment_variables.py", "vorox.core.config.schema_fields"),
    ("cli/settings/config.py", "vorox.data.text.format_detection"),
    ("cli/settings/pages.py", "vorox.cli.settings.config"),
}


def optional_packages(module: str) -> set[str]:
    """The packages that need not be installed, and without which a module cannot be imported."""
    needed: set[str] = set()
    seen: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        top = name.split(".")[0]
        if top != "vorox":
            needed |= {top} - ALWAYS_INSTALLED - (sys.stdlib_module_names - NOT_ON_WINDOWS)
            continue
        waiting |= module_scope_imports(name) | ({name.rpartition(".")[0]} - {""})
    return needed


@functools.cache
def module_scope_imports(module: str) -> frozenset[str]:
    """What importing a module of ours imports; nothing for a name in a module."""
    inside = SOURCE.joinpath(*module.split(".")[1:])
    path = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
    return frozenset(imported_names(parsed(path).body) if path.exists() else ())


def imported_names(nodes: Iterable[ast.AST]) -> set[str]:
    """What statements import: modules, and names in them, which may be modules."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_command_line_imports_at_the_top_what_is_always_installed() -> None:
    """And in functions only what may be missing, or is slow and seldom needed."""
    for path in (SOURCE / "cli").rglob("*.py"):
        module = ".".join(("vorox", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        assert not optional_packages(module), f"{name_of(path)} needs {optional_packages(module)} at its top"
        tree = parsed(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in {node for function in functions for node in ast.walk(function)}:
            names = imported_names([node])
            is_slow = any((name_of(path), name) in SELDOM_NEEDED for name in names)
            needed = {package for name in names for package in optional_packages(name)}
            assert not names or needed or is_slow, f"{name_of(path)}: import at the top: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "statement",
    [
        "import vorox.cli",
        "import vorox.run",
        "import vorox.data.order.loader",
        "from vorox import *",
        "import vorox.dashboard.server",
    ],
)
def test_no_framework_is_loaded_by(statement: str) -> None:
    program = (
        f"import sys; {statement}; "
        "loaded = {'torch', 'jax', 'transformers', 'tensorboard'} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_help_loads_no_large_library() -> None:
    program = (
        "import sys; from vorox.cli import main; main(['--help']); "
        "large = {'torch', 'jax', 'transformers', 'numpy', 'pydantic', 'pyarrow', 'tokenizers'} & set(sys.modules); "
        "sys.exit(f'loaded {large}' if large else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_configuration_without_weights_is_shown_without_arrays() -> None:
    """Half of the time of `vorox config show` was the code for weights and text that it does not read."""
    program = (
        "import sys; from vorox.cli import main; main(['config', 'show', 'quickstart']); "
        "large = {'torch', 'jax', 'transformers', 'numpy', 'pyarrow', 'tokenizers'} & set(sys.modules); "
        "sys.exit(f'loaded {large}' if large else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_backend_is_chosen_in_one_place() -> None:
    for path in modules():
        if name_of(path) == "backends/__init__.py":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert not any(f"backend {op}" in text for op in ("==", "!=", "in")), f"{name_of(path)}: {text}"


def names_of(module: str) -> set[str]:
    """What can be imported from a module of the package, by its text: nothing is loaded."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    inside = {child.stem for child in path.glob("*.py")} | {child.name for child in path.glob("*/")}
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            inside.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            inside.add(node.id)
    return inside


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_programs_beside_the_package_import_what_exists(folder: str) -> None:
    """Benchmarks run too rarely to notice by themselves that a name has moved."""
    root = SOURCE.parents[1]
    for path in sorted((root / folder).rglob("*.py")):
        if ".peers" in path.parts:
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vorox":
                missing = {alias.name for alias in node.names} - names_of(node.module or "")
                assert not missing, f"{path.relative_to(root)}:{node.lineno}: {node.module} has no {missing}"
