"""The trainer that torchrun starts: ``torchrun --nproc-per-node N launch/train_ppo.py <flags>``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import NoReturn

# Before the first step there is nothing to save: Ctrl-C ends the rank without a traceback, while modules load too.
if "RANK" in os.environ:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if __name__ == "__main__":
    # Modules make many objects and little garbage: looking for it takes a sixth of a start. main() ends this.
    gc.disable()
if __package__ in (None, ""):
    # Started as a file: the folder that holds the packages takes the place of launch/ itself.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from megatron_rc.launch.ending import (
    ATTEMPT,
    GUARD,
    end_forks_with_this_process,
    end_with_parent,
    signal_of_launcher,
    tell,
    tell_ending,
    tell_start,
)
from megatron_rc.launch.errors import ConfigurationError, RunError, one_line
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.lost_ranks import LostRanks
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.standard_error import VisibleFormatter, outlast_reader, say_error
from megatron_rc.launch.tasks import Task

USAGE_ERROR = 2
FAILURE = 1
# Work on the ranks; True if nothing is lost: all steps are made, or a checkpoint holds the steps made.
Run = Callable[[RunConfig, Task], bool]
# Seconds in which torchrun ends a rank whose error the first rank of its machine has said.
WAIT_SECONDS = 5


def main(argv: Sequence[str] | None = None, run: Run | None = None) -> None:
    """Check the flags, then train, or do something else on the ranks.

    Ends the process with 2 for flags that cannot work, 1 for a failed run, 3 for one that a guard ended.
    """
    if "RANK" not in os.environ:
        say_error("start this with torchrun, or use `python -m megatron_rc.launch --nproc-per-node N`")
        sys.exit(USAGE_ERROR)
    # A launcher that is killed leaves no rank behind.
    end_with_parent(os.getppid())
    if signal_of_launcher() is not None:
        sys.exit(0)
    rank = int(os.environ["RANK"])
    lines = logging.StreamHandler()
    lines.setFormatter(VisibleFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING if rank == 0 else logging.ERROR, handlers=[lines])
    tell_start()
    try:
        _recorded(_main)(sys.argv[1:] if argv is None else argv, run)
        code = 0
    except RunError as error:
        code = say_end(str(error), error.code)
    except ValueError as error:
        code = say_end(str(error), FAILURE)
    except Exception as error:
        tell(error=f"rank {rank}: {type(error).__name__}: {one_line(error)}", code=FAILURE)
        sys.excepthook(type(error), error, error.__traceback__)
        code = FAILURE
    # Python's own end would wait for threads in compiled code, as of an engine whose work was given up.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _recorded(work: Callable[[Sequence[str], Run | None], None]) -> Callable[[Sequence[str], Run | None], None]:
    """The work, with an error that leaves it in torchrun's table of failures."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class ErrorFile(ErrorHandler):
        """torchrun's file of an error; a folder that is full or gone must not hide the error."""

        def record_exception(self, e: BaseException) -> None:
            with contextlib.suppress(OSError):
                super().record_exception(e)

    return record(work, ErrorFile())


def _main(words: Sequence[str], run: Run | None) -> None:
    """Do the work of this rank."""
    try:
        config, task = configure(words, int(os.environ["WORLD_SIZE"]))
    except ConfigurationError as error:
        raise RunError(str(error), USAGE_ERROR) from error
    ignore_megatron_warnings()
    with cpu_backend() if config.launch.on_cpu else contextlib.nullcontext():
        # Megatron-Core imports Weights & Biases for half a second and does not use it here.
        with hidden("wandb"):
            from megatron_rc.launch.training.loop import train

        _collect_garbage_again()
        _say_restart()
        end_forks_with_this_process()
        _run_on_rank(run or train, config, task)


