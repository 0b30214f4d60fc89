"""Ranks under torchrun, in this process; their end becomes one exit code and the last line of the output."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_rc.launch.ending import FOLDER, Message, messages, messages_of_ranks, signal_of_launcher
from megatron_rc.launch.errors import ConfigurationError, one_line
from megatron_rc.launch.lost_ranks import tell_other_machines
from megatron_rc.launch.standard_error import visible
from megatron_rc.launch.stopping import SAVE_AND_END, signals_to_ranks

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAILURE = 1
# While a cluster starts, a name may appear a little later than the machines that ask for it.
LOOKUP_SECONDS = 6.0
_AGAIN_SECONDS = 0.5
# Signals with a cause of their own. SIGTERM has none: torchrun sends it after another rank's failure.
_CAUSES: dict[int, str] = {
    signal.SIGKILL: "by hand, or by the system when memory ran out",
    signal.SIGSEGV: "a fault in compiled code",
    signal.SIGBUS: "a fault in compiled code, or no room left in /dev/shm",
    signal.SIGILL: "compiled code that this processor cannot run",
    signal.SIGFPE: "a fault in compiled code",
}
_NOT_KEPT = "no checkpoint was written: with --save DIR the run could go on from where it stopped"
# Seconds after the first failure; a later SIGKILL is torchrun's own.
_KILLED_BY_TORCHRUN = 15
# Seconds for torchrun to end by itself after a rank has seen that the machine of rank 0 is cut off.
_CUT_OFF_SECONDS = 10


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit code, and the last line after a failure."""

    code: int
    words: str = ""


def run_ranks(words: Sequence[str]) -> Outcome:
    """Run torchrun with these arguments until all ranks of this machine have ended.

    Args:
        words: torchrun's own, the module, and the module's.

    Raises:
        ConfigurationError: several machines cannot find each other by these names.
    """
    args = _torchruns_arguments(words)
    with messages(), _temporary_folder() as folder:
        # Without one torchrun leaves a folder behind at every start.
        args.log_dir = args.log_dir or str(folder / "logs")
        return _outcome(args)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Make a folder for files of the launcher and its ranks, whose path is in the environment; remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="megatron-rc-", ignore_cleanup_errors=True) as name:
        os.environ[FOLDER] = name
        try:
            yield Path(name)
        finally:
            del os.environ[FOLDER]


def _torchruns_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read torchrun's arguments; silence its log, and leave signals and names to the launcher."""
    from torch.distributed import run as torchrun

    from megatron_rc.launch.loopback import meet_on_loopback

    # The launcher says torchrun's messages about an end in fewer words.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.propagate = False
    elastic.addHandler(logging.NullHandler())
    # The launcher takes the signals that end a run, because torchrun would kill ranks that are still saving.
    args: argparse.Namespace = torchrun.parse_args(["--signals-to-handle=SIGQUIT", *words])
    if args.standalone:
        meet_on_loopback(args)
    else:
        _check_names(args)
    return args


