"""The line about where weights, tokenizer, task, rewards and responses come from."""

import json
from pathlib import Path

import pytest
import transformers

from megatron_rc.launch.checkpoint_folders import TRACKER, iteration_folder
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.training.reporting.sources import in_one_line, newest_checkpoint, sources_of
from megatron_rc.records.rollout import save_rollouts
from tests.launch.tasks.test_text import tokenizer_folder
from tests.support.recorded_training import COMMON, flags, recorded_batch, run_config

RANDOM = "weights: random (--from-scratch) · tokenizer: one token a character (--from-scratch)"


def line(config, checkpoint=None):
    return in_one_line(sources_of(config, checkpoint))


def test_a_toy(tmp_path):
    assert line(run_config(flags(tmp_path))) == (
        f"{RANDOM} · task: count_up · reward: rule of the task · engine: transformers"
    )


def test_teachers_are_named(tmp_path):
    config = run_config(flags(tmp_path, "--policy-loss=distill", "--teacher-url=http://a:1"))
    assert line(config).endswith(" · engine: transformers · teacher: http://a:1 (--teacher-url)")


def test_prompts_rewards_and_servers_are_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "1", "label": "2"}) + "\n")
    base = [word for word in flags(tmp_path) if not word.startswith("--task")]
    data = ["--prompt-data", "0.7", f"{tmp_path}/a.jsonl", "0.3", f"{tmp_path}/b.jsonl", "--vocab-size=200"]
    server = ["--rollout-engine=vllm-server", f"--rollout-weights-dir={tmp_path}/w", "--rollout-url=http://a,http://b"]
    config = run_config([*base, *data, "--reward=exact", *server, "--micro-batch-size=2"], 2)
    assert line(config) == (
        f"{RANDOM} · task: --prompt-data 0.7 {tmp_path}/a.jsonl 0.3 {tmp_path}/b.jsonl · reward: exact · "
        "engine: vllm-server at http://a and 1 more"
    )


def test_recorded_rollouts_have_all_but_weights_and_tokenizer(tmp_path):
    save_rollouts(recorded_batch(0), tmp_path / "step-0000000-replica-0000.safetensors")
    config = run_config(flags(tmp_path, f"--load-rollouts={tmp_path}", "--train-iters=2"))
    assert line(config) == f"{RANDOM} · task: {tmp_path} (--load-rollouts) · reward: as recorded · engine: none"


def test_a_directory_brings_weights_and_tokenizer_unless_another_is_given(tmp_path):
    model = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=300
    )
    transformers.AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path / "model")
    for name in ("model", "other"):
        tokenizer_folder(tmp_path / name)
    arguments = [*COMMON, f"--load-hf={tmp_path}/model", f"--runs-dir={tmp_path}/runs", "--seq-length=64"]
    own = sources_of(configure(arguments, 1)[0], None)
    assert own["weights"] == own["tokenizer"] == f"{tmp_path}/model (--load-hf)"
    other = sources_of(configure([*arguments, f"--tokenizer-model={tmp_path}/other"], 1)[0], None)
    assert other["weights"] == f"{tmp_path}/model (--load-hf)"
    assert other["tokenizer"] == f"{tmp_path}/other (--tokenizer-model)"


@pytest.mark.parametrize("tracked", ["3", "half", None])
def test_a_dry_run_finds_the_checkpoint_that_a_run_would_begin_with(tmp_path, tracked):
    """A damaged folder is named as a whole: the run says what is wrong with it."""
    config = run_config(flags(tmp_path, f"--save={tmp_path}/save", f"--load={tmp_path}/save"))
    assert newest_checkpoint(run_config(flags(tmp_path))) is None
    assert newest_checkpoint(config) is None
    folder = iteration_folder(tmp_path / "save", 3)
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    if tracked is not None:
        (tmp_path / "save" / TRACKER).write_text(tracked)
    checkpoint = newest_checkpoint(config)
    assert checkpoint == {"3": folder, "half": Path(tmp_path / "save"), None: None}[tracked]
    assert line(config, checkpoint).startswith(
        f"weights: {f'checkpoint {checkpoint} (--load)' if checkpoint else 'random'}"
    )
