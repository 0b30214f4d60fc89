"""The commands for machines with a GPU, as far as a machine without one can tell."""

import contextlib
import json
import math
import os
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest
import torch

from tests.gpu import check_correction, check_kernels, environment, machine, measure, wheels
from tests.support import recorded_training, vocab_cases
from tests.support.errors import largest_error
from tests.support.paths import ROOT

TARGETS = ("test-gpu", "bench-gpu")


def command(*words, **variables):
    """(exit status, stdout, stderr) of ``python words``."""
    done = subprocess.run(
        (sys.executable, *words),
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_without_a_gpu_a_target_says_so(target):
    done = subprocess.run(
        ("make", target, f"PYTHON={sys.executable}"),
        cwd=ROOT,
        # Within another make it would say which folder it enters.
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    first, second = done.stderr.strip().splitlines()
    assert first == f"error: no NVIDIA GPU was found here: run `make {target}` on a machine that has one"
    assert f"Error {machine.NO_GPU}" in second
    assert not done.stdout


@pytest.mark.processes
@pytest.mark.skipif(machine.count_gpus() > 0, reason="there is a GPU")
def test_a_gpu_that_pytorch_cannot_use(monkeypatch, capsys):
    from tests.gpu import __main__ as program

    monkeypatch.setattr(program, "require_gpu", lambda target: 1)
    monkeypatch.setattr(program, "prepare", lambda folder, wheels: sys.executable)
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])
    with pytest.raises(SystemExit) as stopped:
        program.main()
    assert stopped.value.code == environment.UNUSABLE
    assert "does not find the GPU that is here: install one that fits its driver" in capsys.readouterr().err


def test_a_folder_of_wheels_must_exist():
    status, _, error = command("-m", "tests.gpu", "--wheels", "/nowhere")
    assert status == 2
    assert "/nowhere is no folder: name one that holds wheels" in error


# The table, of checks that do what checks of a GPU may do.

CHECKS = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import pytest


def test_passes(figures):
    figures(error=0.00012345, launches=2)


def test_fails():
    assert 1 == 2, "not equal"


def test_dies():
    os.kill(os.getpid(), signal.SIGSEGV)


def test_comes_after():
    pass


@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(60)


def test_needs_what_is_not_here():
    from tests.gpu.packages import require

    require("no_such_package.inside")


@pytest.mark.gpus(5)
def test_needs_many():
    pass


def test_misses_a_target(target):
    target("share", 0.7, least=0.85)
    target("peak", 1.01, most=1.02)


@pytest.fixture
def left_behind():
    yield
    raise RuntimeError("cannot be cleaned up")


def test_last(left_behind):
    pass
