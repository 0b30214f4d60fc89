"""The commands for machines with a GPU, as far as a machine without one can tell."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as program
from tests.gpu import check_correction, check_kernels, check_training, environment, machine, measure, wheels
from tests.support import recorded_training, vocab_cases
from tests.support.errors import largest_error
from tests.support.paths import ROOT


def run(*words, **variables):
    """(exit status, stdout, stderr) of a command."""
    # Within another make it would say which folder it enters.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(words, cwd=ROOT, env=inherited | variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def run_here(monkeypatch, *words):
    """Run the command in this process."""
    monkeypatch.setattr(program, "_machine", lambda python: {"torch": "1"})
    monkeypatch.setattr(sys, "argv", ["tests.gpu", *words])
    program.main()


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_without_a_gpu_a_target_says_so(target):
    _, output, error = run("make", target, f"PYTHON={sys.executable}", CUDA_VISIBLE_DEVICES="")
    first, second = error.strip().splitlines()
    assert f"`make {target}`" in first
    assert f"Error {machine.NO_GPU}" in second
    assert not output


@pytest.mark.skipif(machine.count_gpus() > 0, reason="there is a GPU")
def test_a_gpu_that_pytorch_cannot_use(monkeypatch):
    monkeypatch.setattr(program, "require_gpu", lambda target: 1)
    monkeypatch.setattr(program, "prepare", lambda folder, wheels: sys.executable)
    with pytest.raises(SystemExit) as stopped:
        run_here(monkeypatch)
    assert stopped.value.code == environment.UNUSABLE


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((sys.executable, "-m", "tests.gpu", "--wheels", "/nowhere"), "/nowhere"),
        (("make", "wheels", f"PYTHON={sys.executable}", "WHEELS="), "WHEELS=DIR"),
        (("make", "wheels", f"PYTHON={sys.executable}", "WHEELS=/nowhere", "ONLY=torch"), "torch is not in wheels.txt"),
    ],
)
def test_wheels_that_are_not_there_are_named(words, named):
    status, _, error = run(*words)
    assert status == 2
    assert named in error


# Checks that do what checks of a GPU may do.
CHECKS = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import pytest
from tests.gpu.packages import require

def test_passes(figures): figures(error=0.00012345, launches=2)
def test_fails(): assert 1 == 2, "not equal"
def test_dies(): os.kill(os.getpid(), signal.SIGSEGV)
def test_comes_after(): pass

@pytest.mark.timeout(1)
def test_hangs(): time.sleep(60)

def test_needs_a_package(): require("no_such_package.inside")

@pytest.mark.gpus(5)
def test_needs_many(): pass

def test_misses_a_target(target):
    target("share", 0.7, least=0.85)
    target("peak", 1.01, most=1.02)

@pytest.fixture
def left_behind():
    yield
    raise RuntimeError("cannot be cleaned up")

def test_last(left_behind): pass
"""


@pytest.mark.processes
def test_every_check_has_its_row(tmp_path):
    for name in ("pytest.ini", "conftest.py"):
        shutil.copy(ROOT / "tests" / "gpu" / name, tmp_path)
    found, checks = tmp_path / "out" / "found.json", tmp_path / "check_some.py"
    checks.write_text(CHECKS.format(root=str(ROOT)), encoding="utf-8")
    status, output, error = run(sys.executable, "-m", "tests.gpu", "--device=cpu", f"--json={found}", str(checks))
    assert (status, error) == (1, "")
    content = json.loads(found.read_text(encoding="utf-8"))
    rows = [(row["name"].partition("::")[2], row["result"]) for row in content["checks"]]
    assert rows == [
        ("test_passes", "passed"),
        ("test_fails", "failed"),
        ("test_dies", "crashed"),
        ("test_comes_after", "passed"),
        ("test_hangs", "crashed"),
        ("test_needs_a_package", "skipped"),
        ("test_needs_many", "skipped"),
        ("test_misses_a_target", "failed"),
        ("test_last", "passed"),
        ("test_last", "failed"),
    ]
    words = ["", "not equal", "SIGSEGV", "", "Timeout", "no_such_package.inside", "5", "share is 0.7", "", "cleaned up"]
    for word, row in zip(words, content["checks"], strict=True):
        assert word in row["message"]
    assert content["checks"][0]["figures"] == {"error": 0.00012345, "launches": 2}
    figures = {"share": 0.7, "share_target": ">=0.85", "peak": 1.01, "peak_target": "<=1.02"}
    assert content["checks"][7]["figures"] == figures
    assert content["machine"]["torch"]
    for line in ("check_some.py::test_passes", "error=0.000123 launches=2", "3 passed, 3 failed, 2 crashed, 2 skipped"):
        assert line in output


