"""Run all checks, a process for each file, and print one table: ``python -m tests.gpu [--wheels DIR]``.

A check that brings its process down, or hangs, is one row of the table; those after it run in a new process.
Exit status: 0 some passed, and the others lack what they need; 1 something failed or was not reached, or nothing
passed; 2 the environment cannot be made; 77 there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.environment import ROOT, UNUSABLE, prepare
from tests.gpu.machine import end, require_gpu, say

# What tells most comes first.
CHECKS = tuple(
    f"check_{name}.py" for name in ("kernels", "correction", "training", "runs", "layouts", "bridge", "compiled")
)
BENCHMARKS = tuple(f"bench_{name}.py" for name in ("packed", "vocab", "correction", "step", "linear"))
TOTAL_SECONDS = 450
# What is most wanted from a machine that is there for a quarter of an hour: (file, which of its checks).
QUARTER = (
    ("bench_packed.py", ""),
    ("bench_correction.py", ""),
    ("bench_step.py", "decoupled or bypass"),
    ("bench_vocab.py", "kept"),
    *((name, "") for name in CHECKS),
)
QUARTER_SECONDS = 780  # and two minutes to make the environment and to carry files
PROCESSES_PER_FILE = 12
USAGE = (2, 3, 4)  # exit statuses of pytest: it could not begin
NOTHING_COLLECTED = 5  # the one of pytest where no check is left, or none has a name that --only fits
LINES_OF_MESSAGE = 25
COLUMNS = "{:<58} {:<11} {:>7}  {}"


@dataclass
class Row:
    """One check.

    Attributes:
        name: ``file::check[case]``.
        result: passed, failed, skipped, crashed (its process died), or not reached.
        seconds: that it took.
        figures: what it measured.
        message: why it failed or was skipped.
    """

    name: str
    result: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    def __str__(self) -> str:
        figures = " ".join(f"{name}={_short(value)}" for name, value in self.figures.items())
        why = self.message.splitlines()[-1][:110] if self.message and self.result in ("skipped", "not reached") else ""
        return COLUMNS.format(self.name, self.result, f"{self.seconds:.1f}", figures or why)


def main() -> None:
    """Make the environment, run the checks, write the table and the JSON file."""
    args = _parser().parse_args()
    if args.device == "cuda":
        require_gpu("quarter-gpu" if args.quarter else "bench-gpu" if args.bench else "test-gpu")
    wheels = Path(args.wheels) if args.wheels else None
    python = Path(sys.executable) if args.device == "cpu" else prepare(args.environment, wheels)
    machine = _machine(python)
    if args.device == "cuda" and not machine.get("gpus"):
        versions = f"PyTorch {machine.get('torch')} for CUDA {machine.get('cuda')}"
        end(f"{versions} does not find the GPU that is here: install one that fits its driver", UNUSABLE)
    begun = time.monotonic()
    say(COLUMNS.format("check", "result", "seconds", "figures"))
    rows: list[Row] = []
    name, parts, seconds = _plan(args)
    path = args.json or ROOT / "runs" / "gpu" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(rows, machine, path, 0.0)
    for file, only in parts:
        for row in run_file(python, file, args.device, only, begun + seconds):
            say(str(row))
            rows.append(row)
            # Each time, so that whatever ends this process leaves what is known.
            _write(rows, machine, path, time.monotonic() - begun)
    finish(rows, path, time.monotonic() - begun)


def _plan(args: argparse.Namespace) -> tuple[str, list[tuple[Path, str]], float]:
    """(name of the results, files with the names of their checks as pytest's ``-k`` has them, seconds for all)."""
    if args.quarter:
        name = "quarter"
        chosen = QUARTER
        seconds = QUARTER_SECONDS
    elif args.bench:
        name = "bench"
        chosen = tuple((file, "") for file in BENCHMARKS)
        seconds = TOTAL_SECONDS
    else:
        name = "checks"
        chosen = tuple((file, "") for file in CHECKS)
        seconds = TOTAL_SECONDS
    parts = [(Path(__file__).parent / file, only) for file, only in chosen]
    if args.files:
        parts = [(file, "") for file in args.files]
    if args.only:
        parts = [(file, args.only) for file, _ in parts]
    return name, parts, args.seconds or seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", default="", metavar="DIR", help="packages that are missing here")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-gpu", metavar="DIR", help="where it is made")
    parser.add_argument("--json", type=Path, default=None, help="file of the results; default: in runs/gpu/")
    parser.add_argument("--bench", action="store_true", help="measure instead, and compare with targets")
    parser.add_argument("--quarter", action="store_true", help="what is most wanted, in a quarter of an hour")
    parser.add_argument("--seconds", type=float, default=None, help="after which no check is begun")
    parser.add_argument("--only", default="", metavar="WORDS", help="pytest's -k: checks whose names fit")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, to find mistakes here")
    parser.add_argument("files", nargs="*", type=Path, help="files of checks; default: all of them")
    return parser


