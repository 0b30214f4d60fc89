"""Flags of ``python -m megatron_rc.launch`` itself: dry run, help, and torchrun's flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.flags.parser import Parser

# Flags that torchrun gets as they were typed.
_HANDED_ON = (
    *("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr", "role", "monitor_interval"),
    *("log_dir", "redirects", "tee", "local_ranks_filter", "numa_binding", "shutdown_timeout"),
)
_OF_MEETINGS = ("--rdzv-", "--local-addr")
_ADDRESSES = ("node_rank", "master_addr", "master_port")
_STATIC = "static"
# No cluster has more, and a table of this many ranks takes seconds.
_MOST_PROCESSES = 2**18


@dataclass(frozen=True)
class Machines:
    """Numbers of machines and processes that torchrun starts."""

    processes: int  # processes on each machine
    fewest: int  # machines with which the run starts
    most: int  # machines that may take part; equal to ``fewest`` unless machines come and go

    def world_sizes(self) -> list[int]:
        """Total numbers of processes, with the fewest and with the most machines."""
        return sorted({self.fewest * self.processes, self.most * self.processes})


def torchrun_parser() -> argparse.ArgumentParser:
    """Build the parser of these flags, without the trainer's."""
    from torch.distributed.run import get_args_parser

    parser = Parser(prog="python -m megatron_rc.launch", allow_abbrev=False, add_help=False)
    parser.listing = "--help-all"
    group = parser.add_argument_group("torchrun")
    group.add_argument("-h", "--help", action="store_true", help="show the flags that a new user needs")
    group.add_argument("--help-all", action="store_true", help="show torchrun's and the trainer's flags, by group")
    text = "check the flags, print all of them as a launch file, and start nothing"
    group.add_argument("--print-config", action="store_true", help=text)
    text = "check the flags, print memory, batches and collectives of each rank, and start nothing; needs no GPU"
    group.add_argument("--dry-run", action="store_true", help=text)
    group.add_argument("--json", action="store_true", help="print the dry run as one JSON object; needs --dry-run")
    text = "memory of a device in GiB: a dry run ends with 2 if a rank needs more; needs --dry-run"
    group.add_argument("--device-memory-gib", type=float, metavar="GIB", help=text)
    text = "processes on this machine: a number, auto (one a GPU, or one a core without GPUs), gpu or cpu; default: 1"
    group.add_argument("--nproc-per-node", "--nproc_per_node", default="1", metavar="N", help=text)
    text = "times that all ranks start again from the newest checkpoint after one has failed; default: 0"
    group.add_argument("--max-restarts", "--max_restarts", type=int, default=0, metavar="N", help=text)
    text = "number of machines, or FEWEST:MOST if machines come and go; default: 1"
    group.add_argument("--nnodes", default="1", metavar="N", help=text)
    group.add_argument("--node-rank", "--node_rank", type=int, metavar="N", help="number of this machine; default: 0")
    group.add_argument("--master-addr", "--master_addr", help="address of machine 0; default: 127.0.0.1")
    text = "free port of machine 0; default: 29500"
    group.add_argument("--master-port", "--master_port", type=int, metavar="N", help=text)
    for theirs in get_args_parser()._actions:
        if theirs.dest in _HANDED_ON:
            names = [text for text in theirs.option_strings if text.startswith("--")]
            text = " ".join((theirs.help or "").split()).replace("%", "%%")
            how: dict[str, Any] = {"nargs": 0} if theirs.nargs == 0 else {"metavar": "TEXT"}
            group.add_argument(*names, action=_HandOn, dest=theirs.dest, default=None, help=text, **how)
    parser.set_defaults(handed_on=[])
    return parser


def machines_of(mine: argparse.Namespace) -> Machines:
    """Read the numbers of processes and machines, and check them."""
    machines = Machines(_processes(mine.nproc_per_node), *_range(mine.nnodes))
    if machines.processes * machines.most > _MOST_PROCESSES:
        raise ConfigurationError(
            f"--nproc-per-node {mine.nproc_per_node} · --nnodes {mine.nnodes} must be at most {_MOST_PROCESSES}"
        )
    memory = mine.device_memory_gib
    for name, given in (("--json", mine.json), (f"--device-memory-gib {memory}", memory is not None)):
        if given and not mine.dry_run:
            raise ConfigurationError(f"{name} does nothing without --dry-run: give both, or neither")
    if mine.dry_run and mine.print_config:
        raise ConfigurationError("--dry-run and --print-config both start nothing: give one of them")
    if memory is not None and not 0 < memory < float("inf"):
        raise ConfigurationError(f"--device-memory-gib {memory} must be positive")
    if mine.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts {mine.max_restarts} must be 0 or more")
    _check_meeting(mine, machines, _check_handed_on(mine.handed_on))
    return machines