"""


def write_checks(folder, code):
    """A file of checks in a folder as tests/gpu is one."""
    for name in ("pytest.ini", "conftest.py"):
        (folder / name).write_text((ROOT / "tests" / "gpu" / name).read_text(encoding="utf-8"), encoding="utf-8")
    checks = folder / "check_some.py"
    checks.write_text(code, encoding="utf-8")
    return checks


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """(exit status, output, content of the JSON file) of the command over these checks."""
    folder = tmp_path_factory.mktemp("gpu")
    checks = write_checks(folder, CHECKS.format(root=str(ROOT)))
    words = ("-m", "tests.gpu", "--device=cpu", f"--json={folder / 'out' / 'found.json'}", str(checks))
    status, output, error = command(*words)
    assert not error
    return status, output, json.loads((folder / "out" / "found.json").read_text(encoding="utf-8"))


@pytest.mark.processes
def test_every_check_has_its_row(table):
    status, output, content = table
    assert status == 1
    rows = {row["name"].partition("::")[2]: row for row in content["checks"]}
    assert {name: row["result"] for name, row in rows.items() if name != "test_last"} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_dies": "crashed",
        "test_comes_after": "passed",
        "test_hangs": "crashed",
        "test_needs_what_is_not_here": "skipped",
        "test_needs_many": "skipped",
        "test_misses_a_target": "failed",
    }
    assert rows["test_passes"]["figures"] == {"error": 0.00012345, "launches": 2}
    assert "not equal" in rows["test_fails"]["message"]
    assert "its process ended with signal SIGSEGV" in rows["test_dies"]["message"]
    assert "Timeout" in rows["test_hangs"]["message"]
    assert rows["test_needs_what_is_not_here"]["message"] == "no_such_package.inside is not installed"
    assert rows["test_needs_many"]["message"] == "needs 5 GPUs"
    figures = {"share": 0.7, "share_target": ">=0.85", "peak": 1.01, "peak_target": "<=1.02"}
    assert rows["test_misses_a_target"]["figures"] == figures
    assert rows["test_misses_a_target"]["message"] == "share is 0.7, its target >=0.85"
    assert [row["result"] for row in content["checks"][-2:]] == ["passed", "failed"]
    assert "cannot be cleaned up" in content["checks"][-1]["message"]
    assert content["machine"]["torch"]
    assert "check_some.py::test_passes" in output
    assert "error=0.000123 launches=2" in output
    assert "3 passed, 3 failed, 2 crashed, 2 skipped" in output


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
    from tests.gpu import __main__ as program

    begun, found, now = tmp_path / "begun", tmp_path / "found.json", [0.0]
    checks = write_checks(tmp_path, HANGING.format(begun=str(begun)))

    def sleep(seconds):
        time.sleep(seconds)
        now[0] = 9.0 * begun.exists()

    monkeypatch.setattr(program, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(program, "_machine", lambda python: {"torch": "1"})
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--device=cpu", "--seconds=8", f"--json={found}", str(checks)])
    with pytest.raises(SystemExit) as stopped:
        program.main()
    rows = json.loads(found.read_text(encoding="utf-8"))["checks"]
    assert [(row["name"], row["result"]) for row in rows] == [
        ("check_some.py::test_one", "crashed"),
        ("check_some.py::test_two", "not reached"),
    ]
    assert "no time was left" in rows[0]["message"]
    assert stopped.value.code == 1


@pytest.mark.parametrize("rows", [0, 1])
def test_what_is_known_is_left_when_the_command_is_ended(tmp_path, monkeypatch, rows):
    from tests.gpu import __main__ as program

    def run_file(*_):
        yield from [program.Row("one", "passed")] * rows
        raise KeyboardInterrupt

    found = tmp_path / "out" / "found.json"
    monkeypatch.setattr(program, "run_file", run_file)
    monkeypatch.setattr(program, "_machine", lambda python: {"torch": "1"})
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--device=cpu", f"--json={found}"])
    with pytest.raises(KeyboardInterrupt):
        program.main()
    content = json.loads(found.read_text(encoding="utf-8"))
    assert content["machine"] == {"torch": "1"}
    assert [row["result"] for row in content["checks"]] == ["passed"] * rows


@pytest.mark.processes
def test_where_no_name_fits_the_exit_status_says_so(tmp_path):
    checks = write_checks(tmp_path, "def test_one():\n    pass\n")
    words = ("-m", "tests.gpu", "--device=cpu", f"--json={tmp_path / 'found.json'}", "--only=no_such_check")
    status, _, error = command(*words, str(checks))
    assert (status, error) == (1, "error: no check was run: these files hold none, or none that --only names\n")


DYING = """
import os, signal
import pytest


@pytest.fixture
def dies_at_the_end():
    yield
    os.kill(os.getpid(), signal.SIGSEGV)


def test_one(dies_at_the_end):
    pass


def test_two(dies_at_the_end):
    pass


def test_three():
    pass