def run_file(python: Path, file: Path, device: str, only: str, deadline: float) -> Iterator[Row]:
    """The rows of one file's checks; as many processes as it takes."""
    done: list[str] = []
    left: list[str] = []
    for _ in range(PROCESSES_PER_FILE):
        # What the process has written: the checks that it was to run, the one that it is in and since when.
        collected = None
        current = ""
        since = 0.0
        failed = False
        command = [str(python), "-m", "pytest", "-q", str(file), f"--device={device}", *(["-k", only] if only else [])]
        for event in _events(command, done, deadline):
            match event.pop("event"):
                case "collected":
                    collected = event["names"]
                case "started":
                    current = event["name"]
                    since = time.monotonic()
                case "ended":
                    current = ""
                    done.append(event["name"])
                    failed |= event["result"] == "failed"
                    yield Row(**event)
        status = event["status"]
        output = event["output"]
        why = "no time was left" if status is None else f"its process ended with {_status(status)}"
        if current:
            done.append(current)
            yield Row(current, "crashed", round(time.monotonic() - since, 1), message=f"{output}\n{why}")
        elif status in USAGE or collected is None:
            yield Row(file.name, "crashed", message=f"{output}\nits checks could not be collected")
            return
        elif status not in (None, 0, NOTHING_COLLECTED) and not failed:  # no row says why
            yield Row(file.name, "crashed", message=f"{output}\n{why}, in none of its checks")
        left = [name for name in collected or () if name not in done]
        if status is None or time.monotonic() >= deadline:
            yield from (Row(name, "not reached", message="no time was left") for name in left)
            return
        if not left:
            return
    why = f"{PROCESSES_PER_FILE} processes of this file came to an end before it"
    yield from (Row(name, "not reached", message=why) for name in left)


def _events(command: list[str], done: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """What one process writes to its file of results, as it writes it, without the checks that are done.

    The last has its exit status, None where time ran out, and the end of its output.
    """
    # Whatever plugins of pytest the machine has are left out.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p pytest_timeout"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+", errors="replace") as log:
        results = Path(folder, "results.jsonl")
        before = Path(folder, "done.json")
        results.touch()
        before.write_text(json.dumps(done), encoding="utf-8")
        command = [*command, f"--results={results}", f"--done={before}"]
        options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, **options)
        with results.open(encoding="utf-8") as lines:
            while True:
                status = process.poll()
                yield from map(json.loads, lines)
                if status is not None or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        # What it started, such as ranks, ends with it.
        _kill(process)
        log.seek(0)
        output = "\n".join(log.read().splitlines()[-LINES_OF_MESSAGE:])
        yield {"event": "over", "status": status, "output": output}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def _machine(python: Path) -> dict[str, Any]:
    """The GPUs and the versions of what was used."""
    command = [str(python), "-m", "tests.gpu.describe"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"unknown": done.stderr[-500:]}


def _write(rows: list[Row], machine: dict[str, Any], path: Path, seconds: float) -> None:
    content = {"machine": machine, "seconds": round(seconds, 1), "checks": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def finish(rows: list[Row], path: Path, seconds: float) -> None:
    failed = [row for row in rows if row.result in ("failed", "crashed")]
    for row in failed:
        say(f"\n== {row.name}: {row.result}")
        say("\n".join(row.message.splitlines()[-LINES_OF_MESSAGE:]))
    counts = {result: sum(row.result == result for row in rows) for result in dict.fromkeys(row.result for row in rows)}
    say(f"\n{', '.join(f'{number} {result}' for result, number in counts.items())} in {seconds:.0f} s; {path}")
    if not any(row.result == "passed" for row in rows):
        end("no check passed" if rows else "no check was run: these files hold none, or none that --only names", 1)
    sys.exit(1 if any(row.result in ("failed", "crashed", "not reached") for row in rows) else 0)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
