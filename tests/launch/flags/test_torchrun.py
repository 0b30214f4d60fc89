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
from tests.support.refusals import refused

MEETING = "--rdzv-backend=c10d --rdzv-endpoint=host:29400"


def test_torchruns_flags_and_the_trainers_share_no_name():
    assert set(long_options(torchrun_parser())) & set(long_options(build_parser())) <= {"help", ""}


def handed_on(tmp_path, *words):
    """What torchrun gets before the module that it starts."""
    given = flags(tmp_path)
    command = torchrun_arguments([*words, *given])
    begin = command.index("--module")
    assert command[begin + 1] == "megatron_rc.launch.train_ppo"
    assert command[-len(given) :] == given
    return command[:begin]


def have(monkeypatch, cores):
    """A machine without devices."""
    monkeypatch.setattr("torch._utils.cpu_count", lambda: cores)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)


def test_torchruns_own_flags_reach_it_in_either_spelling(tmp_path):
    arguments = [
        "--nnodes=1:4",
        *MEETING.split(),
        "--rdzv-id",
        "7",
        "--log-dir",
        "logs",
        "--tee=3",
        "--role",
        "trainer",
    ]
    safe = [f"--save={tmp_path}/s", f"--load={tmp_path}/./s/", "--save-interval=2", "--max-restarts=3"]
    results = handed_on(tmp_path, *arguments, *safe, "--nproc_per_node=1")
    assert results == [
        *("--nproc-per-node", "1", "--max-restarts", "3", "--nnodes", "1:4", *MEETING.split()),
        *("--rdzv-id=7", "--log-dir=logs", "--tee=3", "--role=trainer"),
    ]
    assert handed_on(tmp_path, "--rdzv_endpoint=a:1", "--nnodes=2") == [
        *("--nproc-per-node", "1", "--nnodes", "2", "--rdzv-endpoint=a:1")
    ]
    assert handed_on(tmp_path, "--standalone", "--log_dir=logs") == [
        *("--nproc-per-node", "1", "--standalone", "--log-dir=logs")
    ]
    assert not os.path.exists("logs"), "the run makes it"


def test_the_command_of_the_documents_is_handed_on(tmp_path, monkeypatch):
    have(monkeypatch, cores=1)
    text = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```bash\n.*launch (--nnodes .*?)```", text, re.DOTALL)
    arguments = command.replace("\\\n", " ").replace("DIR", str(tmp_path)).split()
    results = handed_on(tmp_path, *arguments[: arguments.index("--config")])
    assert results[2:6] == ["--max-restarts", "3", "--nnodes", "1:4"]
    assert results[6:] == [*"--rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-id=7 --log-dir=logs --tee=3".split()]
    assert handed_on(tmp_path, *"--nnodes 4 --node-rank 2 --master-addr HOST --master-port 7".split())[2:] == [
        *"--nnodes 4 --node-rank=2 --master-addr=HOST --master-port=7".split()
    ]


def test_torchruns_variables_say_where_machines_meet(tmp_path, monkeypatch):
    """As operators of Kubernetes set them."""
    monkeypatch.setenv("PET_MASTER_ADDR", "HOST")
    assert handed_on(tmp_path, "--nnodes=2")[2:] == ["--nnodes", "2"]


def test_a_process_for_each_device(tmp_path, monkeypatch):
    have(monkeypatch, cores=2)
    for name in ("auto", "cpu"):
        assert handed_on(tmp_path, f"--nproc-per-node={name}")[:2] == ["--nproc-per-node", "2"]


def test_the_fewest_and_the_most_machines_are_checked(tmp_path):
    arguments = ["--nnodes=1:3", *MEETING.split(), f"--save={tmp_path}/s", f"--load={tmp_path}/s", "--save-interval=2"]
    with pytest.raises(ConfigurationError, match=r"--grpo-prompts-per-step 4 .*3 data-parallel"):
        handed_on(tmp_path, *arguments)
    with pytest.raises(ConfigurationError, match="2 processes, got 1"):
        handed_on(tmp_path, *arguments, "--tensor-model-parallel-size=2")


SAFE = "--save DIR | --load DIR | --save-interval"
# Words, and the parts of the sentence that refuses them; without parts the last word with its value.
REFUSED = f"""
--nproc-per-node=0
--node-rank=0 :: --node-rank 0 | --nnodes above 1
--max-restarts=2 --save=a --load=a :: --max-restarts 2 | {SAFE}
--nnodes=2 --node-rank=2 :: --node-rank 2 | 0 to 1 | --nnodes 2
--nnodes=2 :: --nnodes 2 | --master-addr HOST | --node-rank | --rdzv-endpoint HOST:PORT
--nnodes=2 --node-rank=1 --master-port=7 :: --nnodes 2 | --master-addr HOST
--nnodes=two :: --nnodes two | FEWEST:MOST
--nnodes=4:1 :: --nnodes 4:1 | FEWEST:MOST
--nnodes=0 :: --nnodes 0 must be
--nnodes=0:2 :: --nnodes 0:2 must be
--max-restarts=-1 :: --max-restarts -1 must be 0 or more
--nproc-per-node=gpus
--nnodes=1:4 :: --nnodes 1:4 | --rdzv-backend c10d | --rdzv-endpoint
--nnodes=1:4 {MEETING} :: --nnodes 1:4 | {SAFE}
--nnodes=2 --rdzv-backend=c10d :: --rdzv-backend c10d | --rdzv-endpoint HOST:PORT
--nnodes=2 --rdzv-backend={{x}} :: --rdzv-backend {{x}} | --rdzv-endpoint HOST:PORT
--nnodes=2 --rdzv-endpoint={{0}}%s --node-rank=9 :: --node-rank 9 | 0 to 1
--redirects={{x}} :: --redirects={{x}}
--rdzv-id={{found}}%d :: --rdzv-id {{found}}%d | --nnodes above 1
--redirects=3 :: --redirects 3 | --log-dir
--standalone --nnodes=2 :: --standalone | --nnodes
--monitor-interval=x :: torchrun | --monitor-interval | 'x'
--local-ranks-filter=a :: torchrun | --local-ranks-filter=a
--json :: --json | --dry-run
--dry-run --device-memory-gib=0 :: --device-memory-gib 0.0
--dry-run --print-config :: --dry-run | --print-config
--tensor-model-parallel-size=2 :: 2 processes, got 1
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_processes_and_machines_that_cannot_be_are_refused(tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    arguments, _, parts = row.partition(" :: ")
    with refused(parts or arguments.replace("=", " ")):
        torchrun_arguments([*arguments.split(), *flags(tmp_path)])


def test_ranks_that_are_started_again_do_not_go_back_to_an_older_checkpoint(tmp_path):
    (tmp_path / "s" / "iter_0000002").mkdir(parents=True)
    arguments = flags(tmp_path, f"--save={tmp_path}/s", f"--load={tmp_path}/s", "--save-interval=2", "--ckpt-step=2")
    torchrun_arguments(arguments)
    for asked in ("--max-restarts 2", f"--nnodes 1:2 {MEETING}"):
        with refused(f"--ckpt-step 2 | {' '.join(asked.split()[:2])}"):
            torchrun_arguments([*asked.split(), *arguments])