"""


@pytest.mark.processes
def test_processes_that_die_between_checks_have_rows_and_so_have_the_checks_that_are_left(tmp_path, monkeypatch):
    from tests.gpu import __main__ as program

    monkeypatch.setattr(program, "PROCESSES_PER_FILE", 2)
    checks = write_checks(tmp_path, DYING)
    rows = list(program.run_file(Path(sys.executable), checks, "cpu", "", time.monotonic() + 600))
    assert [(row.name, row.result) for row in rows] == [
        ("check_some.py::test_one", "passed"),
        ("check_some.py", "crashed"),
        ("check_some.py::test_two", "passed"),
        ("check_some.py", "crashed"),
        ("check_some.py::test_three", "not reached"),
    ]
    assert "its process ended with signal SIGSEGV, in none of its checks" in rows[1].message
    assert rows[-1].message == "2 processes of this file came to an end before it"


@pytest.mark.parametrize("result", ["crashed", "failed", "not reached", "skipped", "passed"])
def test_whatever_did_not_run_is_no_success(tmp_path, result):
    from tests.gpu import __main__ as program

    rows = [program.Row("one", "passed"), program.Row("other", result)]
    with pytest.raises(SystemExit) as stopped:
        program._finish(rows, tmp_path / "found.json", 1.0)
    assert stopped.value.code == (result not in ("skipped", "passed"))


@pytest.mark.parametrize("result", ["not reached", "skipped"])
def test_where_nothing_passed_the_exit_status_says_so(tmp_path, capsys, result):
    from tests.gpu import __main__ as program

    with pytest.raises(SystemExit) as stopped:
        program._finish([program.Row("one", result)], tmp_path / "found.json", 1.0)
    assert stopped.value.code == 1
    assert capsys.readouterr().err == "error: no check passed\n"


# What the checks compare: NaN anywhere is a failure.


def test_a_kernel_that_gives_nan_fails(monkeypatch):
    case = vocab_cases.Case(5, 5)
    for place in range(3):
        found = vocab_cases.results(case)
        found["values"][place][0] = torch.nan
        monkeypatch.setattr(check_kernels, "results", lambda *_, found=found: found)
        figures = {}
        with pytest.raises(AssertionError):
            check_kernels.assert_case(case, torch.device("cpu"), figures.update)
        assert math.isnan(figures["forward_error"])
    found["values"].pop()
    with pytest.raises(ValueError, match="zip"):
        check_kernels.assert_case(case, torch.device("cpu"), lambda **_: None)


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
    from tests.gpu import check_training

    want = {"weight": torch.ones(3)}
    got = [want, {"weight": torch.full((3,), torch.nan)}]
    expected = types.SimpleNamespace(gradients=[want] * len(got))
    monkeypatch.setattr(check_training.training_cases, "expected", lambda objective: expected)
    monkeypatch.setattr(check_training.matrix, "whole_gradients", lambda everywhere, index: got[index])
    assert math.isnan(check_training.distance_of(None, check_training.CASES["decoupled"]))


def test_the_largest_error():
    assert largest_error([1.0, 3.0, 2.0]) == 3.0
    assert math.isnan(largest_error([1.0, math.nan, 2.0]))
    with pytest.raises(ValueError, match="nothing was measured"):
        largest_error([])


def test_a_profiler_that_sees_no_kernel_counts_none(monkeypatch):
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "profile", lambda **_: contextlib.nullcontext(types.SimpleNamespace(events=list)))
    with pytest.raises(RuntimeError, match="the profiler saw no kernel"):
        measure.count_launches(lambda: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["WHEELS="], "name a folder for the wheels: make wheels WHEELS=DIR"),
        (["WHEELS=/nowhere", "ONLY=torch"], "torch is not in wheels.txt: leave it out, or add it there"),
    ],
)
def test_wheels_that_cannot_be_downloaded(words, message):
    done = subprocess.run(
        ("make", "wheels", f"PYTHON={sys.executable}", *words), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert f"error: {message}" in done.stderr


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


def test_wheels_bring_no_pytorch(tmp_path, capsys, monkeypatch):
    """One that cannot use a GPU is an error, and is not replaced; the one here may be a build that can."""
    ask = environment._ask
    monkeypatch.setattr(environment, "_ask", lambda python: ask(python) | {"cuda": None})
    wheel(tmp_path, "torch", "99.0")
    with pytest.raises(SystemExit) as stopped:
        environment.prepare(tmp_path / "made", tmp_path)
    assert stopped.value.code == environment.UNUSABLE
    assert "cannot use a GPU, and WHEELS never brings one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "message"),
    [((), "holds no .whl file"), ((("a", "1"), ("a", "2")), "holds several versions of a: keep one of each")],
)
def test_folders_of_wheels_that_cannot_be_installed(tmp_path, capsys, names, message):
    for name, version in names:
        wheel(tmp_path, name, version)
    with pytest.raises(SystemExit) as stopped:
        environment.prepare(tmp_path / "made", tmp_path)
    assert stopped.value.code == environment.UNUSABLE
    assert message in capsys.readouterr().err


def test_the_driver_counts_what_may_be_used(monkeypatch):
    """Without the driver's library nobody can say, and PyTorch is asked where there are devices."""
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    monkeypatch.setattr(machine.Path, "glob", lambda self, pattern: [f"/dev/nvidia{index}" for index in range(2)])
    assert machine.count_gpus() == 2


ON_A_GPU = """
import sys, torch
torch.cuda.is_available = lambda: True  # and nothing is run on it
from megatron_rc.launch import distributed, train_ppo
distributed.initialize = distributed.shut_down = lambda *_: None
train_ppo.main(sys.argv[1:], run=lambda config, _: print(config.launch.on_cpu))
print("megatron_rc.launch.training.loop" in sys.modules, "megatron_rc.launch.training.cpu" in sys.modules)
"""


@pytest.mark.processes
def test_a_run_on_a_gpu_never_loads_the_cpu_switch(tmp_path):
    """The launcher's own way to the training loop, as it is taken where PyTorch finds a GPU."""
    words = [word for word in recorded_training.flags(tmp_path) if word != "--cpu"]
    status, output, error = command("-c", ON_A_GPU, *words, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert status == 0, error
    assert output.split() == ["False", "True", "False"]