def _run_on_rank(run: Run, config: RunConfig, task: Task) -> None:
    """Run on this rank of the group of all ranks, and tell the launcher when its work is done."""
    from torch.distributed import DistError

    from megatron_rc.launch.distributed import initialize, shut_down

    lost_ranks = LostRanks(60 * config.launch.distributed_timeout_minutes, _end_at_once)
    try:
        initialize(config, lost_ranks)
        tell_ending(kept=_outcome_of(run, config, task))
        lost_ranks.close()
        shut_down()
    except (DistError, RuntimeError) as error:
        # Gloo raises a plain RuntimeError.
        is_of_collective = isinstance(error, DistError) or type(error) is RuntimeError
        sentence = lost_ranks.cut_off() if is_of_collective else None
        if sentence is not None:
            _end_at_once(sentence, is_cut_off=True)
        raise
    finally:
        lost_ranks.close()


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let imports of these packages fail inside the block, except of those that are loaded already."""
    names = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _collect_garbage_again() -> None:
    """Turn the collector on after the start; it passes over the modules' objects from now on."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def ignore_megatron_warnings() -> None:
    """Silence Megatron-Core's warnings of missing optional packages and of deprecated names of torch."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


@contextlib.contextmanager
def cpu_backend() -> Iterator[None]:
    """Run Megatron-Core on the CPU inside this block, with the training modules imported uncompiled.

    Some packages are hidden in the whole block: Transformer Engine and apex, whose optimizers need a GPU, and Triton,
    which no CPU uses and which takes 70 MB of each process. Megatron-Core 0.19 cannot be imported without Triton.
    """
    from megatron_rc.launch.training.models import cpu

    # A checkout of Megatron-LM has no distribution.
    runs_without_triton = any(
        installed.version.startswith("0.16.") for installed in distributions(name="megatron-core")
    )
    packages = ["transformer_engine", "apex"]
    if runs_without_triton:
        packages.append("triton")
    with hidden(*packages):
        with cpu.without_compiler(), hidden("wandb"):
            import megatron_rc.launch.training.loop  # noqa: F401
        with cpu.cpu_backend():
            yield


@contextlib.contextmanager
def on_one_cpu() -> Iterator[None]:
    """Run a command without ranks inside the block; an error of flags or files ends the process with a sentence.

    Flags that cannot work end it with 2, files that cannot with 1. Megatron-Core's warnings of the CPU are silent.
    """
    log = logging.getLogger("megatron_rc")
    level = log.level
    log.setLevel(logging.ERROR)
    ignore_megatron_warnings()
    try:
        yield
    except ValueError as error:
        say_error(str(error))
        sys.exit(USAGE_ERROR if isinstance(error, ConfigurationError) else FAILURE)
    finally:
        log.setLevel(level)


def _outcome_of(run: Run, config: RunConfig, task: Task) -> bool:
    """Return the run's result; a ``sys.exit()`` in a user's code is an error and no success."""
    try:
        return run(config, task)
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called within the run: raise an error instead") from error


def _say_restart() -> None:
    attempt = int(os.environ.get(ATTEMPT, "0"))
    if os.environ["RANK"] == "0" and attempt:
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", attempt)
        sys.stderr.write(f"a rank failed: all are started again (restart {attempt} of {most})\n")


def say_end(message: str, code: int) -> int:
    """Say why the run ends; return the exit code of this rank for a run that is to end with ``code``.

    Under the launcher the launcher says it. Otherwise the rank does; because most errors are alike on all ranks, the
    first rank of each machine says it at once, and the others after a wait in which torchrun ends them.
    """
    is_told = tell(error=message, code=code)
    if is_told:
        # With another code torchrun would start the ranks again; the launcher gives the code.
        return 0 if code == GUARD else code
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(WAIT_SECONDS)
    say_error(message)
    return code


def _end_at_once(message: str, is_cut_off: bool) -> NoReturn:
    """End this process with a sentence, from any thread, while the main thread waits for other ranks."""
    if not tell(error=message, code=FAILURE, is_cut_off=is_cut_off):
        say_error(message)
    os._exit(FAILURE)


if __name__ == "__main__":
    outlast_reader()
    main()
