"""The trainer that torchrun starts: ``torchrun --nproc-per-node N launch/train_ppo.py <flags>``."""

from __future__ import annotations

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

from megatron_rc.launch.ending import ATTEMPT, GUARD, end_forks_with_this_process, tell_ending, tell_start
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.heartbeats import Heartbeats, Missed
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.standard_error import VisibleFormatter, outlast_reader, say_error
from megatron_rc.launch.stopping import leaves_by_sigterm
from megatron_rc.launch.tasks import Task

USAGE_ERROR, FAILURE = 2, 1
# Work on the ranks; True if nothing is lost: all steps are made, or a checkpoint holds the steps made.
Run = Callable[[RunConfig, Task], bool]
WAIT_SECONDS = 60


def main(argv: Sequence[str] | None = None, run: Run | None = None) -> None:
    """Check the flags, then train, or do something else on the ranks.

    Ends the process with 2 for flags that cannot work, 1 for a failed run, 3 for one that a guard ended.
    """
    rank = int(os.environ.get("RANK", "0"))
    lines = logging.StreamHandler()
    lines.setFormatter(VisibleFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING if rank == 0 else logging.ERROR, handlers=[lines])
    tell_start()
    config, task = _configure(sys.argv[1:] if argv is None else argv)
    ignore_megatron_warnings()
    with cpu_backend() if config.launch.on_cpu else contextlib.nullcontext():
        # Megatron-Core imports Weights & Biases for half a second and does not use it here.
        with hidden("wandb"):
            from megatron_rc.launch.training.loop import train

        _collect_garbage_again()
        _say_restart(rank)
        end_forks_with_this_process()
        _run_on_rank(run or train, config, task)


def _configure(words: Sequence[str]) -> tuple[RunConfig, Task]:
    """Make the settings; flags that cannot work end this process."""
    try:
        if "RANK" not in os.environ:
            raise ConfigurationError(
                "start this with torchrun, or use `python -m megatron_rc.launch --nproc-per-node N`"
            )
        return configure(words, int(os.environ["WORLD_SIZE"]))
    except ConfigurationError as error:
        end_together(str(error), USAGE_ERROR)


def _run_on_rank(run: Run, config: RunConfig, task: Task) -> None:
    """Run on this rank of the group of all ranks, and tell the launcher how it ends."""
    from megatron_rc.launch.distributed import AgreedError, initialize, shut_down

    heartbeats = Heartbeats(60 * config.launch.distributed_timeout_minutes, _end_at_once)
    try:
        initialize(config, heartbeats)
        tell_ending(kept=_outcome_of(run, config, task))
        heartbeats.close()
        shut_down()
    except (AgreedError, ValueError) as error:
        heartbeats.close()
        end_together(str(error), getattr(error, "code", FAILURE))
    except Exception as error:
        missed = heartbeats.who_is_missed(error)
        if missed is not None:
            end_together(missed.words, FAILURE, missed.rank, missed.last_seen)
        heartbeats.close(failed=True)
        tell_ending(error=f"rank {heartbeats.rank}: {type(error).__name__}: {error}", code=FAILURE)
        raise


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
    lacks_triton = any(found.version.startswith("0.16.") for found in distributions(name="megatron-core"))
    with hidden("transformer_engine", "apex", *["triton"] * lacks_triton):
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


def _say_restart(rank: int) -> None:
    attempt = int(os.environ.get(ATTEMPT, "0"))
    if rank == 0 and attempt:
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", attempt)
        sys.stderr.write(f"a rank failed: all are started again (restart {attempt} of {most})\n")


def end_together(message: str, code: int, lost: int | None = None, lost_in: str = "") -> NoReturn:
    """End this rank with an error that all ranks have, or all except the one that is lost.

    The first rank of each machine says the error and ends; the others wait until torchrun ends them, so that the
    message is not lost. A rank that torchrun leaves alone was the only one with the error, and says it after the wait.
    Nobody waits for a lost rank. Under the launcher no rank says the error: the launcher does.
    """
    is_told = tell_ending(error=message, code=code, lost=lost, lost_in=lost_in)
    if is_told and code == GUARD:
        # With another code torchrun would start the ranks again; the launcher gives the code.
        sys.exit(0)
    is_first = lost is not None or os.environ.get("LOCAL_RANK", "0") == "0"
    if not (is_first or leaves_by_sigterm()):
        time.sleep(WAIT_SECONDS)
    if not is_told and (is_first or code != USAGE_ERROR):
        say_error(message)
    sys.exit(code)


def _end_at_once(missed: Missed) -> NoReturn:
    """End this process from a thread, while the main thread waits for a missing rank."""
    if not tell_ending(error=missed.words, code=FAILURE, lost=missed.rank, lost_in=missed.last_seen):
        say_error(missed.words)
    os._exit(FAILURE)


if __name__ == "__main__":
    outlast_reader()
    main()
