"""A worker process: loads the rule, then scores one sample after the other until its parent is gone.

    python -m megatron_rc.launch.rewards.worker <file number of its connection>

It reads requests from a connection of its own, so a rule may print what it likes. It ends when the connection does, and
on Linux also with the thread that started it, in the middle of a rule that hangs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import in_words, own_traceback
from megatron_rc.launch.rewards.messages import Setup, write_outcome
from megatron_rc.launch.rewards.outcome import outcome_of
from megatron_rc.launch.tasks import Rule

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def main(argv: list[str]) -> None:
    """Serve the connection with this file number."""
    connection: Connection[Any, Any] = Connection(int(argv[1]))
    setup: Setup = pickle.loads(connection.recv_bytes())
    _prepare(setup)
    worker = os.getpid()
    faulthandler.dump_traceback_later(setup.load_timeout, file=setup.stacks)
    try:
        rule, problem = setup.source.load(), ""
    except ConfigurationError as error:
        problem = str(error)
    except BaseException as error:  # a library can raise any error; the parent says it
        problem = f"{own_traceback(error)}\n{setup.source.name} cannot be loaded, it raises {in_words(error)}"
    faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(problem.encode(errors="replace"))
    while not problem:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        faulthandler.dump_traceback_later(setup.timeout, file=setup.stacks)
        outcome = outcome_of(partial(_score, rule, request))
        if os.getpid() != worker:  # this is a process that the rule forked
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(write_outcome(outcome))


def _score(rule: Rule, request: bytes) -> Any:
    return rule(**pickle.loads(request))


def _prepare(setup: Setup) -> None:
    """Set up this process: it ends with its parent, is the first to go when memory runs out, and ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        with suppress(OSError):  # some containers do not let it
            Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != setup.parent:
        sys.exit(1)
    faulthandler.enable(file=setup.stacks)


if __name__ == "__main__":
    main(sys.argv)
