"""The launcher in a process forked from the server of the ranks' pool, and its ranks forked from it.

torchrun's agent, its store, the ranks' processes and their ends are real. The forks only spare the import of torch,
Megatron and transformers in each process, which takes most of a small run's seconds.
"""

import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from megatron_rc.launch.__main__ import TRAINER, main
from tests.support.ranks import server_context


class ForkedCall:
    """A call in a process and a session of its own, with the parts of :class:`subprocess.Popen` that tests use.

    Its output is in ``folder``. Its exit code is the function's result, or its argument of ``sys.exit``.
    """

    def __init__(self, folder, function, *args):
        self._written = [Path(folder, name) for name in ("output", "errors")]
        self._process = server_context().Process(target=_call, args=(self._written, dict(os.environ), function, args))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked call", timeout)
        return tuple(path.read_text() for path in self._written)


def _call(written, environment, function, args):
    os.setsid()
    for number, path in enumerate(written, start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(environment | {"OMP_NUM_THREADS": "1"})
    with mock.patch.object(subprocess_handler, "Popen", Forked):
        sys.exit(function(*args))


def launch_forked(folder, arguments, module=TRAINER):
    """``python -m megatron_rc.launch`` with these words, running."""
    return ForkedCall(folder, main, arguments, module)


class Forked(subprocess.Popen):
    """A process that runs the module of ``python -u -m <module> <words>`` in a fork of this one."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_):
        self.pid = os.fork()
        self._child_created = True
        if not self.pid:
            code = 1
            try:
                code = _run(args[args.index("-m") + 1 :], env)
            finally:  # the fork must never go on as a second agent
                os._exit(code)


def _run(arguments, env):
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(env)
    logging.getLogger().handlers.clear()
    logging.getLogger("megatron_rc").setLevel(logging.NOTSET)
    sys.argv = ["", *arguments[1:]]
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
