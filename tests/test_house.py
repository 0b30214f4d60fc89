"""The house: which folder may import which, one way only, and which package only launch/ may know."""

import ast
import functools
import pkgutil
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import LINKED, ROOT

# A folder, or a module that stands by itself, imports from those before it alone.
LIBRARY = (
    *("drawing", "numerics", "parallel", "records", "attribution", "advantages", "loss", "settings", "correction"),
    *("measures", "batch", "training", "adaptors"),
    *("public", "doctor", "replay"),
)
# What stands in one row does not know of each other.
_LAUNCH = """
errors checkpoint_folders ending resolved_file environment loopback phases set_aside standard_error
transformers4
python_specs lost_ranks stopping
ranks
run_config
distributed
tasks weights
rewards
engines
rollouts
flags
training
train_ppo
dry_run
__main__
attribute check_engine command export report
"""
LAUNCH = [row.split() for row in _LAUNCH.split("\n")[1:-1]]


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by its name without ``megatron_rc.``; that of a package is the package's."""
    paths = {}
    for folder in ("megatron_rc", *LINKED):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).parts
            if folder == "megatron_rc" and inside[0] in LINKED:
                continue
            parts = [*([] if folder == "megatron_rc" else [folder]), *inside]
            parts[-1] = parts[-1].removesuffix(".py")
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(path: Path, top_only: bool = False) -> Iterator[str]:
    """All names that a module imports, inside functions and for type checkers too, unless ``top_only``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules of ours that each module imports."""
    imports_of = {}
    for module, path in modules().items():
        ours = {name.removeprefix("megatron_rc.") for name in imports(path) if name.startswith("megatron_rc.")}
        # ``from a.b import c`` imports the module a.b.c, or a name of the module a.b; the package itself is "".
        imports_of[module] = {name if name in modules() else name.rpartition(".")[0] for name in ours} - {module}
    return imports_of


def edges() -> Iterator[tuple[str, str]]:
    for module, imported in graph().items():
        yield from ((module, name) for name in sorted(imported))


def floor(module: str) -> tuple[str, int, str]:
    """(the house that a module is in, how high it stands there, its folder)."""
    first, _, inside = module.partition(".")
    if first != "launch":
        return "library", LIBRARY.index(first), first
    folder = inside.partition(".")[0]
    (level,) = (level for level, row in enumerate(LAUNCH) if folder in row)
    return "launch", level, folder


def test_every_module_has_its_place_and_dependencies_point_one_way():
    assert {"numerics", "parallel.layout", "records.rollout", "launch.train_ppo"} <= set(modules())
    for module in modules():
        if module not in ("", "launch", "configs"):
            assert floor(module)[1] >= 0
    wrong = set()
    for module, imported in edges():
        if "" in (module, imported):
            continue
        (house, level, folder), (other_house, other_level, other_folder) = floor(module), floor(imported)
        below = house == "launch" if house != other_house else other_level < level
        if folder != other_folder and not below:
            wrong.add(f"{module} imports {imported}")
    assert not wrong


def test_records_stand_beside_the_correction():
    """Of the library only the list of public names and the adaptors know them."""
    knowing = ("records", "public", "adaptors", "launch", "replay", "doctor")
    assert {module.split(".")[0] for module, imported in edges() if imported.startswith("records.")} <= {*knowing}


FOLDERS = sorted(name for name, path in modules().items() if path.name == "__init__.py" and "." in name)


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_no_import_goes_in_a_circle(folder):
    """Nothing that a folder imports imports the folder in turn, through whatever modules."""

    def piece(module: str) -> str:
        return folder if folder and (module == folder or module.startswith(f"{folder}.")) else module

    joined: dict[str, set[str]] = {}
    for module, imported in graph().items():
        joined.setdefault(piece(module), set()).update(piece(name) for name in imported)
    joined[folder].discard(folder)
    try:
        list(TopologicalSorter(joined).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_only_the_launcher_knows_megatron_at_import_and_only_its_entry_the_cpu_switch():
    """``megatron_rc`` and ``parallel`` import megatron.core where it is used."""
    for module, path in modules().items():
        if not module.startswith("launch"):
            assert not [name for name in imports(path, top_only=True) if name.startswith("megatron.")], module
    switch = "launch.training.models.cpu"
    entry = "launch.train_ppo"
    assert {module for module, imported in edges() if imported == switch} == {entry}
    assert f"megatron_rc.{switch}" not in imports(modules()[entry], top_only=True)


def test_oracles_know_nothing_of_the_library():
    folder = ROOT / "tests" / "support"
    for path in (folder / "made_faults.py", *folder.glob("*_oracle.py")):
        for imported in imports(path):
            assert not imported.startswith("megatron_rc"), path
            assert not imported.startswith("tests.") or "_oracle" in imported, path


def test_what_no_test_runs_imports_what_exists():
    """Benchmarks, and the tests that need vLLM or a GPU."""
    for path in (
        path for folder in ("benchmarks", "tests/vllm", "tests/gpu") for path in (ROOT / folder).rglob("*.py")
    ):
        for name in imports(path):
            if name.startswith(("megatron_rc.", "tests.", "benchmarks.")):
                assert pkgutil.resolve_name(name), f"{path} imports {name}"