def words_for_torchrun(mine: argparse.Namespace, machines: Machines) -> list[str]:
    """Arguments of torchrun, without the program that it starts."""
    words = ["--nproc-per-node", str(machines.processes)]
    if mine.max_restarts:
        words += ["--max-restarts", str(mine.max_restarts)]
    names = [word.partition("=")[0] for word in mine.handed_on]
    if machines.most == 1:
        return [*words, *["--standalone"] * ("--standalone" not in names), *mine.handed_on]
    words += ["--nnodes", mine.nnodes]
    if not _is_elastic(mine.handed_on):
        words += ["--node-rank", str(mine.node_rank or 0)]
        if "--rdzv-endpoint" not in names:
            address, port = mine.master_addr or "127.0.0.1", mine.master_port or 29500
            words += ["--master-addr", address, "--master-port", str(port)]
    return [*words, *mine.handed_on]


class _HandOn(argparse.Action):
    """Action that keeps a flag of torchrun's, with its value, as a word."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Keep the word."""
        name = flag(self.dest)
        namespace.handed_on = [*namespace.handed_on, name if self.nargs == 0 else f"{name}={values}"]


def _processes(text: str) -> int:
    from torch.distributed.run import determine_local_world_size

    try:
        found = int(determine_local_world_size(text))
    except ValueError as error:
        raise ConfigurationError(
            f"--nproc-per-node {text} must be a number, auto, cpu or gpu, and this machine must have it ({error})"
        ) from error
    if found < 1:
        raise ConfigurationError(f"--nproc-per-node {text} must be positive")
    return found


def _range(text: str) -> tuple[int, int]:
    from torch.distributed.run import parse_min_max_nnodes

    try:
        fewest, most = parse_min_max_nnodes(text)
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(f"--nnodes {text} must be a number or FEWEST:MOST, as in 1:4") from error
    if fewest < 1:
        raise ConfigurationError(f"--nnodes {text} must be positive")
    if fewest > most:
        raise ConfigurationError(f"--nnodes {text} must have the smaller number first: give {most}:{fewest}")
    return fewest, most


def _check_handed_on(words: Sequence[str]) -> argparse.Namespace:
    """Let torchrun read these words."""
    from torch.distributed.run import config_from_args, get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigurationError(f"torchrun refuses its {message}")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    theirs = parser.parse_args([*words, "module"])
    # Without a name here torchrun would make a folder, which only a run does.
    checked = argparse.Namespace(**{**vars(theirs), "log_dir": os.devnull})
    try:
        config_from_args(checked)
    except (ValueError, AssertionError) as error:
        refuse(f"arguments {' '.join(words)}: {error}")
    if theirs.redirects != "0" and not theirs.log_dir:
        raise ConfigurationError(f"--redirects {theirs.redirects} needs --log-dir DIR for the ranks' output")
    return theirs


def _is_elastic(words: Sequence[str]) -> bool:
    """Whether a store numbers the machines, instead of ``--node-rank``."""
    backends = [word.partition("=")[2] for word in words if word.startswith("--rdzv-backend=")]
    return backends not in ([], [_STATIC])


def _check_meeting(mine: argparse.Namespace, machines: Machines, theirs: argparse.Namespace) -> None:
    """Raise ConfigurationError unless the flags say in exactly one way how the machines find each other."""
    elastic, many = _is_elastic(mine.handed_on), machines.most > 1
    if theirs.standalone and many:
        raise ConfigurationError("--standalone is for one machine: drop it or --nnodes")
    typed = [word.replace("=", " ", 1) for word in mine.handed_on if word.startswith(_OF_MEETINGS)]
    addresses = [f"{flag(name)} {getattr(mine, name)}" for name in _ADDRESSES if getattr(mine, name) is not None]
    if not many and (typed or addresses):
        raise ConfigurationError(f"{(typed + addresses)[0]} does nothing without --nnodes above 1: drop it")
    if elastic and not theirs.rdzv_endpoint:
        words = "needs --rdzv-endpoint HOST:PORT, the same on all machines"
        raise ConfigurationError(f"--rdzv-backend {theirs.rdzv_backend} {words}")
    if machines.fewest < machines.most and not elastic:
        raise ConfigurationError(
            f"--nnodes {mine.nnodes} needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, at which machines meet"
        )
    if elastic and addresses:
        raise ConfigurationError(f"{addresses[0]} does nothing with --rdzv-backend {theirs.rdzv_backend}: drop it")
    of_endpoint = [words for words in addresses if not words.startswith("--node-rank")]
    if theirs.rdzv_endpoint and of_endpoint:
        raise ConfigurationError(f"{of_endpoint[0]} does nothing with --rdzv-endpoint {theirs.rdzv_endpoint}: drop one")
    if not 0 <= (mine.node_rank or 0) < machines.most:
        raise ConfigurationError(
            f"--node-rank {mine.node_rank} must be one of 0 to {machines.most - 1}, with --nnodes {mine.nnodes}"
        )
