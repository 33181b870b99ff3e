"""The shape of the code base: imports point one way, modules and functions stay small, patches stay in one place."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "megatron_ext"
# A module may import from its own layer's package and from layers above it in this list.
LAYERS = [
    {"config", "context_parallel", "token_file", "run_lock"},
    {"platform"},
    {"parallel"},
    {"models", "data", "losses", "teacher_cache"},
    {"schedule", "token_weights", "packed_rows", "gradient_accumulation", "optimizer", "run_folder"},
    {"outputs", "checkpoint"},
    {"teacher"},
    {"cached_teacher"},
    {"model_wrapper"},
    {"evaluation", "metrics", "run_report", "preparation", "token_rows"},
    {"trainer", "eval_run", "cache_run"},
]
LAYER_OF = {name: i for i, names in enumerate(LAYERS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        units |= {name.split(".")[1] for name in names if name.startswith("megatron_ext.")}
    return units


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    unit = unit_of(path)
    if unit == "__init__":
        assert imported_units(path) == set()
        return
    for other in imported_units(path) - {unit}:
        assert LAYER_OF[other] < LAYER_OF[unit], f"{unit} imports {other}"


def test_config_imports_no_torch() -> None:
    for path in (PACKAGE / "config").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] not in ("torch", "megatron") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in ("torch", "megatron")


@pytest.mark.parametrize("path", [*MODULES, *(ROOT / "scripts").glob("*.py")], ids=lambda path: path.name)
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines"
    tree = ast.parse(text)
    assert path.name == "__init__.py" or ast.get_docstring(tree), f"{path} does not say what it owns"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 80, f"{path}: {node.name} has {length} lines"


def test_only_the_platform_patches_others() -> None:
    for path in MODULES:
        if unit_of(path) == "platform":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    text = ast.unparse(target)
                    assert not text.startswith(("torch.", "megatron.", "dist.")), f"{path}: assigns to {text}"
