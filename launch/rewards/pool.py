"""Worker processes that score samples within a time limit; a worker that hangs or dies is replaced.

Pools of the multiprocessing family (pebble, loky) would import the trainer's main module, and so torch, in every
worker. They would also leave hanging workers behind when the trainer is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Pipe
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import in_words
from megatron_rc.launch.rewards.outcome import MAX_TRACEBACK, Outcome
from megatron_rc.launch.rewards.rules import Setup, Source

LOAD_SECONDS = 120.0
# A worker writes down its stack after the time limit; it gets so long for that.
_GRACE_SECONDS = 0.5
_MAX_ANSWER = 1 << 20
_MODULE = "megatron_rc.launch.rewards.worker"


class RewardPool:
    """Processes that score samples by a rule, each within ``timeout`` seconds.

    They start at once and load the rule in the background.
    """

    def __init__(self, source: Source, workers: int, timeout: float) -> None:
        self._workers = [_Worker(source, timeout) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._has_loaded = False
        # Threads only wait. They live as long as the pool, because a worker ends with the thread that started it.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rewards")

    def score(self, requests: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Return one outcome for each request, in order; a request holds the keywords of the rule."""
        if not self._has_loaded:
            for worker in self._workers:
                worker.make_ready()
            self._has_loaded = True
        return list(self._threads.map(self._score, requests))

    def close(self) -> None:
        """End all workers at once, and the processes that their rules started, except in sessions of their own."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def _score(self, request: Mapping[str, Any]) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.ask(request)
        finally:
            self._idle.put(worker)


def check_loads(source: Source, load_timeout: float = LOAD_SECONDS) -> None:
    """Load the rule in a process of its own, since loading may hang or crash; ConfigurationError if it fails."""
    worker = _Worker(source, load_timeout, load_timeout)
    try:
        worker.make_ready()
    finally:
        worker.close()


class _Worker:
    """One process at a time; after its end the next sample starts another."""

    def __init__(self, source: Source, timeout: float, load_timeout: float = LOAD_SECONDS) -> None:
        self.source = source
        self.timeout = timeout
        self.load_timeout = load_timeout
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_loaded = False
        self._has_ended = True
        with suppress(OSError):  # the error comes again when a sample needs the process
            self._start()

    def ask(self, request: Mapping[str, Any]) -> Outcome:
        """Score one sample."""
        try:
            message = pickle.dumps(request)
        except Exception as error:  # a task's label can be any object
            return Outcome(failure=f"gets a label or record that no process can be sent: {in_words(error)}")
        try:
            self.make_ready()
            self._connection.send_bytes(message)
            if self._connection.poll(self.timeout + _GRACE_SECONDS):
                return Outcome(**json.loads(self._connection.recv_bytes(_MAX_ANSWER)))
            _, stacks = self._end()
            return Outcome(failure=f"took longer than --reward-timeout {self.timeout:g} s", traceback=stacks)
        except ConfigurationError as problem:
            *traceback, sentence = str(problem).splitlines()
            return Outcome(failure=f"was not scored: {sentence}", traceback="\n".join(traceback))
        except (EOFError, OSError):
            how, stacks = self._end()
            return Outcome(failure=how, traceback=stacks)

    def make_ready(self) -> None:
        """Start a process if there is none, and wait until its rule is loaded; ConfigurationError if that fails."""
        if self._is_loaded and not self._has_ended:
            return
        try:
            if self._has_ended:
                self._start()
        except OSError as error:
            raise ConfigurationError(f"{self.source.name} has no process to run in: {error}") from error
        try:
            if not self._connection.poll(self.load_timeout + _GRACE_SECONDS):
                _, stacks = self._end()
                raise ConfigurationError(f"{stacks}\n{self.source.name} is not loaded after {self.load_timeout:g} s")
            problem = self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            how, stacks = self._end()
            raise ConfigurationError(f"{stacks}\n{self.source.name} {how} while it was loaded".lstrip()) from None
        if problem:
            self._end()
            raise ConfigurationError(problem)
        self._is_loaded = True

    def close(self) -> None:
        """End the process; no other one is started."""
        with self._lock:
            self._is_closed = True
        self._end()

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise OSError("the run is over")
            with ExitStack() as unused:
                connection, theirs = Pipe()
                unused.enter_context(connection)
                stacks = unused.enter_context(tempfile.TemporaryFile())
                with theirs:
                    self._process = _start_process(theirs.fileno(), stacks.fileno())
                unused.pop_all()
            self._connection = connection
            self._stacks = stacks
            self._is_loaded = self._has_ended = False
        setup = Setup(self.source, self.timeout, self.load_timeout, os.getpid(), self._stacks.fileno())
        self._connection.send_bytes(pickle.dumps(setup))

    def _end(self) -> tuple[str, str]:
        """End the process; return how it ended, and the stack that it wrote."""
        with self._lock:
            if self._has_ended:
                return "was ended with the run", ""
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
            self._connection.close()
            with self._stacks as file:
                file.seek(0)
                stacks = file.read(MAX_TRACEBACK).decode(errors="replace").strip()
            self._has_ended = True
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"ended its process with {how}", stacks


def _start_process(connection: int, stacks: int) -> subprocess.Popen[bytes]:
    """Start a worker with these two open files, and the trainer's module path.

    It has a session of its own: Ctrl-C does not reach it, and its group has all processes that the rule starts.
    """
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(connection)],
        stdin=subprocess.DEVNULL,
        pass_fds=(connection, stacks),
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
