"""The house: how the package installs, what it imports, which folder may know which."""

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT

FOLDERS = {"parallel": {"parallel"}, "megatron_rc": {"megatron_rc", "parallel"}}
HEAVY = ("megatron.core", "transformers", "numpy.testing", "yaml", "tokenizers", "matplotlib", "tensorboard", "tqdm")


def imports(path, top_only=False):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def folder_of(module):
    parts = module.split(".")
    if parts[0] != "megatron_rc":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ("parallel", "launch", "configs") else "megatron_rc"


def sources(folder):
    return sorted(path for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())


@pytest.mark.parametrize("folder", FOLDERS)
def test_dependencies_point_one_way(folder):
    files = [p for p in sources(folder) if not set(p.relative_to(ROOT).parts[1:]) & {"parallel", "launch", "configs"}]
    assert len(files) > 3
    for path in files:
        for module in imports(path):
            assert folder_of(module) in FOLDERS[folder] | {None}, f"{path} imports {module}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_megatron_is_imported_where_it_is_used(folder):
    for path in sources(folder):
        if "launch" not in path.relative_to(ROOT).parts:
            assert not [name for name in imports(path, top_only=True) if name.startswith("megatron.")], path


def test_import_needs_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import megatron_rc\n"
        "for name in megatron_rc.__all__: getattr(megatron_rc, name)\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        f"assert not [name for name in {HEAVY!r} if name in sys.modules and name not in before]\n"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert output.stdout.strip() == "['megatron_rc']"


def run(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources in which links are lost."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("megatron_rc", "parallel", "launch", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns(
                "__pycache__", *("parallel", "launch", "configs") * (name == "megatron_rc")
            )
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
    run(*pip, "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder))
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path):
    """Torch and the launcher's libraries are lent by this environment; the package comes from the wheel alone."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    (Path(site) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import megatron_rc, megatron_rc.parallel, megatron_rc.launch.flags.checks as v\n"
        "from megatron_rc.launch.flags.parser import CONFIGS, parse_args\n"
        "assert (CONFIGS / 'launch' / 'count_up.yaml').is_file()\n"
        "args = parse_args(['--config', 'count_up', '--runs-dir', 'runs'])\n"
        "v.validate_args(args, 4)\n"
        "print(megatron_rc.__file__, v.__file__)"
    )
    output = run(python, "-c", code, cwd=tmp_path).stdout.split()
    assert all(path.startswith(site) for path in output)


def test_without_the_launch_extra_the_remedy_is_named(tmp_path):
    """Flags are read with the standard library; the first package that is missing is named with its extra."""
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "lacking = ('megatron.core', 'transformers', 'tokenizers')\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in lacking else find(name, *rest)\n"
        "sys.modules.update({name: None for name in lacking})\n"
        "from megatron_rc.launch.__main__ import main\n"
        "main(['--config', 'count_up'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    needs = "training needs megatron.core, which is not installed: pip install 'megatron-rc[launch]'"
    assert done.stderr == f"error: {needs}\n"


def test_torch_is_the_only_hard_dependency(wheel):
    listing = run(sys.executable, "-m", "zipfile", "-e", str(wheel), str(wheel.parent / "content"))
    assert listing.returncode == 0
    (metadata,) = (wheel.parent / "content").glob("*.dist-info/METADATA")
    needed = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), flags=re.MULTILINE)
    assert [line for line in needed if "extra ==" not in line] == ["torch>=2.6"]
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata.read_text(), flags=re.MULTILINE))
    assert {"megatron", "launch", "gpu", "test", "dev"} <= extras


def test_links_are_relative_and_committed():
    for name in ("parallel", "launch", "configs"):
        assert (ROOT / "megatron_rc" / name).readlink() == Path("..") / name


def switch():
    """What the CPU switch answers inside, and that nothing of it is left outside."""
    from megatron_rc.launch.training.cpu import cpu_backend

    names = ("current_device", "synchronize", "Stream", "get_rng_state", "manual_seed", "current_stream", "empty_cache")
    before = {name: getattr(torch.cuda, name) for name in names}
    with cpu_backend():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert (
            torch.ones(2, device=torch.cuda.current_device(), pin_memory=True).cuda().type() == "torch.cuda.FloatTensor"
        )
        assert torch.ones(2).to("cuda").device.type == torch.ones(2).to(device="cuda").device.type == "cpu"
        with pytest.raises(RuntimeError, match="already active"), cpu_backend():
            pass
        generator = torch.get_rng_state()
        torch.cuda.manual_seed(1)
        assert torch.equal(torch.get_rng_state(), generator), "the CPU's own generator stays apart"
    assert {name: getattr(torch.cuda, name) for name in names} == before
    assert torch.ones(2).type() == "torch.FloatTensor"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers where the switch is off")
def test_the_cpu_switch_is_reversible(caplog):
    switch()
    assert [record.message for record in caplog.records if "runs on the CPU" in record.message]
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_a_rank_on_the_cpu_starts_without_a_compiler():
    """Loaded with everything that Megatron-Core compiles where it stands; ``torch.compile`` itself is back after."""
    program = """
import sys
from megatron_rc.launch.train_ppo import _cpu_backend
import torch
right = torch.compile
with _cpu_backend():
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    assert torch.equal(swiglu(torch.ones(2, device="cuda")), torch.ones(1).sigmoid())
assert torch.compile is right
assert "megatron_rc.launch.training.trainer" in sys.modules
assert "torch._inductor.compile_fx" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_gpu_path_never_imports_the_switch():
    for path in sources("launch"):
        if path.name != "train_ppo.py":
            assert "megatron_rc.launch.training.cpu" not in set(imports(path)), path
    entry = (ROOT / "launch" / "train_ppo.py").read_text()
    assert "with _cpu_backend() if args.on_cpu else contextlib.nullcontext()" in entry
