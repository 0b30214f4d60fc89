"""The launch files for real hardware: each works on its number of ranks.

The scripts run with stand-ins for the programs that they start.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_rc.launch.__main__ import main
from megatron_rc.launch.dry_run.places import places
from megatron_rc.launch.errors import missing_packages_noted
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.launch_file import CONFIGS
from megatron_rc.launch.flags.torchrun import machines_of, torchrun_parser
from megatron_rc.launch.resolved_file import as_launch_file
from tests.support.commands import code_of
from tests.support.paths import ROOT

# Ranks, family, and billions of parameters, as they are published.
PUBLISHED = {
    "qwen2_7b_8gpus": (8, "qwen2", 7.62),
    "llama3_70b_64gpus": (64, "llama", 70.6),
    "qwen3_30b_a3b_32gpus": (32, "qwen3_moe", 30.5),
    "qwen3_480b_a35b_512gpus": (512, "qwen3_moe", 480.2),
    "deepseek_v3_671b_512gpus": (512, "deepseek_v3", 671.0),
}
RANKS = {name: ranks for name, (ranks, *_) in PUBLISHED.items()}


def made(name, *more, ranks=None):
    """Settings of a launch file; without ``--load-hf`` of a model that is not on this disk."""
    if "--load-hf" not in more:
        more = ("--from-scratch", *more)
    with missing_packages_noted():
        return configure([f"--config={name}", *more], ranks or RANKS[name], folders=False, elsewhere=True)[0]


def test_every_launch_file_for_gpus_is_tried():
    assert {path.stem for path in (CONFIGS / "launch").glob("*gpus.yaml")} == set(RANKS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_launch_file_describes_the_published_model(name, tmp_path):
    from megatron_rc.launch.weights import find_family
    from megatron_rc.launch.weights.checkpoint_names import empty_model

    config, (ranks, published, size) = made(name), PUBLISHED[name]
    family = find_family(config)
    assert family.name == published
    billions = sum(weight.numel() for weight in empty_model(family.hugging_face_config(config)).parameters()) / 1e9
    assert billions == pytest.approx(size, rel=0.005)
    assert config.correction.rollout_is == "token"
    urls = config.engine.rollout_url.split(",")
    assert all(url == url.strip() and url.startswith("http://") for url in urls), "over two lines of a file"
    assert len([place for place in places(config) if place.engine]) == len(urls) == config.data_parallel_size
    # The file that such a run leaves makes the same run.
    path = tmp_path / "config.yaml"
    path.write_text(as_launch_file(config.flags), encoding="utf-8")
    again = made(path, ranks=ranks)
    assert again == config
    assert as_launch_file(again.flags) == as_launch_file(config.flags)


@pytest.mark.processes
@pytest.mark.parametrize("name", RANKS)
def test_a_launch_file_fits(name, capsys):
    """By the command that it names itself."""
    text = (CONFIGS / "launch" / f"{name}.yaml").read_text()
    (arguments,) = re.findall(r"^# .*: python -m megatron_rc\.launch (--dry-run .*)$", text, re.MULTILINE)
    assert code_of(main, *arguments.split(), "--device-memory-gib", "72", "--weights-bridge", "none") == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert output.startswith("weights: random (--from-scratch) · tokenizer: one token a character (--from-scratch) · ")
    assert f"{RANKS[name]} ranks = " in output


# What starts ranks, or a job: each shows its name and words, one a line.
SHOWN = 'printf "%s\\n" "${0##*/}" "$@"'
STAND_INS = {
    "python": SHOWN,
    "torchrun": SHOWN,
    "srun": 'printf "%s\\n" srun "$1"; shift; exec "$@"',
    "scontrol": 'printf "node-4\\nnode-5\\n"',
    "sbatch": "shift; SLURM_NNODES=$1 SLURM_JOB_NODELIST=node-[4-5] SLURM_JOB_ID=7; shift; export SLURM_NNODES "
    'SLURM_JOB_NODELIST SLURM_JOB_ID; exec "$@"',
}


def run(folder, line, programs=STAND_INS, **environment):
    """(exit code, words that were shown, standard error) of a line for the shell, with stand-ins for programs."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    if not (folder / "launch").exists():
        (folder / "launch").symlink_to(ROOT / "launch")
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-ec", line], env=environment, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


