"""The commands for machines with a GPU, as far as a machine without one can tell."""

import json
import os
import shutil
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest

from tests.gpu import __main__ as program
from tests.gpu import environment, machine
from tests.support.paths import ROOT


def run(*arguments, **variables):
    """(exit status, stdout, stderr) of a command."""
    # Within another make it would say which folder it enters.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(arguments, cwd=ROOT, env=inherited | variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bench-gpu"], f"`make bench-gpu`|Error {machine.NO_GPU}"),
        (["quarter-gpu"], f"`make quarter-gpu`|Error {machine.NO_GPU}"),
        (["wheels", "WHEELS="], "WHEELS=DIR"),
        (["wheels", "WHEELS=/nowhere", "ONLY=torch"], "torch is not in wheels.txt"),
    ],
)
def test_without_a_gpu_or_wheels_one_sentence_says_so(arguments, named):
    status, output, error = run("make", *arguments, f"PYTHON={sys.executable}", CUDA_VISIBLE_DEVICES="")
    assert (status, output) == (2, "")
    assert [part for part in named.split("|") if part not in error] == []


# Checks that do what checks of a GPU may do, each with its results and a word of its message.
CHECKS = {
    "def test_passes(figures): figures(error=0.00012345, launches=2)": {"passed": ""},
    'def test_fails(): assert 1 == 2, "not equal"': {"failed": "not equal"},
    "def test_dies(): os.kill(os.getpid(), signal.SIGSEGV)": {"crashed": "SIGSEGV"},
    "def test_comes_after(): pass": {"passed": ""},
    "@pytest.mark.timeout(1)\ndef test_hangs(): time.sleep(60)": {"crashed": "Timeout"},
    "@pytest.fixture\ndef dies():\n yield\n os.kill(os.getpid(), signal.SIGSEGV)\ndef test_end(dies): pass": {
        "passed": "",
        "crashed": "in none of its checks",
    },
    'def test_needs_a_package(): require("no_such_package.inside")': {"skipped": "no_such_package.inside"},
    "@pytest.mark.gpus(5)\ndef test_needs_many(): pass": {"skipped": "5"},
    'def test_misses(target): target("share", 0.7, least=0.85); target("peak", 1.01, most=1.02)': {
        "failed": "share is 0.7"
    },
    "@pytest.fixture\ndef broken():\n yield\n raise OSError('cannot be cleaned up')\ndef test_last(broken): pass": {
        "passed": "",
        "failed": "cleaned up",
    },
}
HEAD = f"import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport pytest\n"
HEAD += "from tests.gpu.packages import require\n"


def write_checks(folder, code):
    for name in ("pytest.ini", "conftest.py"):
        shutil.copy(ROOT / "tests" / "gpu" / name, folder)
    checks = folder / "check_some.py"
    checks.write_text(code, encoding="utf-8")
    return checks


@pytest.mark.processes
def test_every_check_has_its_row(tmp_path):
    rows_path = tmp_path / "out" / "found.json"
    checks = write_checks(tmp_path, HEAD + "\n".join(CHECKS))
    status, output, error = run(sys.executable, "-m", "tests.gpu", "--device=cpu", f"--json={rows_path}", str(checks))
    assert (status, error) == (1, "")
    content = json.loads(rows_path.read_text(encoding="utf-8"))
    expected_rows = [row for results in CHECKS.values() for row in results.items()]
    for row, (result, word) in zip(content["checks"], expected_rows, strict=True):
        assert row["result"] == result
        assert word in row["message"]
    figures = {row["name"].partition("::")[2]: row["figures"] for row in content["checks"]}
    assert figures["test_passes"] == {"error": 0.00012345, "launches": 2}
    assert figures["test_misses"] == {"share": 0.7, "share_target": ">=0.85", "peak": 1.01, "peak_target": "<=1.02"}
    assert content["machine"]["torch"]
    for line in ("check_some.py::test_passes", "error=0.000123 launches=2", "4 passed, 3 failed, 3 crashed, 2 skipped"):
        assert line in output


@pytest.mark.processes
def test_when_time_is_up_the_rest_is_not_reached(tmp_path, monkeypatch):
    """By a clock that stands still until the first check has begun."""
    begun = tmp_path / "begun"
    code = f"def test_one(): open({str(begun)!r}, 'w'); time.sleep(600)\ndef test_two(): pass"
    checks = write_checks(tmp_path, HEAD + code)
    clock = types.SimpleNamespace(monotonic=lambda: 9.0 * begun.exists(), sleep=time.sleep)
    monkeypatch.setattr(program, "time", clock)
    rows = list(program.run_file(Path(sys.executable), checks, "cpu", "", 8.0))
    assert [(row.name.partition("::")[2], row.result) for row in rows] == [
        ("test_one", "crashed"),
        ("test_two", "not reached"),
    ]
    assert "no time was left" in rows[0].message


@pytest.mark.parametrize("results", ["", "skipped", "passed,not reached", "passed,crashed", "passed,failed", "passed"])
def test_success_is_that_something_passed_and_nothing_failed_or_was_left(tmp_path, results):
    """Without a row, no name fitted ``--only``."""
    rows = [program.Row("check", result) for result in results.split(",") if result]
    with pytest.raises(SystemExit) as ended:
        program.finish([*rows, program.Row("check", "skipped")] if rows else rows, tmp_path, 0.0)
    assert ended.value.code == (0 if results == "passed" else 1)


# The environment, which takes what is missing and leaves the rest as it is.


def wheel(folder, name, version):
    """A package with one module that knows its version."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.processes
def test_wheels_add_what_is_missing_and_replace_nothing(tmp_path, capsys):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "rc_absent_package", "3.0")
    wheel(wheels, "pytest", "0.1")
    python = environment.prepare(tmp_path / "made", wheels)
    code = "import rc_absent_package as a, pytest, torch; print(a.version, pytest.__version__, torch.__file__)"
    done = subprocess.run((python, "-c", code), capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["3.0", pytest.__version__, __import__("torch").__file__]
    assert f"kept as they are here: pytest {pytest.__version__}" in capsys.readouterr().out
    stamp = (tmp_path / "made" / ".made").stat().st_mtime_ns
    assert environment.prepare(tmp_path / "made", wheels) == python
    assert (tmp_path / "made" / ".made").stat().st_mtime_ns == stamp
