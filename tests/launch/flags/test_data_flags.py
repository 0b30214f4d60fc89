"""Flags of prompts from files and of evaluations: what goes together, and what docs/data.md shows."""

import json
import logging
import re
import shlex

import pytest
import transformers

from megatron_rc.launch.__main__ import torchrun_arguments
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.resolved_file import as_launch_file
from megatron_rc.launch.tasks.prompt_data.source import PromptData
from megatron_rc.records.rollout import save_rollouts
from tests.launch.tasks.test_text import tokenizer_folder
from tests.support.paths import ROOT
from tests.support.recorded_training import COMMON, LLAMA, recorded_batch
from tests.support.refusals import refused

# Without the task, whose place the files take.
BASE = [*LLAMA, *(word for word in COMMON if not word.startswith("--task"))]
DOUBLES = "python:tests.support.user_rewards:Doubles"
DATA = ["--reward=exact", "--seq-length=64", "--max-response-length=16", "--vocab-size=300"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "a.jsonl", [{"prompt": f"{n} + 1 = ", "label": str(n + 1)} for n in range(9)])


@pytest.fixture
def other(tmp_path):
    return write(tmp_path / "b.jsonl", [{"prompt": f"{n} - 1 = ", "label": str(n - 1)} for n in range(4)])


def check(tmp_path, *words, world_size=1):
    return configure([*BASE, f"--runs-dir={tmp_path}/runs", *words], world_size)


def test_prompts_come_from_the_files_and_evaluations_try_all_of_theirs(tmp_path, file, other):
    mixed = ["--prompt-data", "0.5", file, "0.5", other]
    config, task = check(tmp_path, *DATA, *mixed, "--eval-data", other, "--eval-interval=2")
    assert isinstance(task, PromptData)
    assert config.data.prompt_data == ("0.5", file, "0.5", other)
    assert (config.task.task, config.data.label_key) == (None, "label")
    assert sorted("-" in problem.prompt for problem in task.problems(0, 8)) == [False] * 4 + [True] * 4
    assert {problem.record["prompt"] for problem in task.problems(0, 50)} > {"0 + 1 = ", "3 - 1 = "}
    results = config.evaluation
    defaults = (results.eval_problems, results.eval_samples, results.eval_temperature, results.eval_answers)
    assert defaults == (4, 1, None, 8)
    assert [problem.label for problem in task.problems(0, 4, held_out=True)] == ["-1", "0", "1", "2"]
    (tmp_path / "again.yaml").write_text(as_launch_file(config.flags))
    again, _ = configure([f"--config={tmp_path}/again.yaml"], 1)
    assert (again.task, again.data, again.evaluation) == (config.task, config.data, config.evaluation)
    flags = [*BASE, f"--runs-dir={tmp_path}", *DATA]
    arguments = torchrun_arguments(["--nproc-per-node", "1", *mixed, "--nnodes", "1", *flags])
    assert arguments[arguments.index("--module") + 2 :] == [*mixed, *flags], "torchrun gets all values of a flag"


def test_a_launch_file_has_them_as_a_list(tmp_path, file, other):
    flags = ["0.7", file, "0.3", other]
    for text in (f"prompt-data: [{', '.join(flags)}]", f"prompt-data: {file}"):
        (tmp_path / "run.yaml").write_text(f"{text}\n")
        config, _ = check(tmp_path, *DATA, f"--config={tmp_path}/run.yaml")
        assert config.data.prompt_data in (tuple(flags), (file,))
    for text in ("prompt-data: {a: b}", "prompt-data: []", "prompt-data: [[a]]"):
        (tmp_path / "run.yaml").write_text(f"{text}\n")
        with pytest.raises(ConfigurationError, match="prompt-data: "):
            check(tmp_path, *DATA, f"--config={tmp_path}/run.yaml")


@pytest.mark.parametrize(
    ("text", "words", "task"),
    [
        ("task: count_up", ["--prompt-data", "FILE", "--reward=exact"], None),
        ("prompt-data: FILE\neval-data: FILE\neval-interval: 2", [f"--task={DOUBLES}", "--reward=exact"], DOUBLES),
    ],
)
def test_what_was_typed_takes_the_place_of_the_launch_files(tmp_path, file, text, words, task):
    (tmp_path / "run.yaml").write_text(text.replace("FILE", file) + "\n")
    words = [word.replace("FILE", file) for word in words]
    more = ["--seq-length=256", "--max-response-length=32", "--vocab-size=300", f"--config={tmp_path}/run.yaml"]
    config, _ = check(tmp_path, *more, *words)
    assert config.task.task == task
    assert (config.data.prompt_data is None) == (task is not None)
    assert config.data.eval_data is None