SCRIPTS = {
    "one_node.sh": ({}, "python -m megatron_rc.launch --nproc-per-node 8"),
    "several_nodes.sh": (
        {"NODES": "4", "NODE_RANK": "2", "MASTER": "node-4", "GPUS": "4"},
        "torchrun --nnodes 4 --node-rank 2 --nproc-per-node 4 --master-addr node-4 --master-port 29500",
    ),
    "slurm.sh": (
        {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[4-5]", "SLURM_JOB_ID": "77"},
        "srun --kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
        "node-4:29500 --rdzv-id 77",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_the_ranks(name, tmp_path):
    environment, command = SCRIPTS[name]
    code, arguments, errors = run(tmp_path, f"launch/{name} 'my run.yaml' --lr 1e-6", **environment)
    assert (code, errors) == (0, "")
    module = [] if name == "one_node.sh" else ["-m", "megatron_rc.launch.train_ppo"]
    assert arguments == [*command.split(), *module, "--config", "my run.yaml", "--lr", "1e-6"]
    assert not module or torchrun_takes(arguments)


def test_under_slurm_torchrun_gives_the_ranks_time_to_save(tmp_path):
    """Slurm's signal comes 300 s before the end; torchrun alone would kill the ranks after 30 s of them."""
    programs = STAND_INS | {"srun": 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"'}
    for given, seconds in ({}, "270"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}, "60"):
        environment = SCRIPTS["slurm.sh"][0] | given
        assert run(tmp_path, "launch/slurm.sh my_run.yaml", programs, **environment) == (0, [seconds], "")


def commands():
    """The lines of every block of the page, with the documents' and launch files' own of how they are started."""
    text = (ROOT / "docs" / "dry-run.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    for path in (CONFIGS / "launch").glob("*gpus.yaml"):
        lines += re.findall(r"^#   (.*launch/\w+\.sh .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("line", commands(), ids=lambda line: line.split(" --load-hf")[0])
def test_a_command_of_the_documents_works_as_it_is_written(line, tmp_path, monkeypatch):
    """Through the shell, with stand-ins for what starts ranks; the flags of the run are then checked as ranks do."""
    code, arguments, errors = run(tmp_path, line)
    assert (code, errors) == (0, "")
    if line.startswith("python"):
        mine, flags = torchrun_parser().parse_known_args(arguments[3:])
        ranks = machines_of(mine).world_sizes()[-1]
        assert made("llama3_70b_64gpus", *flags[2:], ranks=ranks).launch.world_size == 64
        return
    assert "one_node.sh" in line or torchrun_takes(arguments)
    machines = int(arguments[arguments.index("--nnodes") + 1]) if "--nnodes" in arguments else 1
    name, *flags = arguments[arguments.index("--config") + 1 :]
    monkeypatch.chdir(tmp_path)
    publish(name)
    assert made(name, *flags, ranks=8 * machines).checkpoints.load_hf == "DIR"


def publish(name):
    """The directory and the prompts that the commands name, of the model of a launch file."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from megatron_rc.launch.weights import find_family

    config = made(name)
    find_family(config).hugging_face_config(config).save_pretrained("DIR")
    arguments = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<end>": 2}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=arguments, eos_token="<end>").save_pretrained("DIR")
    Path("train.jsonl").write_text('{"prompt": "one", "label": "two"}\n')


def torchrun_takes(words):
    """Whether torchrun understands the words behind its name."""
    from torch.distributed.run import parse_args

    return parse_args(words[words.index("torchrun") + 1 :]).training_script == "megatron_rc.launch.train_ppo"


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_lacks_is_said(name, tmp_path):
    environment, _ = SCRIPTS[name]
    code, arguments, errors = run(tmp_path, f"launch/{name}", **environment)
    assert (code != 0, arguments) == (True, [])
    assert "usage: " in errors
    for missing in set(environment) - {"GPUS"}:
        rest = {key: value for key, value in environment.items() if key != missing}
        code, arguments, errors = run(tmp_path, f"launch/{name} count_up", **rest)
        assert (code != 0, arguments) == (True, []), missing
        assert missing in errors


def test_every_script_is_tried():
    assert {path.name for path in (ROOT / "launch").glob("*.sh")} == set(SCRIPTS)
