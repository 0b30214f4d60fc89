"""What the error for an unknown flag or key says was meant."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.command import read_command
from megatron_rc.launch.flags.hints import _OF_OTHER_PROGRAMS, unknown
from megatron_rc.launch.flags.parser import build_parser, long_options
from tests.support.refusals import refused


def test_names_of_other_programs_are_unknown_here_and_lead_to_flags():
    flags = set(long_options(build_parser()))
    assert set(_OF_OTHER_PROGRAMS.values()) <= flags
    assert not set(_OF_OTHER_PROGRAMS) & flags


HINTS = {
    "--adv-estimator": "--advantage-estimator",
    "actor_rollout_ref.actor.optim.lr": "--lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "--global-batch-size",
    "--atention-backend": "--attention-backend",
    "--n-samples-per-promt": "--grpo-group-size",
    "--nproc_per_nod": "--nproc-per-node",
    "--num-layer": "--num-layers",
    "--tensor-model-parallel": "--tensor-model-parallel-size",
    "--max-response-len": "--max-response-length",
    "--from-scrach": "--from-scratch",
    "--hf-checkpoint": "--load-hf",
    "--learning-rate": "--lr",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--use_rollout_logprobs": "--bypass-mode",
    "--tis-clip": "--rollout-is-threshold",
}


@pytest.mark.parametrize("name", HINTS)
def test_an_unknown_flag_gets_a_hint(name):
    assert unknown("flag", name) == f"unknown flag {name!r}: did you mean {HINTS[name]}?"


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-6", "--lr"),
        ("algorithm.adv_estimator=grpo", "--advantage-estimator"),
        (
            "+algorithm.rollout_correction.rollout_is=token",
            "--rollout-correction-config FILE --rollout-correction-dialect verl",
        ),
        ("rollout_correction.rollout_is=token", "--rollout-correction-config FILE"),
        ("trainer.logger=console", "--help-all"),
    ],
)
def test_a_hydra_override_gets_a_hint(word, parts):
    with refused(parts):
        read_command(["--lr=1e-3", word])


@pytest.mark.parametrize(("what", "name"), [("key", "dry-run"), ("key", "config"), ("flag", "--print-config")])
def test_a_flag_of_the_command_line_is_not_proposed_in_its_own_place(what, name):
    assert unknown(what, name).startswith(f"{what} {name!r} belongs to the command line")


@pytest.mark.parametrize("name", ["load-last-valid", "--load_last_valid", "--no-load-last-valid"])
def test_a_removed_flag_gets_its_remedy(name):
    assert unknown("key", name) == f"key {name!r} is gone: name a whole checkpoint with --ckpt-step"


@pytest.mark.parametrize(
    "name",
    # Flags of other programs and of none, which only begin like flags here, or share some letters with them.
    """--rollout-halt --enable-reasoning --rollout-seed --rollout-shuffle --rollout
    --rollout-x --rollout-max-context-len --lr-decay-step --apply-chat-template-arguments --rollout-function-path
    --eval-top-p --balance-data --use-kl-loss --offload --reward-key --wandb-team --deepspeed
    --zzz --mock-data --top --eps""".split(),
)
def test_a_shared_beginning_is_no_hint(name):
    assert unknown("flag", name) == f"unknown flag {name!r}: --help-all lists them"


WRONG = {
    "--config none": "--config none.*count_up",
    "--tensor-model-parallel": "'--tensor-model-parallel': .*--tensor-model-parallel-size",
    "--num-layers two": "--num-layers.*'two'",
    "stray": "'stray'",
    "--save=": "--save has an empty value",
    "--eval-data=a.jsonl --eval-data=": "--eval-data has an empty value",
    # A script of another program has many unknown flags; all are named at once.
    "--mock-data --num-rollout 3 --lr 1e-3 --split 99,1 --split=1": "'--mock-data': .*; .*'--num-rollout': .*iters.*; "
    ".*'--split': [^;]*$",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words_are_named(words):
    with pytest.raises(ConfigurationError, match=WRONG[words]):
        read_command(words.split())
