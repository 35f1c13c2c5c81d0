"""Which package may import which, read off the source: lines that seldom run count too."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT: dict[str, set[str]] = {
    "ipc": set(),
    "models": {"ipc"},
    "ssd_pipe": {"ipc", "models"},
    "procs": {"ipc", "models", "ssd_pipe"},
    "bench": {"ipc", "models", "ssd_pipe"},
}
ENTRY_POINTS = {
    ("ssd_pipe.cli.single", "procs"),  # turns into the process it is asked for
    ("ssd_pipe.cli.bench", "bench"),
}
"""Commands that hand over to a package above theirs, when they are run and not before."""


def test_every_package_has_its_rule() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests"} == set(MAY_IMPORT)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_one_way(package: str) -> None:
    mine = [name for name in sources() if belongs(name, package)]
    used = {(name, top(other)) for name in mine for other in imports(ast.walk(sources()[name]))}
    ours = {(name, other) for name, other in used if other in {*MAY_IMPORT, "tests"} - {package}}
    assert {pair for pair in ours if pair[1] not in MAY_IMPORT[package]} == {
        pair for pair in ENTRY_POINTS if belongs(pair[0], package)
    }


def test_no_module_needs_itself_to_be_loaded() -> None:
    graph = {name: {o for o in needed if o in sources()} for name, needed in loading().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which tells the way round


@pytest.mark.parametrize("package", ["ipc", "ssd_pipe.engine"])
def test_light_packages_load_no_torch(package: str) -> None:
    loaded = all_loaded([name for name in sources() if belongs(name, package)])
    assert package in loaded
    assert {"torch", "transformers"} & loaded == set()


def test_who_looks_at_runs_loads_nothing_that_starts_them() -> None:
    assert {"ssd_pipe.supervisor", "numpy"} & all_loaded(["ssd_pipe.runs"]) == set()


@cache
def sources() -> dict[str, ast.Module]:
    """The syntax tree of every module, by its dotted name."""
    found = {}
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_bytes())
    return found


@cache
def loading() -> dict[str, set[str]]:
    """What loading a module loads: modules of ours, and top-level names of others'."""
    return {
        name: {resolved(other) for other in imports(at_load(tree))} - {name}
        for name, tree in sources().items()
    }


def all_loaded(names: Iterable[str]) -> set[str]:
    """These modules and all that loading them loads."""
    todo = [*names]
    seen = set(todo)
    while todo:
        new = loading().get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that the nodes import; of ``from a import b`` it is ``a.b``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from literal(node.args[0])


def literal(argument: ast.expr) -> Iterator[str]:
    """The text an expression surely begins with, if any."""
    if isinstance(argument, ast.JoinedStr):
        argument = argument.values[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value


def at_load(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is loaded."""
    todo: list[ast.AST] = [*tree.body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def resolved(name: str) -> str:
    """The module that holds an imported name; the first part of a name that is not ours."""
    if top(name) not in MAY_IMPORT:
        return top(name)
    while name not in sources():
        name = name.rpartition(".")[0]
    return name


def belongs(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def top(name: str) -> str:
    return name.partition(".")[0]
