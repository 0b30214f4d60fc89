"""A run's ``config.yaml``, and what --print-config prints, is a launch file that makes the same run."""

import re
import shlex
from dataclasses import replace

import pytest

from megatron_rc.launch.__main__ import main, torchrun_arguments
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.launch_file import CONFIGS
from megatron_rc.launch.resolved_file import as_launch_file, as_mapping
from megatron_rc.launch.training.reporting.config_yaml import write_settings
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.presets import PRESETS
from tests.launch.flags.test_rows_to_try import ROWS, marks_of
from tests.support.paths import ROOT
from tests.support.recorded_training import flags

# Those for many GPUs are tried in tests/launch/dry_run, and smollm2_sums in tests/examples, which makes its prompts.
SMALL = [path.stem for path in sorted((CONFIGS / "launch").glob("*.yaml")) if not path.match("*gpus.yaml")]
SMALL.remove("smollm2_sums")
COUNT_UP = ["--config=count_up", "--cpu"]
MORE = {
    "batch": "--global-batch-size=128 --micro-batch-size=128 --lr=1e-7 --min-lr=1e-08 --weight-decay=0.1",
    "named": "--run-name=0.5_2 --runs-dir=runs/ä --tensorboard-dir=#1",
    "idle-in-the-file": "--policy-loss=reinforce --grpo-kl-beta=0",
    "experts": ROWS["a mixture of experts"] + " --moe-z-loss-coeff=1e-3",
    "no-weights": "--rollout-is=none --rollout-rs=token_k1,seq_mean_k3 --rollout-rs-threshold=0.5_2,0.27",
    "megatron": "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef=3",
    "guards": "--bad-steps=skip --max-skipped-steps=3 --stop-if grad_norm>=1e3 lr<1e-9 --doctor-interval=5",
    "servers": "--rollout-engine=vllm-server --rollout-url=http://a:1 --rollout-weights-dir=w --rollout-dtype=bf16",
    "evaluations": "--task=python:tests.support.user_rewards:Doubles --reward=exact --eval-interval=2",
    "passed-through": "--overlap-grad-reduce --no-rope-fusion --recompute-granularity=selective "
    "--recompute-modules core_attn mlp --decoupled-lr=1e-4 --use-cpu-initialization",
}
RUNS = {
    **{name: [f"--config={name}"] for name in SMALL},
    **{f"row-{number}": [*COUNT_UP, *words.split()] for number, words in enumerate(ROWS.values())},
    **{name: [*COUNT_UP, *words.split()] for name, words in MORE.items()},
    **{f"preset-{name}": [*COUNT_UP, f"--rollout-correction-preset={name}"] for name in sorted(PRESETS)[::6]},
}


def resolved(words):
    return configure(words, 4, folders=False)[0]


def without_idle(config, other):
    """The clip bounds of an objective that clips nothing are those of the other."""
    if OBJECTIVES[config.loss.algorithm].clips:
        return config
    bounds = {name: getattr(other.loss, name) for name in ("clip_low", "clip_high")}
    return replace(config, loss=replace(config.loss, **bounds))


@pytest.mark.parametrize("run", [pytest.param(run, marks=marks_of(" ".join(words))) for run, words in RUNS.items()])
def test_the_file_makes_the_same_run(run, tmp_path):
    config = resolved(RUNS[run])
    assert run not in SMALL or config.launch.run_name == run
    path = tmp_path / "config.yaml"
    path.write_text(as_launch_file(config.flags), encoding="utf-8")
    again = resolved([f"--config={path}"])
    assert again == without_idle(config, again)
    assert as_mapping(again.flags) == as_mapping(config.flags)
    assert as_launch_file(again.flags) == as_launch_file(config.flags)


def test_every_flag_is_there_given_or_not():
    config = resolved([*COUNT_UP, "--lr=0.5"])
    lines = as_launch_file(config.flags).splitlines()
    assert "lr: 0.5" in lines
    assert "# adam-eps: 1e-08" in lines, "a default"
    assert "# vocab-size: 13" in lines, "follows from the task"
    assert "hidden-size: 64" in lines, "from the launch file"
    assert "rollout-is-threshold: 2.0" in lines, "from the preset in the launch file"
    assert "rollout-is: token" in lines, "likewise"
    assert not [line for line in lines if "preset" in line]
    values = as_mapping(config.flags)
    assert (values["lr"], values["seed"], values["load"]) == (0.5, 1234, None)


def test_another_file_of_the_run_is_kept(tmp_path):
    for rate in ("1", "1", "2"):
        (tmp_path / "run").mkdir(exist_ok=True)
        assert write_settings(resolved(flags(tmp_path, "--run-name=run", f"--lr={rate}"))) is None
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert len(names) == 2
    assert "\nlr: 1.0\n" in (tmp_path / "run" / names[0]).read_text()
    assert "\nlr: 2.0\n" in (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=rf"^{tmp_path}/file/config\.yaml cannot be written"):
        write_settings(resolved(flags(tmp_path, "--run-name=file")))


def test_print_config_prints_and_starts_nothing(tmp_path, capsys):
    """The command of docs/launching.md, but for the interpreter's start."""
    text = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python -m megatron_rc.launch (.*--print-config.*) > my_run.yaml$", text, re.MULTILINE)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command))
    output, errors = capsys.readouterr()
    assert (end.value.code, errors) == (0, "")
    (tmp_path / "my_run.yaml").write_text(output, encoding="utf-8")
    assert resolved([f"--config={tmp_path}/my_run.yaml"]) == resolved(["--config=count_up", "--lr=1e-3"])
    assert re.search("^# python 3.* · torch 2.*$", output, flags=re.MULTILINE)
    with pytest.raises(ConfigurationError, match=r"^--lr -1\.0 "):
        torchrun_arguments(["--config=count_up", "--nproc-per-node=4", "--print-config", "--lr=-1"])