# Words (B stands for a file), and parts of the sentence.
REFUSED = """
--eval-interval=2 :: --eval-interval 2 | --eval-data
--eval-interval=2 --eval-data B --eval-problems=5 :: --eval-data | 4 | 5
--overlong-prompts=keep :: --overlong-prompts: | 'keep'
--max-response-length=57 --overlong-prompts=error :: line 1 | 8 tokens | --seq-len
--apply-chat-template :: --apply-chat-template | --tokenizer-model
--task=count_up :: --task count_up and --prompt-data | a.jsonl
--eval-interval=2 --eval-data B x=B :: --eval-data names | b.jsonl twice
--eval-interval=2 --eval-data 0.5 B :: --eval-data 0.5 | b.jsonl | no weights
--eval-interval=2 --eval-data B C :: --eval-data | two files with the name b | first=
--eval-interval=2 --eval-data a=B a=C :: --eval-data | two files with the name a | first=
--eval-interval=2 --eval-data a=B C --eval-problems=1 :: --eval-problems 1 | 2 files
--eval-interval=2 --eval-data a=B C --eval-input-key c=q :: --eval-input-key c=q | 'c' | a, b
--eval-interval=2 --eval-data B --eval-label-key q r :: --eval-label-key q r | two keys for all files
--eval-interval=2 --eval-data a=B --eval-label-key a=q a=r :: --eval-label-key a=q a=r | two keys for a
--eval-interval=2 --eval-data B --eval-input-key question :: b.jsonl, line 1 | 'question' | --eval-input-key
--eval-interval=2 --eval-data a=B C --eval-label-key b=answer :: b.jsonl, line 1 | 'answer' | --eval-label-key
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_cannot_work_is_one_sentence(tmp_path, file, other, row):
    arguments, _, parts = row.partition(" :: ")
    (tmp_path / "more").mkdir()
    third = write(tmp_path / "more" / "b.jsonl", [{"prompt": "2 + 2 = ", "label": 4}])
    files = {"B": other, "C": third, "x=B": f"x={other}", "a=B": f"a={other}", "a=C": f"a={third}"}
    with refused(parts):
        check(tmp_path, *DATA, "--prompt-data", file, *(files.get(word, word) for word in arguments.split()))


def test_held_out_files_have_names_and_keys_of_their_own(tmp_path, file):
    rows = {
        "aime 24": [{"problem": "a", "answer": {"value": 1}}],
        "math": [{"question": "b", "label": "2"}],
        "plain": [{"prompt": "c", "label": 3}],
    }
    paths = {name: write(tmp_path / f"{name}.jsonl", table) for name, table in rows.items()}
    (tmp_path / "run.yaml").write_text(
        f"eval-data: ['{paths['aime 24']}', 'math-500={paths['math']}', '{paths['plain']}']\n"
        "eval-input-key: [problem, math-500=question, plain=prompt]\neval-label-key: aime_24=answer.value\n"
        "eval-interval: 2\n"
    )
    arguments = [*DATA, "--prompt-data", file, f"--config={tmp_path}/run.yaml"]
    config, task = check(tmp_path, *arguments)
    assert config.data.eval_names == ("aime_24", "math-500", "plain")
    assert [(problem.prompt, problem.label) for problem in task.problems(0, 3, held_out=True)] == [
        *(("a", 1), ("b", "2"), ("c", 3))
    ]
    (tmp_path / "again.yaml").write_text(as_launch_file(config.flags))
    assert configure([f"--config={tmp_path}/again.yaml"], 1)[0].data == config.data
    # A typed task takes the place of all that belongs to files.
    config, _ = check(tmp_path, *DATA, f"--config={tmp_path}/run.yaml", f"--task={DOUBLES}", "--seq-length=256")
    assert (config.data.eval_data, config.data.eval_names) == (None, ())


def test_one_file_has_metrics_of_its_own_if_it_has_a_name(tmp_path, file, other):
    arguments = [*DATA, "--prompt-data", file, "--eval-interval=2", "--eval-data"]
    assert check(tmp_path, *arguments, other)[0].data.eval_names == ()
    assert check(tmp_path, *arguments, f"held={other}")[0].data.eval_names == ("held",)
    (tmp_path / "x=y.jsonl").write_text('{"prompt": "a", "label": 1}\n')
    assert check(tmp_path, *arguments, f"{tmp_path}/x=y.jsonl")[0].data.eval_names == (), "a path with a slash before ="


def test_the_length_of_a_response_is_given_and_may_leave_just_enough_room(tmp_path, file):
    arguments = ["--prompt-data", file, "--overlong-prompts=error"]
    check(tmp_path, *DATA, *arguments, "--max-response-length=56")
    base = [word for word in BASE if not word.startswith("--max-response-length")]
    with pytest.raises(ConfigurationError, match=r"--prompt-data .*--max-response-length"):
        configure([*base, f"--runs-dir={tmp_path}", "--reward=exact", *arguments], 1)


def test_labels_are_required_if_a_rule_compares_them(tmp_path):
    """Rows for a function need no label, nor do recorded rollouts, which have their rewards."""
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    folder = tmp_path / "records"
    rows = ["--prompt-data", path]
    folder_of_rollouts = f"--load-rollouts={folder}"
    folder.mkdir()
    save_rollouts(recorded_batch(0), folder / "step-0000000-replica-0000.safetensors")
    recorded = [*[word for word in DATA if not word.startswith("--reward")], folder_of_rollouts, "--train-iters=2"]
    for arguments in ([*DATA, "--reward=python:tests.support.user_rewards:length"], recorded):
        assert check(tmp_path, *arguments, *rows)[1].problems(0, 1)[0].label is None
    for arguments in (DATA, [*recorded, "--label-key=label"]):
        with pytest.raises(ConfigurationError, match=r"a.jsonl, line 1 .*'label'"):
            check(tmp_path, *arguments, *rows)


@pytest.mark.parametrize("rule", ["exact", "math-verify"])
def test_labels_that_a_rule_cannot_compare_are_refused_with_row_key_value_and_remedy(tmp_path, rule):
    """verl's own rows, whose label lies in an object; the words of the object would never be answered."""
    rows = [{"prompt": "a", "reward_model": ["b", 2]}]
    rows.append({"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "34"}})
    arguments = ["--prompt-data", write(tmp_path / "a.jsonl", rows), *DATA, f"--reward={rule}"]
    with refused(f"a.jsonl, line 2 | 'reward_model' | '34' | --reward {rule} | --label-key reward_model.ground_truth"):
        check(tmp_path, *arguments, "--label-key=reward_model")
    write(tmp_path / "a.jsonl", rows[1:])
    _, task = check(tmp_path, *arguments, "--label-key=reward_model.ground_truth")
    assert task.problems(0, 1)[0].label == "34"
    check(tmp_path, *arguments, "--label-key=reward_model", "--reward=python:tests.support.user_rewards:length")


def test_labels_of_a_task_are_looked_at_too(tmp_path):
    """The toy's label behind a nine is empty, which is no expression."""
    arguments = [*LLAMA, *COMMON, f"--runs-dir={tmp_path}", "--grpo-prompts-per-step=32", "--global-batch-size=128"]
    with refused("--task count_up | problem | an empty text | --reward math-verify"):
        configure([*arguments, "--reward=math-verify"], 1)
    configure([*arguments, "--reward=exact"], 1)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}[{{ m['content'] }}]{% endfor %}", "characters"])
def test_a_launch_files_template_needs_a_tokenizer_that_has_one(tmp_path, file, template, caplog):
    """The launch file's is dropped with a line where there is none; a typed one is an error."""
    (tmp_path / "run.yaml").write_text("apply-chat-template: true\n")
    arguments = [*DATA, "--prompt-data", file, f"--config={tmp_path}/run.yaml"]
    if template != "characters":
        folder = tokenizer_folder(tmp_path / "tokenizer", template=template)
        arguments.append(f"--tokenizer-model={folder}")
    applied = template not in (None, "characters")
    with caplog.at_level(logging.WARNING):
        config, task = check(tmp_path, *arguments)
    assert config.task.apply_chat_template == applied
    lines = [message for message in caplog.messages if "chat template" in message]
    assert len(lines) == (not applied)
    if template == "characters":
        return
    assert task.text.chat == applied
    assert all(f"{folder}" in line and f"--config {tmp_path}/run.yaml" in line for line in lines)
    shown = task.text.tokenizer.decode(task.text.encode(task.problems(0, 1)[0]))
    assert shown.startswith("[") == applied
    if not applied:
        with pytest.raises(ConfigurationError, match=r"--apply-chat-template: .*chat_template"):
            check(tmp_path, *arguments, "--apply-chat-template")


def test_the_page_shows_what_works(tmp_path, monkeypatch, capsys):
    """Its rows, launch file and command, as written; the model and the other files are made here."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    text = page[: page.index("## Evaluations")]
    (rows,) = re.findall(r"^```json\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    renamed = [{"question": row["prompt"], "answer": row["label"]} for row in map(json.loads, rows.splitlines())]
    for name in ("school", "puzzles", "test"):
        write(tmp_path / f"{name}.jsonl", renamed)
    model = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=300
    )
    transformers.AutoModelForCausalLM.from_config(model).save_pretrained("MODEL")
    tokenizer_folder("MODEL")
    (launch_file,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_run.yaml").write_text(launch_file)
    arguments = shlex.split(command.replace("\\\n", ""))
    assert arguments[:5] == ["python", "-m", "megatron_rc.launch", "--nproc-per-node", "2"]
    config, task = configure(arguments[5:], 2)
    assert [problem.messages[-1]["content"] for problem in task.problems(0, 2, held_out=True)] == [
        "What is 3 + 9?",
        "4 + 4 = ?",
    ]
    assert (config.evaluation.eval_problems, config.evaluation.eval_samples) == (2, 4)
    (as_list,) = re.findall(r"`(prompt-data: \[.*?\])`", text)
    (tmp_path / "my_run.yaml").write_text((tmp_path / "my_run.yaml").read_text() + as_list + "\n")
    start = arguments.index("--prompt-data")
    assert configure([*arguments[5:start], *arguments[start + 5 :]], 2)[0].data == config.data
