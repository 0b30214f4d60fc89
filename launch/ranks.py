"""Ranks under torchrun, in this process; their end becomes one exit code and the last line of the output."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rc.launch.ending import FOLDER, Ending, end_what_scores, mark_of_scores, read_endings
from megatron_rc.launch.errors import ConfigurationError, one_line
from megatron_rc.launch.heartbeats import tell_other_machines
from megatron_rc.launch.own_folders import own_folder
from megatron_rc.launch.stopping import first_signal

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
    with own_folder(tempfile.gettempdir(), "megatron-rc-endings-") as folder:
        os.environ[FOLDER] = str(folder)
        # Without one torchrun leaves a folder behind at every start.
        args.log_dir = args.log_dir or str(folder / "logs")
        try:
            return _outcome(args, folder)
        finally:
            end_what_scores(mark_of_scores())
            del os.environ[FOLDER]


def _torchruns_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read torchrun's arguments; silence its log, and leave signals and names to the launcher."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.agent.server import api as agent

    from megatron_rc.launch.loopback import meet_on_loopback

    # The agent would look up this machine's name at each rank's start and end, for a log.
    agent._get_fq_hostname = socket.gethostname
    # The launcher says torchrun's messages about an end in fewer words.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.propagate = False
    elastic.addHandler(logging.NullHandler())
    args: argparse.Namespace = torchrun.parse_args(list(words))
    # Torchrun would take up each signal, also while the ranks save.
    args.signals_to_handle = "SIGQUIT"
    if args.standalone:
        meet_on_loopback(args)
    else:
        _check_names(args)
    return args


def _outcome(args: argparse.Namespace, folder: Path) -> Outcome:
    """Run torchrun, and read the ranks' endings in the folder."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        with first_signal():
            torchrun.run(args)
        return ended(read_endings(folder), int(args.nproc_per_node))
    except SignalException as stop:
        return ended(read_endings(folder), int(args.nproc_per_node), stop.sigval)
    except ChildFailedError as error:
        if int(args.nnodes.rpartition(":")[2]) > 1:
            tell_other_machines(folder, error.failures)
        return failed(error.failures, read_endings(folder))
    except (RendezvousError, RuntimeError, OSError) as error:
        reason = one_line(error, most=10_000)
        return Outcome(FAILURE, f"error: the machines of this run did not come together ({reason})")


def _check_names(args: argparse.Namespace) -> None:
    """Refuse names of machines that have no address."""
    import torch
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    remedy, host, flag = "give its address, or enter the name in DNS or /etc/hosts", args.master_addr, "--master-addr"
    if args.rdzv_endpoint:
        (host, _), flag = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0), "--rdzv-endpoint"
    _check_resolves(host, f"{flag} {args.rdzv_endpoint or host}", remedy)
    by_name = not torch.cuda.is_available() and "GLOO_SOCKET_IFNAME" not in os.environ
    if by_name or args.rdzv_backend != "static":
        _check_resolves(socket.gethostname(), "this machine", "enter the name in DNS or /etc/hosts")


def _check_resolves(host: str, user: str, remedy: str) -> None:
    """Refuse a machine's name without an address: torch would look it up for minutes, and ignore Ctrl-C meanwhile.

    The message has ``user``, the flag with the name, and ``remedy``.
    """
    found = threading.Event()

    def look_up() -> None:
        until = time.monotonic() + LOOKUP_SECONDS
        while not found.is_set() and time.monotonic() < until:
            with suppress(OSError, UnicodeError):
                socket.getaddrinfo(host, None)
                found.set()
            time.sleep(_AGAIN_SECONDS)

    threading.Thread(target=look_up, daemon=True).start()
    if not found.wait(LOOKUP_SECONDS):
        raise ConfigurationError(
            f"{user}: the name {host} has no address, looked up for {LOOKUP_SECONDS:.0f} s: {remedy}"
        )


def ended(endings: list[Ending], ranks: int, sent: signal.Signals | None = None) -> Outcome:
    """Return the outcome of ranks that all ended with 0, or that a signal ended: 0 if nothing is lost.

    ``sent`` is the signal to the launcher; without one a rank may have had a signal.
    """
    for ending in endings:
        if ending.error is not None:  # as a guard's
            return Outcome(ending.code, f"error: {ending.error}")
    missing = ranks - len(endings)
    if missing and sent is None:
        how = f"{missing} of {ranks} ranks ended with exit code 0 before the run did"
        return Outcome(FAILURE, f"error: {how}: look for what calls os._exit() in your own modules")
    code, how = (FAILURE, "error: a rank was told to stop") if sent is None else (128 + sent, f"stopped by {sent.name}")
    if missing:
        return Outcome(code, f"{how} before all ranks could save: what no checkpoint holds is lost")
    return Outcome(0) if all(ending.kept for ending in endings) else Outcome(code, f"{how}, and {_NOT_KEPT}")


def failed(failures: dict[int, ProcessFailure], endings: list[Ending]) -> Outcome:
    """Return the outcome of a failed run: the sentence of its first failed rank, or the signal that ended the rank."""
    begun = min(failure.timestamp for failure in failures.values())
    for rank, failure in failures.items():
        cause = _CAUSES.get(-failure.exitcode)
        if cause and failure.timestamp < begun + _KILLED_BY_TORCHRUN:
            where = next((f"; it was {ending.lost_in}" for ending in endings if ending.lost == rank), "")
            how = f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}: {cause}{where}"
            return Outcome(FAILURE, f"error: {how}")
    # torchrun lists failures in the order in which it saw them.
    rank, failure = next(iter(failures.items()))
    told = [ending for ending in endings if ending.error is not None]
    if told and (failure.exitcode < 0 or rank in [ending.rank for ending in told]):
        return Outcome(told[0].code, f"error: {told[0].error}")
    how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
    return Outcome(FAILURE, f"error: rank {rank} (process {failure.pid}) ended {how}: see above what it said")
