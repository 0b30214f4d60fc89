"""The commands of replay in docs/doctor.md run as they are written."""

import re
import shlex

from megatron_rc.launch.flags.configure import configure
from megatron_rc.records.rollout import save_rollouts
from megatron_rc.replay.__main__ import main
from tests.replay.batches import scored_batch
from tests.support.paths import ROOT


def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").partition("\n## Replay\n")[2]
    (commands,) = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    launch, *replays = commands.splitlines()
    arguments = shlex.split(launch)
    assert arguments[:7] == ["python", "-m", "megatron_rc.launch", "--config", "count_up", "--nproc-per-node", "4"]
    config, _ = configure([*arguments[3:5], *arguments[7:], "--cpu", f"--runs-dir={tmp_path}"], 4)
    assert (config.rollouts.save_rollouts, config.rollouts.save_log_probs) == ("records", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records").mkdir()
    save_rollouts(scored_batch(), tmp_path / "records" / "step-0000003-replica-0000.safetensors")
    for replay in replays:
        arguments = shlex.split(replay)
        assert arguments[:3] == ["python", "-m", "megatron_rc.replay"]
        assert main(arguments[3:]) == 0
    assert "decoupled_token_is rollout_is_threshold=1.5" in capsys.readouterr().out
    assert (tmp_path / "replay.html").stat().st_size > 10000
