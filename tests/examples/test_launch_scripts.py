"""The launch scripts of other programs' examples correct as the original's settings do.

The scripts run unchanged, with a stand-in for the program that they start; its flags are then checked as on ranks. Dry
runs of all scripts are in ``tests/long/test_launch_scripts.py``.
"""

import functools
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.launch.errors import missing_packages_noted
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.torchrun import machines_of, torchrun_parser
from tests.launch.tasks.test_text import tokenizer_folder
from tests.support.paths import ROOT

FOLDER = ROOT / "examples" / "launch"


@dataclass(frozen=True)
class Original:
    """The settings of another program's script."""

    dialect: str
    settings: dict[str, Any]  # of the correction, in the original's spelling
    batch: list[int]  # prompts and responses to each, and sequences of an optimizer step
    shape: str = "qwen2.5-7b"  # of the model, from its config.json
    layout: Sequence[int] = (4, 1, 2)  # our TP, CP and DP
    environment: dict[str, str] = field(default_factory=dict)


ORIGINALS = """
token_weights: {dialect: verl-2025-10, batch: [128, 1, 32], settings: {rollout_is: true, rollout_is_threshold: 2.0,
  rollout_is_level: token, rollout_is_mode: truncate, rollout_is_veto_threshold: 0.0001}}
sequence_weights: {dialect: verl-2025-10, batch: [128, 1, 32], settings: {rollout_is: true, rollout_is_threshold: 5.0,
  rollout_is_level: sequence, rollout_is_mode: truncate, rollout_is_veto_threshold: 0.0001}}
geometric_weights: {dialect: verl-2025-10, batch: [128, 1, 32], settings: {rollout_is: true, rollout_is_threshold:
  1.0002, rollout_is_threshold_lower: 0.9998, rollout_is_level: geometric, rollout_is_mode: clip,
  rollout_is_veto_threshold: 0.0001}}
metrics_only: {dialect: verl-2025-10, batch: [128, 1, 32], settings: {rollout_is: false, rollout_is_threshold: 2.0,
  rollout_is_level: token, rollout_is_mode: truncate}}
bypass: {dialect: verl, batch: [128, 4, 128], settings: {rollout_is: sequence, rollout_is_threshold: 2.0,
  rollout_is_batch_normalize: true, rollout_rs: null, bypass_mode: true, loss_type: reinforce}}
bypass_rejection: {dialect: verl, batch: [128, 4, 128], settings: {rollout_is: token, rollout_is_threshold: 2.0,
  rollout_is_batch_normalize: false, rollout_rs: 'token_k1,seq_max_k2', rollout_rs_threshold: '0.6_1.6,2.5',
  bypass_mode: true, loss_type: ppo_clip}}
slime_mis: {dialect: slime, batch: [32, 8, 256], shape: qwen3-4b, layout: [2, 2, 2], settings: {use_tis: true, use_rs:
  true, tis_level: token, rs_level: token, tis_mode: truncate, tis_lower_bound: 0.5, tis_upper_bound: 2.0,
  rs_lower_bound: null, rs_upper_bound: null, rs_veto_threshold: 0.0001, tis_batch_normalize: true}}
multi_node: {dialect: verl-2025-11, batch: [512, 16, 512], shape: qwen2.5-32b, layout: [8, 4, 4], environment:
  {NODE_RANK: '3', MASTER: node-0}, settings: {rollout_is: sequence, rollout_is_threshold: 2.0,
  rollout_is_batch_normalize: true, rollout_rs: geometric, rollout_rs_threshold: 1.01, rollout_rs_threshold_lower:
  0.99, rollout_token_veto_threshold: 0.0001}}
"""
ORIGINALS = {name: Original(**given) for name, given in yaml.safe_load(ORIGINALS).items()}
_QWEN2 = {"vocab_size": 152064, "max_position_embeddings": 131072, "rope_theta": 1e6, "tie_word_embeddings": False}
SHAPES = {
    "qwen2.5-7b": {
        **_QWEN2,
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
        **{"num_attention_heads": 28, "num_key_value_heads": 4},
    },
    "qwen2.5-32b": {
        **_QWEN2,
        **{"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    },
    "qwen3-4b": {
        **{"vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True},
        **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
}


def publish(folder: Path, shape: str) -> None:
    """Write a user's files: a model's directory, here without weights, and prompts."""
    of = transformers.Qwen3Config if shape.startswith("qwen3") else transformers.Qwen2Config
    of(**SHAPES[shape]).save_pretrained(folder / "model")
    tokenizer_folder(folder / "model")
    (folder / "train.jsonl").write_text('{"prompt": "one", "label": "two"}\n')


def start(name, folder, *arguments, **environment):
    """(exit code, words of the started Python, standard error) of a script with a stand-in for Python."""
    stand_in = folder / "python"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **environment}
    script = [str(FOLDER / f"{name}.sh"), *arguments]
    done = subprocess.run(script, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(torchrun's part, the run) of a script, by its name."""

    @functools.cache
    def make(name, *arguments):
        original = ORIGINALS[name]
        folder = tmp_path_factory.mktemp(name)
        publish(folder, original.shape)
        paths = {"MODEL": str(folder / "model"), "TRAIN": str(folder / "train.jsonl")}
        code, printed, errors = start(name, folder, *arguments, **paths, **original.environment)
        assert (code, errors) == (0, "")
        assert printed[:3] == ["1", "-m", "megatron_rc.launch"]
        mine, flags = torchrun_parser().parse_known_args(printed[3:])
        with missing_packages_noted():
            return mine, configure(flags, machines_of(mine).world_sizes()[-1], folders=False, elsewhere=True)[0]

    return make


def test_every_script_is_tried(made):
    assert {path.stem for path in FOLDER.glob("*.sh") if os.access(path, os.X_OK)} == set(ORIGINALS)
    mine, _ = made("multi_node")
    assert (mine.nnodes, mine.nproc_per_node) == ("16", "8")
    assert {"--node-rank=3", "--master-addr=node-0"} <= set(mine.handed_on)
    # Flags behind a script have the last word.
    _, config = made("sequence_weights", "--rollout-is-threshold", "3", "--lr", "2e-6")
    assert (config.correction.rollout_is_threshold, config.optimizer.lr) == (3.0, 2e-6)


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_script_corrects_as_the_original_does(made, name):
    original = ORIGINALS[name]
    _, config = made(name)
    assert config.correction == RolloutCorrectionConfig.from_dict(original.settings, dialect=original.dialect)
    rollouts = config.rollouts
    batch = [rollouts.grpo_prompts_per_step, rollouts.grpo_group_size, config.training.global_batch_size]
    assert batch == original.batch
    tp, cp, dp = original.layout
    assert config.launch.world_size == tp * cp * dp
    assert config.data_parallel_size == dp == len(config.engine.rollout_url.split(","))


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_script_names_every_setting_of_the_original(name):
    text = (FOLDER / f"{name}.sh").read_text(encoding="utf-8")
    comments = "\n".join(re.findall(r"# (.*)$", text, flags=re.MULTILINE))
    for setting, value in ORIGINALS[name].settings.items():
        comment = re.search(rf"\b{setting}(?:=|: )([^\s:;]+?)(?=,? |,?$|:|;)", comments, flags=re.MULTILINE)
        assert comment, setting
        assert _read(comment[1]) == value, setting


def _read(text):
    """A settings' value; lists of bounds are text."""
    value = yaml.safe_load(text)
    try:
        return float(text) if isinstance(value, str) else value
    except ValueError:
        return text


@pytest.mark.parametrize("missing", ["MODEL", "TRAIN", "NODE_RANK", "MASTER"])
def test_what_a_script_lacks_is_said(tmp_path, missing):
    variables = {"MODEL": "model", "TRAIN": "train.jsonl", "NODE_RANK": "0", "MASTER": "node-0"}
    del variables[missing]
    code, printed, errors = start("multi_node", tmp_path, **variables)
    assert (code != 0, printed) == (True, [])
    assert missing in errors