@pytest.mark.parametrize(
    ("results", "status"),
    [
        *((results, 1) for results in ("", "skipped", "not reached", "passed,crashed", "passed,failed")),
        *(("passed,not reached", 1), ("passed,skipped", 0), ("passed,Ctrl-C", KeyboardInterrupt)),
    ],
)
def test_success_is_that_something_passed_and_nothing_failed_or_was_left(tmp_path, monkeypatch, results, status):
    """Without a row, no name fitted ``--only``. An interrupted command leaves the results that it has."""
    rows = [program.Row(str(place), result) for place, result in enumerate(results.split(",")) if result]

    def run_file(*_):
        for row in rows:
            if row.result == "Ctrl-C":
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(program, "run_file", run_file)
    with pytest.raises(SystemExit if isinstance(status, int) else status) as ended:
        run_here(monkeypatch, "--device=cpu", f"--json={tmp_path}/out/found.json", "one_file")
    assert getattr(ended.value, "code", KeyboardInterrupt) == status
    content = json.loads((tmp_path / "out" / "found.json").read_text(encoding="utf-8"))
    assert content["machine"] == {"torch": "1"}
    assert [row["result"] for row in content["checks"]] == [row.result for row in rows if row.result != "Ctrl-C"]


DYING = """
import os, signal, pytest
@pytest.fixture
def dies():
    yield
    os.kill(os.getpid(), signal.SIGSEGV)
def test_one(dies): pass
def test_two(dies): pass
def test_three(): pass
"""


def write_checks(folder, code):
    for name in ("pytest.ini", "conftest.py"):
        shutil.copy(ROOT / "tests" / "gpu" / name, folder)
    checks = folder / "check_some.py"
    checks.write_text(code, encoding="utf-8")
    return checks


@pytest.mark.processes
def test_processes_that_die_between_checks_leave_the_rest_not_reached(tmp_path, monkeypatch):
    checks = write_checks(tmp_path, DYING)
    monkeypatch.setattr(program, "PROCESSES_PER_FILE", 2)
    rows = list(program.run_file(Path(sys.executable), checks, "cpu", "", time.monotonic() + 600))
    assert [row.result for row in rows] == ["passed", "crashed", "passed", "crashed", "not reached"]
    assert "SIGSEGV" in rows[1].message
    assert rows[-1].message == "2 processes of this file came to an end before it"


HANGING = """
import time
from pathlib import Path


def test_one():
    Path({begun!r}).touch()
    time.sleep(600)


def test_two():
    pass
"""


@pytest.mark.processes
def test_when_time_is_up_the_rest_is_not_reached(tmp_path, monkeypatch):
    """By a clock that stands still until the first check has begun."""
    begun, found, now = tmp_path / "begun", tmp_path / "found.json", [0.0]
    checks = write_checks(tmp_path, HANGING.format(begun=str(begun)))

    def sleep(seconds):
        time.sleep(seconds)
        now[0] = 9.0 * begun.exists()

    monkeypatch.setattr(program, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(SystemExit) as stopped:
        run_here(monkeypatch, "--device=cpu", "--seconds=8", f"--json={found}", str(checks))
    rows = json.loads(found.read_text(encoding="utf-8"))["checks"]
    assert [(row["name"], row["result"]) for row in rows] == [
        ("check_some.py::test_one", "crashed"),
        ("check_some.py::test_two", "not reached"),
    ]
    assert "no time was left" in rows[0]["message"]
    assert stopped.value.code == 1


def test_nan_anywhere_is_a_failure(monkeypatch):
    assert largest_error([1.0, 3.0, 2.0]) == 3.0
    assert math.isnan(largest_error([1.0, math.nan, 2.0]))
    with pytest.raises(ValueError, match="nothing was measured"):
        largest_error([])
    case = vocab_cases.Case(5, 5)
    for place in range(3):
        found = vocab_cases.results(case)
        found["values"][place][0] = torch.nan
        monkeypatch.setattr(check_kernels, "results", lambda *_, found=found: found)
        figures = {}
        with pytest.raises(AssertionError):
            check_kernels.assert_case(case, torch.device("cpu"), figures.update)
        assert math.isnan(figures["forward_error"])


def test_a_metric_that_is_nan_fails():
    weights, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    results = [
        types.SimpleNamespace(metrics=lambda found=found: found, weights=weights, mask=mask)
        for found in ({"a": 1.0, "b": math.nan}, {"a": 1.0, "b": 2.0})
    ]
    of_metrics, of_weights = check_correction.differences(*results)
    assert math.isnan(of_metrics)
    assert of_weights == 0


def test_every_case_fails_where_one_metric_is_nan(monkeypatch):
    def correct(name, batch, layout=None):
        return types.SimpleNamespace(metrics=lambda: {"a": 1.0, "b": math.nan}, weights=None, mask=batch.mask)

    monkeypatch.setattr(check_correction, "correct", correct)
    found = {}
    with pytest.raises(AssertionError):
        check_correction.test_every_case_is_that_of_the_cpu(torch.device("cpu"), found.update, packed=False)
    assert math.isnan(found["metric_error"])


def test_a_gradient_that_is_nan_in_one_mini_batch_fails(monkeypatch):
    want = {"weight": torch.ones(3)}
    got = [want, {"weight": torch.full((3,), torch.nan)}]
    expected = types.SimpleNamespace(gradients=[want] * len(got))
    monkeypatch.setattr(check_training.training_cases, "expected", lambda objective: expected)
    monkeypatch.setattr(check_training.matrix, "whole_gradients", lambda everywhere, index: got[index])
    assert math.isnan(check_training.distance_of(None, check_training.CASES["decoupled"]))


def test_a_profiler_that_sees_no_kernel_counts_none(monkeypatch):
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "profile", lambda **_: contextlib.nullcontext(types.SimpleNamespace(events=list)))
    with pytest.raises(RuntimeError, match="the profiler saw no kernel"):
        measure.count_launches(lambda: None)


