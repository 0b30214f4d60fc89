"""``python -m tests.support.forked``: the launcher, whose ranks are forked with all that they load already there.

torchrun's agent, its store, the ranks' processes and their ends are the real ones. What is spared is an interpreter
that imports torch, Megatron and transformers for each rank of each start: most of the seconds of a small run.
"""

import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from unittest import mock

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from megatron_rc.launch.__main__ import TRAINER, main
from megatron_rc.launch.training.cpu import without_compiler

LOADED = ("training.loop", "engines.transformers_engine")


class Forked(subprocess.Popen):
    """A process that runs the module of ``python -u -m <module> <words>`` in a fork of this one."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_):
        self.pid = os.fork()
        self._child_created = True
        if not self.pid:
            code = 1
            try:
                code = _run(args[args.index("-m") + 1 :], env)
            finally:  # whatever happens, the fork never goes on as a second agent
                os._exit(code)


def _run(words, env):
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    logging.getLogger().handlers.clear()
    logging.getLogger("megatron_rc").setLevel(logging.NOTSET)
    sys.argv = ["", *words[1:]]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    with without_compiler():
        for name in LOADED:
            importlib.import_module(f"megatron_rc.launch.{name}")
        importlib.import_module("transformers.models.llama.modeling_llama")
    given = sys.argv[1:]
    module = given.pop(0) if given[0].startswith("tests.") else TRAINER
    with mock.patch.object(subprocess_handler, "Popen", Forked):
        main(given, module)
