"""``--save-hf`` while training: the model of a step as transformers reads it, on every layout; what is refused."""

import json

import pytest
import torch
import transformers

from megatron_rc.launch.errors import ConfigurationError
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags, run_config
from tests.support.several_ends import glm_folder
from tests.support.several_ends import words_of as words_of_glm
from tests.support.training_runs import LIVE, run_training, said_by_training

QWEN3_MOE = [*LLAMA, "--num-experts=4", "--moe-ffn-hidden-size=24", "--qk-layernorm", "--kv-channels=16"]


def words_of(folder, layout, *more, model=LLAMA):
    every = ["--rollout-dtype=fp32", "--train-iters=3", f"--save-hf={folder}/hf", *layout.flags()]
    return flags(folder, *LIVE, *every, *more, model=model)


def greedy(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([tokenizer("12")["input_ids"]])
    answer = model.generate(prompt, max_new_tokens=4, do_sample=False)
    return tokenizer.decode(answer[0])


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(Layout(tp=2, pp=2), LLAMA, id="tp2-pp2"),
        pytest.param(Layout(dp=2, ep=2), QWEN3_MOE, id="experts", marks=pytest.mark.long),
    ],
)
def test_the_models_of_some_steps_and_of_the_end(ranks, tmp_path, layout, model):
    """A checkpoint of the last step, exported, is that directory, file by file."""
    arguments = words_of(tmp_path, layout, "--save-hf-interval=2", f"--save={tmp_path}/checkpoints", model=model)
    assert set(ranks.run(run_training, layout, arguments)) == {None}
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step-2", "step-3"]
    from megatron_rc.launch import export

    export.main(["--load", f"{tmp_path}/checkpoints", "--save-hf", f"{tmp_path}/exported"])
    written = sorted(path.name for path in (tmp_path / "exported").iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(written)
    for name in written:
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "hf" / "step-3" / name).read_bytes(), name
    assert (tmp_path / "hf/step-2/model.safetensors").read_bytes() != (tmp_path / "exported" / written[2]).read_bytes()
    assert greedy(tmp_path / "hf" / "step-3").startswith("12")


def test_a_run_names_its_ends_and_writes_them(ranks, tmp_path):
    """GLM-4.5 with one end taken out and one added: the line at the start, and both files of the directory."""
    folder = glm_folder(tmp_path / "glm")
    more = ["--rollout-no-stop-token-ids=4", "--rollout-stop-token-ids=7", f"--save-hf={tmp_path}/hf"]
    arguments = words_of_glm(folder, *LIVE, "--num-layers=4", *more, "--train-iters=1")
    ((error, message),) = ranks.run(said_by_training, Layout(), arguments)
    assert error is None
    line = (
        "end tokens: 0 <|endoftext|> (tokenizer, config.json, generation_config.json), 3 <|user|> (config.json, "
        "generation_config.json), 7 '2' (--rollout-stop-token-ids); not 4 <|observation|> (--rollout-no-stop-token-ids)"
    )
    assert message.splitlines().count(line) == 1
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / "step-1" / name).read_text())["eos_token_id"] == [0, 3, 7]


def test_a_resumed_run_writes_beside_the_earlier_steps(ranks, tmp_path):
    arguments = words_of(tmp_path, Layout(), f"--save={tmp_path}/checkpoints", f"--load={tmp_path}/checkpoints")
    assert ranks.run(run_training, Layout(), [*arguments, "--train-iters=1"]) == [None]
    # What a run leaves that was killed while it wrote, or between the two renamings.
    (tmp_path / "hf" / ".step-2.partial").mkdir()
    (tmp_path / "hf" / ".step-2.replaced").mkdir()
    assert ranks.run(run_training, Layout(), [*arguments, "--train-iters=2"]) == [None]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step-1", "step-2"]


def stop_while_writing(words):
    """A run whose first rank finds no room."""
    from megatron_rc.launch.training import hugging_face

    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face, "write_tensors", full)
        return run_training(words)


def test_a_directory_that_cannot_be_written_is_one_error(ranks, tmp_path):
    """A model that a killed run was replacing gets its name back."""
    (tmp_path / "hf" / ".step-1.replaced").mkdir(parents=True)
    arguments = words_of(
        tmp_path, Layout(), "--save-hf-interval=1", f"--save={tmp_path}/save", f"--load={tmp_path}/save"
    )
    (message,) = ranks.run(stop_while_writing, Layout(), arguments)
    assert "RunError: --save-hf: the model cannot be written to" in message
    assert "No space left on device" in message
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-1"]


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "full" / "a").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"--save-hf \S+full is not empty"):
        run_config(flags(tmp_path, f"--save-hf={tmp_path}/full"), engine=False)
