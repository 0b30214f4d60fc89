"""Things to try, of docs/launching.md and docs/quickstart.md: each works as it is written, on its launch file."""

import re

import pytest

from megatron_rc.launch.flags.configure import configure
from tests.support.paths import ROOT
from tests.support.ranks import Layout
from tests.support.training_runs import rows, run_training

PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("| try | flags |")[2].partition("\n\n")[0]
ROWS = dict(re.findall(r"^\| (.+) \| `(--.+)` \|$", TABLE, flags=re.MULTILINE))
QUICK_START = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
CHANGES = re.findall(r'^make run FLAGS="(.+)"$', QUICK_START, flags=re.MULTILINE)
# One small step of the launch file on one process.
SMALL = """--tensor-model-parallel-size=1 --pipeline-model-parallel-size=1 --no-sequence-parallel --cpu --train-iters=1
--grpo-iterations=1 --grpo-prompts-per-step=4 --grpo-group-size=2 --run-name=run --global-batch-size=8
--micro-batch-size=8""".split()


def marks_of(flags):
    """Marks of a test with these flags of the launcher."""
    return [pytest.mark.reasoning_gym] if "--task reasoning_gym:" in flags else []


def test_the_table_is_read():
    assert len(ROWS) == TABLE.count("\n|") - 1 > 8


@pytest.mark.parametrize("flags", [pytest.param(flags, id=row, marks=marks_of(flags)) for row, flags in ROWS.items()])
def test_every_row_is_a_run_of_the_launch_file(tmp_path, flags):
    config, task = configure(["--config=count_up", f"--runs-dir={tmp_path}", "--cpu", *flags.split()], 4)
    length = config.training.seq_length - config.rollouts.max_response_length
    prompts = task.problems(0, 500 if config.task.task.startswith("reasoning_gym") else 50)
    assert max(len(task.text.encode(problem)) for problem in prompts) <= length


@pytest.mark.parametrize("flags", [pytest.param(flags, id=flags, marks=marks_of(flags)) for flags in CHANGES])
def test_what_the_quick_start_changes_is_a_run(tmp_path, flags):
    config, _ = configure(["--config=count_up", f"--runs-dir={tmp_path}", "--cpu", *flags.split()], 4)
    assert config != configure(["--config=count_up", f"--runs-dir={tmp_path}", "--cpu"], 4)[0]


@pytest.mark.reasoning_gym
def test_the_task_of_another_library_is_learnt_from(ranks, tmp_path):
    """Sampled, rewarded and trained on: its questions, its alphabet, its longest response."""
    (arguments,) = (arguments for arguments in ROWS.values() if "reasoning_gym" in arguments)
    arguments = ["--config=count_up", f"--runs-dir={tmp_path}", *arguments.split(), *SMALL]
    assert ranks.run(run_training, Layout(), arguments) == [None]
    (row,) = rows(tmp_path)
    assert 0 < row["rollout/response_length"] <= 32
    assert row["rollout/tokens"] > 8
