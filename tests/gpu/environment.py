"""An environment for the checks: what this machine's Python has, and beside it what is missing. Needs Python alone.

Nothing of the machine is replaced. A virtual environment sees the packages of the Python that starts this, itself in a
virtual environment or not, and takes what is missing from a folder of wheels, or else from the package index.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
from pathlib import Path

from tests.gpu.machine import end, say

ROOT = Path(__file__).resolve().parent.parent.parent
# What the launcher and the checks import; whatever else a package wants is its own affair.
NEEDED = """torch megatron.core psutil transformers httpx2 tensorboard matplotlib yaml safetensors tqdm pytest
pytest_timeout""".split()
UNUSABLE = 2  # exit status: the environment cannot be made

# PyTorch's own file of versions tells as much as an import of PyTorch, at once.
_ASK = """
import importlib.metadata, importlib.util, json, re, runpy, sys

def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False

found = list(importlib.metadata.distributions())
names = {re.sub("[-_.]+", "-", one.metadata["Name"]).lower(): one.version for one in reversed(found)}
torch = {}
if has("torch"):
    torch = runpy.run_path(importlib.util.find_spec("torch").submodule_search_locations[0] + "/version.py")
print(json.dumps({"packages": names, "cuda": torch.get("cuda"), "torch": torch.get("__version__"),
                  "missing": [name for name in sys.argv[1:] if not has(name)]}))
"""


def prepare(folder: Path, wheels: Path | None) -> Path:
    """The interpreter of the environment in ``folder``, made anew unless it is there for the same wheels.

    Args:
        folder: of the environment.
        wheels: a folder with what is missing here; None: the package index has it.
    """
    files = sorted(wheels.glob("*.whl")) if wheels else []
    if wheels and not files:
        end(f"WHEELS={wheels} holds no .whl file: fill it with `make wheels WHEELS={wheels}`", UNUSABLE)
    stamp = folder / ".made"
    fingerprint = _fingerprint(files)
    python = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == fingerprint:
        return python
    say(f"== environment in {folder}, with Python {sys.version.split()[0]}")
    venv.create(folder, with_pip=False, clear=True, symlinks=True)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in _package_folders()]
    (site / "machine.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if wheels is None:
        _install_from_index(python)
    else:
        _install_wheels(python, files)
    description = _ask(python)
    if description["missing"]:
        remedy = f"put their wheels into {wheels}" if wheels else "install them into this Python"
        end(
            f"the checks need {', '.join(description['missing'])}, which are not here: {remedy} (docs/gpu.md)", UNUSABLE
        )
    stamp.write_text(fingerprint, encoding="utf-8")
    return python


def _package_folders() -> list[str]:
    """Where the Python that runs this has its packages."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def _name_of(wheel: Path) -> str:
    """The package's name as the index writes it."""
    return wheel.name.split("-")[0].lower().replace("_", "-").replace(".", "-")


def _fingerprint(files: list[Path]) -> str:
    """Of what an environment is made from."""
    parts = [sys.executable, *_package_folders(), *(f"{file.name} {file.stat().st_size}" for file in files)]
    parts += [(ROOT / name).read_text(encoding="utf-8") for name in ("setup.py", "constraints.txt")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _install_wheels(python: Path, files: list[Path]) -> None:
    packages = _ask(python)["packages"]
    missing = [file for file in files if _name_of(file) not in packages]
    already_there = [f"{name} {packages[name]}" for name in map(_name_of, files) if name in packages]
    if already_there:
        say(f"== kept as they are here: {', '.join(already_there)}")
    if missing:
        say(f"== from wheels: {', '.join(file.name.split('-py3-')[0] for file in missing)}")
        _pip(python, "--no-index", "--no-deps", "--no-compile", *map(str, missing))


def _install_from_index(python: Path) -> None:
    description = _ask(python)
    constraints = python.parent.parent / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if description["cuda"]:
        # Triton and the rest of CUDA belong to the PyTorch that is here.
        already_there = [name for name in ("torch", "triton") if name in description["packages"]]
        lines = [line for line in lines if line.partition("==")[0] not in already_there]
        lines += [f"{name}=={description['packages'][name]}" for name in already_there]
        say(f"== PyTorch {description['torch']} stays")
    constraints.write_text("\n".join(lines) + "\n", encoding="utf-8")
    _pip(python, "-c", str(constraints), "-e", f"{ROOT}[launch,test]")


def _ask(python: Path) -> dict:
    """What the interpreter finds: packages with their versions, PyTorch, and what is missing of ``NEEDED``."""
    command = [str(python), "-c", _ASK, *NEEDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        end(f"{python} does not start: {done.stderr.strip().splitlines()[-1:]}", UNUSABLE)
    return json.loads(done.stdout.splitlines()[-1])


def _pip(python: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    done = subprocess.run([*command, "-q", *arguments], check=False)
    if done.returncode:
        end(f"pip could not install what the checks need (exit {done.returncode}): see its message above", UNUSABLE)
