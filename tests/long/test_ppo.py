"""``make run-ppo`` learns the task: its command, as the Makefile has it, with its own number of steps."""

import re
import shlex

from tests.support.paths import ROOT
from tests.support.runs import finish, launch, read, start


def test_the_critic_and_the_policy_learn_the_task(tmp_path):
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    command = re.search(r"^run-ppo:.*?launch (.*?) \$\(FLAGS\)$", text, flags=re.MULTILINE | re.DOTALL).group(1)
    arguments = shlex.split(command.replace("$(NPROC)", "4"))
    code, _, errors = finish(start(launch(*arguments, f"--runs-dir={tmp_path}")), timeout=1800)
    assert code == 0, errors
    rows = read(tmp_path / "count_up_ppo")
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-10:]) / 10 >= 0.9
    assert max(row["critic/explained_variance"] for row in rows) > 0.2