def _outcome(args: argparse.Namespace) -> Outcome:
    """Run torchrun, and read what the ranks told about their ends."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    num_ranks = int(args.nproc_per_node)
    has_other_machines = int(args.nnodes.rpartition(":")[2]) > 1
    if has_other_machines:
        threading.Thread(target=_leave_when_cut_off, name="cut-off machine", daemon=True).start()

    def outcome_without_ranks(number: signal.Signals) -> Outcome:
        told = messages_of_ranks()
        if has_other_machines and not told:
            return Outcome(128 + number, f"stopped by {number.name} before the machines of this run came together")
        return ended(told, num_ranks, number)

    try:
        with signals_to_ranks(lambda number: _leave(outcome_without_ranks(number))):
            torchrun.run(args)
        return ended(messages_of_ranks(), num_ranks, _signal_that_came())
    except SignalException as stop:
        return outcome_without_ranks(stop.sigval)
    except ChildFailedError as error:
        outcome = failed(error.failures, messages_of_ranks(), num_ranks, _signal_that_came())
        if has_other_machines and outcome.code:
            tell_other_machines(f"a rank of the machine {socket.gethostname()} failed: see what its launcher says")
        return outcome
    except (RendezvousError, RuntimeError, OSError) as error:
        told = _first_error(messages_of_ranks())
        if told is not None:
            return Outcome(told.code, f"error: {told.error}")
        reason = one_line(error, most=10_000)
        return Outcome(FAILURE, f"error: the machines of this run did not come together ({reason})")


def _leave_when_cut_off() -> None:
    """End this process if the machine of rank 0 is cut off: torchrun may wait in its store for ever."""
    is_cut_off = False
    while True:
        time.sleep(_CUT_OFF_SECONDS)
        was_cut_off = is_cut_off
        told = _first_error(messages_of_ranks())
        is_cut_off = told is not None and told.is_cut_off
        # The second time torchrun had its seconds to end, or to start the ranks again.
        if told is not None and is_cut_off and was_cut_off:
            _leave(Outcome(FAILURE, f"error: {told.error}"))


def _leave(outcome: Outcome) -> NoReturn:
    """End this process with an outcome while its main thread waits in compiled code."""
    if outcome.words:
        sys.stderr.write(f"{visible(outcome.words)}\n")
        sys.stderr.flush()
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    os._exit(outcome.code)


def _check_names(args: argparse.Namespace) -> None:
    """Refuse names of machines that have no address."""
    import torch
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    host = args.master_addr
    user = f"--master-addr {host}"
    if args.rdzv_endpoint:
        host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)
        user = f"--rdzv-endpoint {args.rdzv_endpoint}"
    _check_resolves(host, user, "give its address, or enter the name in DNS or /etc/hosts")
    by_name = not torch.cuda.is_available() and "GLOO_SOCKET_IFNAME" not in os.environ
    if by_name or args.rdzv_backend != "static":
        _check_resolves(socket.gethostname(), "this machine", "enter the name in DNS or /etc/hosts")


def _check_resolves(host: str, user: str, remedy: str) -> None:
    """Refuse a machine's name without an address: torch would look it up for minutes, and ignore Ctrl-C meanwhile.

    The message has ``user``, the flag with the name, and ``remedy``.
    """
    has_address = threading.Event()

    def look_up() -> None:
        until = time.monotonic() + LOOKUP_SECONDS
        while not has_address.is_set() and time.monotonic() < until:
            with suppress(OSError, UnicodeError):
                socket.getaddrinfo(host, None)
                has_address.set()
            time.sleep(_AGAIN_SECONDS)

    # In a thread: without an answer from the name server, getaddrinfo alone blocks for longer than LOOKUP_SECONDS.
    threading.Thread(target=look_up, daemon=True).start()
    if not has_address.wait(LOOKUP_SECONDS):
        raise ConfigurationError(
            f"{user}: the name {host} has no address, looked up for {LOOKUP_SECONDS:.0f} s: {remedy}"
        )


def _signal_that_came() -> signal.Signals | None:
    """The signal that the launcher passed on to the ranks, if any."""
    name = signal_of_launcher()
    return None if name is None else signal.Signals[name]


def _first_error(told: Sequence[Message]) -> Message | None:
    """The first message about an error, if there is one."""
    return next((message for message in told if message.error is not None), None)


def ended(told: Sequence[Message], num_ranks: int, sent: signal.Signals | None = None) -> Outcome:
    """Return the outcome of ranks that all ended with 0, or that a signal ended: 0 if nothing is lost.

    Args:
        told: messages of the ranks.
        num_ranks: number of ranks on this machine.
        sent: signal that the launcher got; without one a rank may have had a signal.
    """
    error = _first_error(told)
    if error is not None:  # as a guard's
        return Outcome(error.code, f"error: {error.error}")
    has_ended = {message.rank: message.is_kept for message in told if message.has_ended}
    missing = num_ranks - len(has_ended)
    if missing and sent is not None:
        return _stopped_unsaved(sent)
    if missing:
        how = f"{missing} of {num_ranks} ranks ended with exit code 0 before the run did"
        return Outcome(FAILURE, f"error: {how}: look for what calls os._exit() in your own modules")
    if all(has_ended.values()):
        return Outcome(0)
    if sent is None:
        return Outcome(FAILURE, f"error: a rank was told to stop, and {_NOT_KEPT}")
    return Outcome(128 + sent, f"stopped by {sent.name}, and {_NOT_KEPT}")


def failed(
    failures: dict[int, ProcessFailure], told: Sequence[Message], num_ranks: int, sent: signal.Signals | None = None
) -> Outcome:
    """Return the outcome of a run of which a rank failed: the sentence about the first one.

    A failure after the last save costs nothing, so its outcome is 0 with a line. Arguments: see :func:`ended`.
    """
    ranks_without_loss = {message.rank for message in told if message.is_kept}
    outcome = _first_failure(failures, told)
    if len(ranks_without_loss) == num_ranks:
        return Outcome(0, f"the run is over and nothing is lost; afterwards {outcome.words.removeprefix('error: ')}")
    # The launcher's signal ends ranks that are still starting; others may tell that they lost a connection.
    if sent is not None and any(-failure.exitcode == SAVE_AND_END for failure in failures.values()):
        return _stopped_unsaved(sent)
    return outcome


def _stopped_unsaved(sent: signal.Signals) -> Outcome:
    """The outcome of a run of which a signal ended ranks before they could save."""
    return Outcome(128 + sent, f"stopped by {sent.name} before all ranks could save: what no checkpoint holds is lost")


def _first_failure(failures: dict[int, ProcessFailure], told: Sequence[Message]) -> Outcome:
    """Return the sentence about the rank that failed first, with its exit code."""
    has_told = {message.rank for message in told if message.error is not None}
    begun = min(failure.timestamp for failure in failures.values())
    for rank, failure in failures.items():
        cause = _CAUSES.get(-failure.exitcode)
        if cause and rank not in has_told and failure.timestamp < begun + _KILLED_BY_TORCHRUN:
            how = f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}: {cause}"
            return Outcome(FAILURE, f"error: {how}")
    for rank, failure in failures.items():
        # Ranks that only see the connections to such a rank break tell that.
        if failure.exitcode > 0 and rank not in has_told:
            how = f"with exit code {failure.exitcode}"
            return Outcome(FAILURE, f"error: rank {rank} (process {failure.pid}) ended {how}: see above what it said")
    error = _first_error(told)
    if error is not None:
        return Outcome(error.code, f"error: {error.error}")
    rank, failure = next(iter(failures.items()))
    how = f"by {failure.signal_name()}"
    return Outcome(FAILURE, f"error: rank {rank} (process {failure.pid}) ended {how}: see above what it said")
