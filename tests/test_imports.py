"""Imports point down, as the architecture page's table says: on the source, and at run time."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "engine": {"protocol"},
    "pool": {"protocol"},
    "gateway": {"pool", "protocol"},
    "client": {"protocol"},
}
"""What each folder may import of ours, itself aside."""
MLX_FREE = ("protocol", "pool", "gateway", "client", "src/headrace")
MODULES = [path for folder in ALLOWED for path in sorted((ROOT / folder).glob("**/*.py"))]


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Yield the absolute names of all modules that a syntax tree imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [*base, *([node.module] if node.module else [])]
            if node.module is None or names == ["headrace"]:
                yield from (".".join([*names, alias.name]) for alias in node.names)
            else:
                yield ".".join(names)


def our_folders(modules: Iterator[str]) -> set[str]:
    """Return the folders of ours among imported modules."""
    parts = [module.split(".") for module in modules]
    return {part[1] for part in parts if part[0] == "headrace" and len(part) > 1}


def run_at_import(tree: ast.Module) -> ast.Module:
    """Return what of a module runs when it is imported: no function bodies, nothing for type checkers."""

    def runs(node: ast.stmt) -> bool:
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        return not (is_typing or isinstance(node, ast.FunctionDef))

    return ast.Module(body=[node for node in tree.body if runs(node)], type_ignores=[])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below(path: Path) -> None:
    """`pool` reaches `engine` only in a spawned process: inside the functions of `worker`."""
    folder, *inner = path.relative_to(ROOT).with_suffix("").parts
    package = ["headrace", folder, *inner[:-1]]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if (folder, inner) == ("pool", ["worker"]):
        assert our_folders(imported_modules(tree, package)) <= {"engine", "protocol", "pool"}
        tree = run_at_import(tree)
    assert our_folders(imported_modules(tree, package)) <= ALLOWED[folder] | {folder}


@pytest.mark.parametrize("folder", MLX_FREE)
def test_no_source_outside_the_engine_names_mlx(folder: str) -> None:
    """Not even in a function."""
    pattern = "*.py" if folder.startswith("src") else "**/*.py"
    for path in (ROOT / folder).glob(pattern):
        package = ["headrace"] if folder.startswith("src") else ["headrace", folder]
        roots = {
            module.partition(".")[0] for module in imported_modules(ast.parse(path.read_text()), package)
        }
        assert not [root for root in roots if root.startswith(("mlx", "transformers"))], path


@pytest.mark.parametrize(
    "module",
    ["headrace", "headrace.protocol.session", "headrace.pool", "headrace.gateway.server", "headrace.cli",
     "headrace.serve", "headrace.engine.config", "headrace.client", "headrace.client.testing"],
)  # fmt: skip
def test_a_fresh_process_loads_no_mlx(module: str) -> None:
    """Through no other module either."""
    script = f"""if True:
        import sys
        import {module}
        bad = [name for name in sys.modules if name.startswith(("mlx", "transformers", "torch"))]
        print(*bad)"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr, result.stdout.split()) == (0, "", [])
