"""Random weights, and one token a character, are used only if --from-scratch says so."""

import json

import pytest
import transformers

from megatron_rc.launch.__main__ import main
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.launch_file import CONFIGS
from megatron_rc.launch.tasks.text import CharacterText, HuggingFaceText
from tests.launch.tasks.test_text import tokenizer_folder
from tests.support.checkpoint_outline import outline_of_checkpoint
from tests.support.commands import code_of
from tests.support.paths import ROOT
from tests.support.recorded_training import COMMON, LLAMA
from tests.support.refusals import refused

MODEL = [word for word in LLAMA if word != "--from-scratch"]
DOUBLES = "--task=python:tests.support.user_rewards:Doubles"
TOYS = [CONFIGS / "launch" / "count_up.yaml", CONFIGS / "launch" / "count_up_ppo.yaml"]
TOYS += [CONFIGS / "study" / "count_up.yaml", CONFIGS / "study" / "count_on.yaml", ROOT / "examples/guessing_game.yaml"]
CLUSTERS = sorted(path.stem for path in (CONFIGS / "launch").glob("*gpus.yaml"))


def check(tmp_path, *words):
    """A tiny model on the toy's task, with these flags."""
    has_prompts = any(word.startswith("--prompt-data") for word in words)
    common = [word for word in COMMON if not (has_prompts and word.startswith("--task"))]
    return configure([*MODEL, *common, "--vocab-size=300", f"--runs-dir={tmp_path}/runs", *words], 1)


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1 + 1 = é", "label": "2"}) + "\n")
    return [f"--prompt-data={tmp_path}/train.jsonl", "--reward=exact", "--max-response-length=4"]


@pytest.fixture
def checkpoint(tmp_path):
    """A folder that holds a checkpoint, as far as flags look into it."""
    return outline_of_checkpoint(tmp_path / "checkpoints")


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_folder(tmp_path / "tokenizer")


def dry_run(capsys, *words):
    """(exit code, standard output, standard error)."""
    return code_of(main, *words, "--dry-run"), *capsys.readouterr()


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_launch_file_of_a_real_model_needs_its_weights(tmp_path, prompts, capsys, name):
    """With prompts that characters could not even express, and without."""
    for arguments in (prompts, []):
        code, output, errors = dry_run(capsys, f"--config={name}", *arguments)
        assert (code, output) == (2, "")
        assert all(flag in errors for flag in ("--load-hf", "--load ", "--tokenizer-model", "--from-scratch"))
        assert errors.count("\n") == 1


@pytest.mark.parametrize("path", TOYS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_toys_say_it_themselves_for_other_prompts_too(tmp_path, prompts, path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "label": "2"}\n' * 4)
    if "eval-interval" in path.read_text(encoding="utf-8"):
        prompts = [*prompts, f"--eval-data={tmp_path}/train.jsonl", "--eval-problems=4"]
    more = ["--cpu", "--max-turns=1", "--seq-length=160", "--micro-batch-size=8", f"--runs-dir={tmp_path}/runs"]
    for arguments in ([], prompts, [DOUBLES, "--max-response-length=4"]):
        config, task = configure([f"--config={path}", *arguments, *more], 4)
        assert config.checkpoints.from_scratch
        assert isinstance(task.text, CharacterText)


def test_the_toy_too_needs_the_flag(tmp_path):
    with refused("--load-hf | --load | --tokenizer-model | --from-scratch"):
        configure(["--config=count_up", "--cpu", f"--runs-dir={tmp_path}/runs", "--no-from-scratch"], 4)


def test_without_flags_a_required_one_is_named_as_before():
    with refused("--num-layers is missing"):
        configure([], 1)


def test_a_tokenizer_alone_is_no_model(tmp_path, tokenizer):
    arguments = [f"--tokenizer-model={tokenizer}"]
    with refused(f"--tokenizer-model {tokenizer} | weights | --load-hf DIR | --load DIR | --from-scratch"):
        check(tmp_path, *arguments)
    _, task = check(tmp_path, *arguments, "--from-scratch")
    assert isinstance(task.text, HuggingFaceText)


def test_a_checkpoint_has_weights_but_no_tokenizer(tmp_path, prompts, checkpoint, tokenizer):
    arguments = [*prompts, f"--load={checkpoint}"]
    with refused(f"--load {checkpoint} | --tokenizer-model DIR | --from-scratch"):
        check(tmp_path, *arguments)
    # A run from scratch goes on with the characters that it began with.
    with refused("'é' | --tokenizer-model"):
        check(tmp_path, *arguments, "--from-scratch")
    with refused("'é' | --tokenizer-model"):
        check(tmp_path, *arguments, "--tokenizer-type=CharacterTokenizer")
    _, task = check(tmp_path, *arguments, "--seq-length=64", f"--tokenizer-model={tokenizer}")
    assert isinstance(task.text, HuggingFaceText)


def test_an_empty_folder_of_checkpoints_is_no_model(tmp_path, tokenizer):
    """``--load`` may be an empty ``--save``, for a run that a signal ends and that is started again."""
    folder = tmp_path / "new"
    arguments = [f"--tokenizer-model={tokenizer}", f"--save={folder}", f"--load={tmp_path}/./new"]
    for make in (lambda: None, folder.mkdir):
        make()
        with refused(f"--load {tmp_path}/./new | no checkpoint | --load-hf | --from-scratch"):
            check(tmp_path, *arguments)
        check(tmp_path, *arguments, "--from-scratch")


def test_weights_of_a_directory_are_not_random(tmp_path, tokenizer):
    """Both flags contradict each other; a typed one takes the place of the launch file's."""
    model = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=300
    )
    transformers.AutoModelForCausalLM.from_config(model).save_pretrained(tokenizer)
    arguments = [
        "--seq-length=64",
        "--task=count_up",
        "--train-iters=1",
        "--global-batch-size=64",
        "--lr=1e-3",
        "--cpu",
    ]
    arguments.append(f"--runs-dir={tmp_path}/runs")
    load = f"--load-hf={tokenizer}"
    with refused(f"--from-scratch | --load-hf {tokenizer} | drop one of them"):
        configure([*arguments, load, "--from-scratch"], 1)
    (tmp_path / "scratch.yaml").write_text("from-scratch: true\n")
    (tmp_path / "both.yaml").write_text(f"from-scratch: true\nload-hf: {tokenizer}\n")
    config, task = configure([*arguments, load, f"--config={tmp_path}/scratch.yaml"], 1)
    assert (config.checkpoints.from_scratch, config.checkpoints.load_hf) == (False, str(tokenizer))
    assert isinstance(task.text, HuggingFaceText)
    with refused("--from-scratch | --load-hf"):
        configure([*arguments, f"--config={tmp_path}/both.yaml"], 1)
