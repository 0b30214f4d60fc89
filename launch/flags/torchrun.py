"""Flags of ``python -m megatron_rc.launch`` itself: dry run, help, and torchrun's flags."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.flags.parser import Parser

# Flags that torchrun gets as they were typed.
_HANDED_ON = (
    "standalone rdzv_backend rdzv_endpoint rdzv_id rdzv_conf local_addr role monitor_interval log_dir redirects tee "
    "local_ranks_filter numa_binding shutdown_timeout node_rank master_addr master_port"
).split()
_OF_MEETINGS = ("--rdzv-", "--local-addr", "--node-rank", "--master-")


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
    group = parser.add_argument_group("torchrun")
    group.add_argument("-h", "--help", action="store_true", help="show the flags that a new user needs")
    group.add_argument("--help-all", action="store_true", help="show torchrun's and the trainer's flags, by group")
    text = "print all flags as a launch file: they are checked, and nothing is started"
    group.add_argument("--print-config", action="store_true", help=text)
    text = "check the flags and print the needs of each rank: memory, batches, places; starts nothing, needs no GPU"
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
    for action in get_args_parser()._actions:
        if action.dest in _HANDED_ON:
            names = [text for text in action.option_strings if text.startswith("--")]
            text = " ".join((action.help or "").split()).replace("%", "%%")
            how: dict[str, Any] = {"nargs": 0} if action.nargs == 0 else {"metavar": "TEXT"}
            group.add_argument(*names, action=_HandOn, dest=action.dest, default=None, help=text, **how)
    parser.set_defaults(handed_on=[])
    return parser


def machines_of(args: argparse.Namespace) -> Machines:
    """Read the numbers of processes and machines, and check them."""
    memory = args.device_memory_gib
    fewest, most = _numbers_of_machines(args.nnodes)
    if args.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts {args.max_restarts} must be 0 or more")
    torchrun_args = _read_by_torchrun(args)
    machines = Machines(_processes(args.nproc_per_node), fewest, most)
    for name, is_given in {"--json": args.json, "--device-memory-gib": memory is not None}.items():
        if is_given and not args.dry_run:
            raise ConfigurationError(f"{name} does nothing without --dry-run: give both, or neither")
    if args.dry_run and args.print_config:
        raise ConfigurationError("--dry-run and --print-config both start nothing: give one of them")
    if memory is not None and not 0 < memory < float("inf"):
        raise ConfigurationError(f"--device-memory-gib {memory} must be positive")
    _check_meeting(args, machines, torchrun_args)
    return machines


def words_for_torchrun(args: argparse.Namespace, machines: Machines) -> list[str]:
    """Arguments of torchrun, without the program that it starts."""
    arguments = ["--nproc-per-node", str(machines.processes)]
    if args.max_restarts:
        arguments += ["--max-restarts", str(args.max_restarts)]
    if machines.most > 1:
        arguments += ["--nnodes", args.nnodes]
    elif "--standalone" not in args.handed_on:
        arguments.append("--standalone")
    return [*arguments, *args.handed_on]


class _HandOn(argparse.Action):
    """Action that keeps a flag of torchrun's, with its value, as a word."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Keep the word."""
        name = flag(self.dest)
        namespace.handed_on = [*namespace.handed_on, name if self.nargs == 0 else f"{name}={values}"]


def _numbers_of_machines(text: str) -> tuple[int, int]:
    """Read the fewest and the most machines of ``--nnodes``."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if match:
        fewest = int(match[1])
        most = fewest if match[2] is None else int(match[2])
        if 0 < fewest <= most:
            return fewest, most
    raise ConfigurationError(f"--nnodes {text} must be a positive number, or FEWEST:MOST with FEWEST up to MOST")


def _processes(text: str) -> int:
    from torch.distributed.run import determine_local_world_size

    try:
        processes = int(determine_local_world_size(text))
    except ValueError as error:
        raise ConfigurationError(
            f"--nproc-per-node {text} must be a number, auto, cpu or gpu, and this machine must have it ({error})"
        ) from error
    if processes < 1:
        raise ConfigurationError(f"--nproc-per-node {text} must be positive")
    return processes


def _read_by_torchrun(args: argparse.Namespace) -> argparse.Namespace:
    """Let torchrun read and check its flags."""
    from torch.distributed.run import config_from_args, get_args_parser

    arguments = ["--nnodes", args.nnodes, "--max-restarts", str(args.max_restarts), *args.handed_on]

    def refuse(message: str) -> NoReturn:
        raise ConfigurationError(f"torchrun refuses its {message}")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    torchrun_args = parser.parse_args([*arguments, "module"])
    # Without a name here torchrun would make a folder, which only a run does.
    checked = argparse.Namespace(**{**vars(torchrun_args), "log_dir": os.devnull})
    try:
        config_from_args(checked)
    except (ValueError, AssertionError, RuntimeError) as error:
        refuse(f"arguments {' '.join(arguments)}: {error}")
    if torchrun_args.redirects != "0" and not torchrun_args.log_dir:
        raise ConfigurationError(f"--redirects {torchrun_args.redirects} needs --log-dir DIR for the ranks' output")
    return torchrun_args


def _check_meeting(args: argparse.Namespace, machines: Machines, torchrun_args: argparse.Namespace) -> None:
    """Raise ConfigurationError unless the flags say in exactly one way how the machines find each other."""
    typed = [word.replace("=", " ", 1) for word in args.handed_on if word.startswith(_OF_MEETINGS)]
    names = [word.partition("=")[0] for word in args.handed_on]
    meeting = " and ".join(word for word in typed if word.startswith(("--rdzv-backend", "--rdzv-endpoint")))
    # With another backend a store numbers the machines, instead of --node-rank.
    is_elastic = torchrun_args.rdzv_backend != "static"

    if torchrun_args.standalone and machines.most > 1:
        raise ConfigurationError("--standalone is for one machine: drop it or --nnodes")
    if typed and machines.most == 1:
        # Such a machine would start a run alone instead of joining the others.
        raise ConfigurationError(f"{typed[0]} does nothing without --nnodes above 1: give both, or neither")
    if is_elastic and not torchrun_args.rdzv_endpoint:
        raise ConfigurationError(f"{meeting} needs --rdzv-endpoint HOST:PORT, the same on all machines")
    if machines.fewest < machines.most and not is_elastic:
        raise ConfigurationError(
            f"--nnodes {args.nnodes} needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, at which machines meet"
        )
    if not 0 <= torchrun_args.node_rank < machines.most:
        raise ConfigurationError(
            f"--node-rank {torchrun_args.node_rank} with --nnodes {args.nnodes} must be one of 0 to {machines.most - 1}"
        )
    starts_ranks = not (args.dry_run or args.print_config)
    # PET_MASTER_ADDR is torchrun's variable for --master-addr, which Kubernetes operators set.
    has_address = torchrun_args.rdzv_endpoint or "--master-addr" in names or "PET_MASTER_ADDR" in os.environ
    if starts_ranks and machines.most > 1 and not has_address:
        raise ConfigurationError(
            f"--nnodes {args.nnodes} needs --master-addr HOST and --node-rank N, or --rdzv-backend c10d and "
            "--rdzv-endpoint HOST:PORT: without them each machine would wait for the others at its own address"
        )
