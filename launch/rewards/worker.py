"""A worker process that loads the rule, and then scores one sample after the other until its parent is gone.

    python -m megatron_rc.launch.rewards.worker <file number of its connection>

It reads requests from a connection of its own, so a rule may print anything. It ends when the connection ends, and on
Linux also with the thread that started it, even if a rule hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_rc.launch.ending import end_with_parent
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import in_words, own_traceback
from megatron_rc.launch.rewards.outcome import outcome_of
from megatron_rc.launch.rewards.rules import Setup
from megatron_rc.launch.tasks import Rule


def main(argv: list[str]) -> None:
    """Serve the connection with this file number."""
    connection: Connection[Any, Any] = Connection(int(argv[1]))
    setup: Setup = pickle.loads(connection.recv_bytes())
    _prepare(setup)
    worker = os.getpid()
    faulthandler.dump_traceback_later(setup.load_timeout, file=setup.stacks)
    try:
        rule = setup.source.load()
        problem = ""
    except ConfigurationError as error:
        problem = str(error)
    except BaseException as error:  # a library can raise any error; the parent says it
        problem = f"{own_traceback(error)}\n{setup.source.name} cannot be loaded, it raises {in_words(error)}"
    faulthandler.cancel_dump_traceback_later()
    # An empty message: the rule is loaded.
    connection.send_bytes(problem.encode(errors="replace"))
    if problem:
        return
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        faulthandler.dump_traceback_later(setup.timeout, file=setup.stacks)
        outcome = outcome_of(partial(_score, rule, request), setup.source.read)
        if os.getpid() != worker:
            # The rule forked, and its child came back here: it must not answer.
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        # Plain JSON, so that no object of the user's code comes into the trainer.
        connection.send_bytes(json.dumps(asdict(outcome)).encode())


def _score(rule: Rule, request: bytes) -> Any:
    return rule(**pickle.loads(request))


def _prepare(setup: Setup) -> None:
    """Let this process end with its parent, be killed first when memory runs out, and ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(setup.parent)
    with suppress(OSError):  # not Linux, or a container that forbids it
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable(file=setup.stacks)


if __name__ == "__main__":
    main(sys.argv)
