"""What the checks share: the device, figures for the table, and one line in a file for whatever happens.

The file is written line by line, so that the command that reads it knows which check a process died in.
"""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

POISONED = 70  # exit status: the process cannot use its GPU any more


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, to find mistakes in checks")
    parser.addoption("--done", type=Path, default=None, help="JSON file of checks that are left out")
    parser.addoption("--results", type=Path, default=None, help="file that gets a line for whatever happens")


def pytest_configure(config):
    config.results = config.getoption("--results")
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


def note(config, **values):
    """Add a line to the results."""
    if config.results is not None:
        with config.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def pytest_collection_modifyitems(config, items):
    path = config.getoption("--done")
    done = json.loads(path.read_text(encoding="utf-8")) if path else []
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_collection_finish(session):
    note(session.config, event="collected", names=[item.nodeid for item in session.items])


def pytest_runtest_setup(item):
    note(item.config, event="started", name=item.nodeid)
    number = next((mark.args[0] for mark in item.iter_markers("gpus")), 0)
    if number and number > available(item.config.getoption("--device")):
        pytest.skip(f"needs {number} GPUs")


def available(device):
    """GPUs, or as many as anybody asks for where processes on the CPU take their place."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else 4


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" or report.outcome != "passed":
        message = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else report.longreprtext
        figures = dict(item.user_properties)
        result = "failed" if report.failed else report.outcome
        values = {"result": result, "seconds": round(call.duration, 2), "figures": figures, "message": message}
        note(item.config, event="ended", name=item.nodeid, **values)
        if report.failed and is_poisoned(item.config):
            os._exit(POISONED)
    return report


def is_poisoned(config):
    """After a fault on the GPU every later call in this process fails too."""
    torch = sys.modules.get("torch")
    if torch is None or config.getoption("--device") == "cpu" or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.fixture
def device(request):
    """Where the check runs; its memory is free before."""
    import gc

    import torch

    device_of_option = torch.device(request.config.getoption("--device"))
    if device_of_option.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return device_of_option


@pytest.fixture
def on_gpu(device):
    """Whether this is the real thing: sizes are small elsewhere."""
    return device.type == "cuda"


@pytest.fixture
def counts(on_gpu):
    """For a check that counts or times what a GPU does."""
    if not on_gpu:
        pytest.skip("counts what a GPU does")


@pytest.fixture
def figures(record_property):
    """Called with numbers that stand in the table, by name."""

    def record(**values):
        for name, value in values.items():
            record_property(name, value)

    return record


@pytest.fixture
def target(figures):
    """Called with figures that have a target: all are recorded, and those that miss it fail the check at its end."""
    missed = []

    def compare(name, value, *, least=None, most=None):
        bound, met = (f">={least}", value >= least) if most is None else (f"<={most}", value <= most)
        figures(**{name: value, f"{name}_target": bound})
        if not met:
            missed.append(f"{name} is {value:.4g}, its target {bound}")

    compare.missed = missed
    return compare


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """After the check's own code: the targets that it missed."""
    result = yield
    missed = getattr(pyfuncitem.funcargs.get("target"), "missed", [])
    if missed:
        pytest.fail("; ".join(missed), pytrace=False)
    return result