def test_the_list_of_wheels_names_each_package_once():
    lines = wheels.requirements([])
    names = [line.partition("==")[0] for line in lines]
    assert len(set(names)) == len(names)
    assert all(line.partition("==")[2] for line in lines)
    assert not {"torch", "triton"} & set(names)
    assert wheels.requirements(["megatron-core"]) == [line for line in lines if line.startswith("megatron-core==")]


# The environment, which takes what is missing and leaves the rest as it is.


def wheel(folder, name, version):
    """A package with one module that knows its version."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.processes
def test_wheels_add_what_is_missing_and_replace_nothing(tmp_path, monkeypatch, capsys):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "rc_absent_package", "3.0")
    wheel(wheels, "pytest", "0.1")
    asked = environment._ask
    # Here is no PyTorch that can use a GPU.
    monkeypatch.setattr(environment, "_ask", lambda python: asked(python) | {"cuda": "13.0"})
    python = environment.prepare(tmp_path / "made", wheels)
    code = (
        "import rc_absent_package, pytest, torch; print(rc_absent_package.version, pytest.__version__, torch.__file__)"
    )
    done = subprocess.run((python, "-c", code), capture_output=True, text=True, check=True, cwd="/")
    absent, present, torch_file = done.stdout.split()
    assert absent == "3.0"
    assert present == pytest.__version__
    assert torch_file == __import__("torch").__file__
    assert f"kept as they are here: pytest {pytest.__version__}" in capsys.readouterr().out
    stamp = (tmp_path / "made" / ".made").stat().st_mtime_ns
    assert environment.prepare(tmp_path / "made", wheels) == python
    assert (tmp_path / "made" / ".made").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("names", "cuda", "named"),
    [
        (["torch-99.0"], None, "cannot use a GPU"),  # wheels bring no PyTorch
        ([], "13.0", "no .whl file"),
        (["a-1", "a-2"], "13.0", "several versions of a"),
    ],
)
def test_environments_that_wheels_cannot_make(tmp_path, capsys, monkeypatch, names, cuda, named):
    ask = environment._ask
    monkeypatch.setattr(environment, "_ask", lambda python: ask(python) | {"cuda": cuda})
    for name in names:
        wheel(tmp_path, *name.split("-"))
    with pytest.raises(SystemExit) as stopped:
        environment.prepare(tmp_path / "made", tmp_path)
    assert stopped.value.code == environment.UNUSABLE
    assert named in capsys.readouterr().err


def test_without_the_drivers_library_devices_are_counted(monkeypatch):
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    monkeypatch.setattr(machine.Path, "glob", lambda self, pattern: [f"/dev/nvidia{index}" for index in range(2)])
    assert machine.count_gpus() == 2


ON_A_GPU = """
import sys, torch
torch.cuda.is_available = lambda: True  # and nothing is run on it
from megatron_rc.launch import distributed, train_ppo
distributed.initialize = distributed.shut_down = lambda *_: None
train_ppo.main(sys.argv[1:], run=lambda config, _: print(config.launch.on_cpu))
print("megatron_rc.launch.training.loop" in sys.modules, "megatron_rc.launch.training.models.cpu" in sys.modules)
"""


@pytest.mark.processes
def test_a_run_on_a_gpu_never_loads_the_cpu_switch(tmp_path):
    """The launcher's own way to the training loop, as it is taken where PyTorch finds a GPU."""
    words = [word for word in recorded_training.flags(tmp_path) if word != "--cpu"]
    status, output, error = run(sys.executable, "-c", ON_A_GPU, *words, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert status == 0, error
    assert output.split() == ["False", "True", "False"]
