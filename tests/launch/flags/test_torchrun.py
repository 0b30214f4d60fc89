"""The launcher's own flags, and torchrun's: what torchrun gets of them, and what is refused."""

import os
import re

import pytest

from megatron_rc.launch.__main__ import torchrun_arguments
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.parser import build_parser, long_options
from megatron_rc.launch.flags.torchrun import torchrun_parser
from tests.support.paths import ROOT
from tests.support.recorded_training import flags

MEETING = "--rdzv-backend=c10d --rdzv-endpoint=host:29400"


def test_torchruns_flags_and_the_trainers_share_no_name():
    assert set(long_options(torchrun_parser())) & set(long_options(build_parser())) <= {"help", ""}


def handed_on(tmp_path, *words):
    """What torchrun gets before the module that it starts."""
    command = torchrun_arguments([*words, *flags(tmp_path)])
    return command[: command.index("--module")]


def have(monkeypatch, cores):
    """A machine without devices."""
    monkeypatch.setattr("torch._utils.cpu_count", lambda: cores)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)


def test_torchruns_own_flags_reach_it_in_either_spelling(tmp_path):
    words = ["--nnodes=1:4", *MEETING.split(), "--rdzv-id", "7", "--log-dir", "logs", "--tee=3", "--role", "trainer"]
    safe = [f"--save={tmp_path}/s", f"--load={tmp_path}/./s/", "--save-interval=2", "--max-restarts=3"]
    found = handed_on(tmp_path, *words, *safe, "--nproc_per_node=1")
    assert found == [
        *("--nproc-per-node", "1", "--max-restarts", "3", "--nnodes", "1:4", *MEETING.split()),
        *("--rdzv-id=7", "--log-dir=logs", "--tee=3", "--role=trainer"),
    ]
    assert handed_on(tmp_path, "--rdzv_endpoint=a:1", "--nnodes=2") == [
        *("--nproc-per-node", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint=a:1"),
    ]
    assert handed_on(tmp_path, "--standalone", "--log_dir=logs") == [
        *("--nproc-per-node", "1", "--standalone", "--log-dir=logs")
    ]
    assert not os.path.exists("logs"), "the run makes it"


def test_the_command_of_the_documents_is_handed_on(tmp_path, monkeypatch):
    have(monkeypatch, cores=1)
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```bash\n.*launch (--nnodes .*?)```", text, re.DOTALL)
    words = command.replace("\\\n", " ").replace("DIR", str(tmp_path)).split()
    found = handed_on(tmp_path, *words[: words.index("--config")])
    assert found[2:6] == ["--max-restarts", "3", "--nnodes", "1:4"]
    assert found[6:] == [*"--rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-id=7 --log-dir=logs --tee=3".split()]
    assert handed_on(tmp_path, *"--nnodes 4 --node-rank 2 --master-addr HOST --master-port 7".split())[2:] == [
        *"--nnodes 4 --node-rank 2 --master-addr HOST --master-port 7".split()
    ]


def test_a_process_for_each_device(tmp_path, monkeypatch):
    have(monkeypatch, cores=2)
    for name in ("auto", "cpu"):
        assert handed_on(tmp_path, f"--nproc-per-node={name}")[:2] == ["--nproc-per-node", "2"]


def test_the_fewest_and_the_most_machines_are_checked(tmp_path):
    words = ["--nnodes=1:3", *MEETING.split(), f"--save={tmp_path}/s", f"--load={tmp_path}/s", "--save-interval=2"]
    with pytest.raises(ConfigurationError, match="must be a multiple of the 3 data-parallel ranks"):
        handed_on(tmp_path, *words)
    with pytest.raises(ConfigurationError, match="needs 2 processes, got 1"):
        handed_on(tmp_path, *words, "--tensor-model-parallel-size=2")


def test_the_launcher_hands_the_flags_to_torchrun(tmp_path):
    words = flags(tmp_path, "--tensor-model-parallel-size=2")
    command = torchrun_arguments(["--nproc-per-node", "2", *words])
    assert command == [
        *("--nproc-per-node", "2", "--standalone"),
        *("--module", "megatron_rc.launch.train_ppo", *words),
    ]
    command = torchrun_arguments(["--nproc-per-node=1", "--nnodes=2", "--node-rank=1", "--master-addr=a", *words])
    assert command[2:10] == ["--nnodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "29500"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nproc-per-node=0", "--nproc-per-node 0 must be positive"),
        ("--nnodes=-1", "--nnodes -1 must be positive"),
        ("--node-rank=0", "--node-rank 0 does nothing without --nnodes above 1"),
        ("--master-port=1234", "--master-port 1234 does nothing without --nnodes above 1"),
        ("--max-restarts=-1", "--max-restarts -1 must be 0 or more"),
        (
            "--max-restarts=2 --save=a --load=a",
            "--max-restarts 2 needs --save DIR, --load DIR with the same folder, and --save-interval: ranks that are "
            "started again go on from the newest checkpoint",
        ),
        ("--nnodes=2 --node-rank=2", "--node-rank 2 must be one of 0 to 1, with --nnodes 2"),
        ("--nnodes=two", "--nnodes two is neither a number nor FEWEST:MOST, as in 1:4"),
        ("--nnodes=1:2:3", "--nnodes 1:2:3 is neither a number nor FEWEST:MOST, as in 1:4"),
        ("--nnodes=4:1", "--nnodes 4:1 has more machines at the least than at the most: give 1:4"),
        (
            "--nproc-per-node=gpus",
            "--nproc-per-node gpus is neither a number nor one of auto, cpu, gpu that this machine has (Unsupported "
            "nproc_per_node value: gpus)",
        ),
        (
            "--nnodes=1:4",
            "--nnodes 1:4 needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, where machines that come find the "
            "others",
        ),
        (
            f"--nnodes=1:4 {MEETING}",
            "--nnodes 1:4 needs --save DIR, --load DIR with the same folder, and --save-interval: ranks that are "
            "started again go on from the newest checkpoint",
        ),
        (
            "--nnodes=2 --rdzv-backend=c10d",
            "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, the same on all machines",
        ),
        (
            MEETING,
            "--rdzv-backend c10d does nothing without --nnodes above 1: one machine's ranks meet on its loopback",
        ),
        (
            "--local_addr=10.0.0.1",
            "--local-addr 10.0.0.1 does nothing without --nnodes above 1: one machine's ranks meet on its loopback",
        ),
        ("--redirects=3", "--redirects 3 needs --log-dir DIR, which keeps what the ranks say"),
        (
            f"--nnodes=2 --node-rank=1 {MEETING}",
            "--node-rank 1 does nothing with --rdzv-backend c10d, which numbers the machines that meet at "
            "--rdzv-endpoint: leave it out",
        ),
        (
            "--nnodes=2 --rdzv-endpoint=a:1 --master-port=2",
            "--master-port 2 does nothing with --rdzv-endpoint a:1: leave one out",
        ),
        (
            "--standalone --nnodes=2",
            "--standalone is for one machine that meets no other: leave it or --nnodes out",
        ),
        (
            "--monitor-interval=x",
            "torchrun refuses its argument --monitor-interval/--monitor_interval: invalid float value: 'x'",
        ),
        (
            "--local-ranks-filter=a",
            "torchrun refuses its arguments --local-ranks-filter=a: --local_ranks_filter must be a comma-separated "
            "list of integers e.g. --local_ranks_filter=0,1,2",
        ),
    ],
)
def test_processes_and_machines_that_cannot_be_are_refused(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        torchrun_arguments([*words.split(), *flags(tmp_path)])


def test_the_launcher_counts_the_processes_of_all_machines(tmp_path):
    words = flags(tmp_path, "--tensor-model-parallel-size=2")
    with pytest.raises(ConfigurationError, match="needs 2 processes, got 1"):
        torchrun_arguments(words)
