"""What the error for an unknown flag or key says was meant."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import parse_args
from megatron_rc.launch.flags.hints import _MEANT, _OTHERWISE, _SOURCES, unknown
from megatron_rc.launch.flags.parser import build_parser, long_options


@pytest.fixture(scope="module")
def parser():
    return build_parser()


def test_every_hint_is_for_a_name_that_is_unknown_and_leads_to_one_that_is_not(parser):
    known = set(long_options(parser))
    assert set(_MEANT) <= known
    assert not {*_SOURCES, *_OTHERWISE} & known
    assert not set(_SOURCES) & set(_OTHERWISE)
    assert len(_SOURCES) == sum(len(names.split()) for names in _MEANT.values()), "a name stands for one flag"


HINTS = {
    "--adv-estimator": "--advantage-estimator?",
    "actor_rollout_ref.actor.optim.lr": "--lr?",
    "--nproc_per_node": "`python -m megatron_rc.launch`",
    "--atention-backend": "--attention-backend?",
    "--n-samples-per-promt": "--grpo-group-size?",
    "--nproc_per_nod": "if --nproc-per-node is meant, give it to `python -m megatron_rc.launch`",
    "--mock-dat": "--mock-data",
    "--n-samples-per-eval-prompt": "--eval-samples?",
    "--num-layer": "--num-layers?",
    "--tensor-model-parallel": "--tensor-model-parallel-size?",
    "--max-response-len": "--max-response-length?",
    "--from-scrach": "--from-scratch?",
    "--use-flash-attention-2": "--attention-backend?",
    "--metadata-key": "record",
    "--hybrid-layer-pattern": "Mamba layers are not trained here any more",
    "--zzz": "--help-all",
}


@pytest.mark.parametrize("name", HINTS)
def test_an_unknown_flag_gets_a_hint(parser, name):
    sentence = unknown("flag", name, parser)
    assert sentence.startswith(f"unknown flag {name!r}: ")
    assert HINTS[name] in sentence


@pytest.mark.parametrize(
    "name",
    # Flags of other programs and of none, which only begin like flags here, or share some letters with them.
    """--rollout-halt --enable-reasoning --rollout-seed --rollout-shuffle --rollout
    --rollout-x --rollout-max-context-len --lr-decay-step --apply-chat-template-arguments --rollout-function-path
    --eval-top-p --balance-data --use-kl-loss --offload --reward-key --wandb-team --deepspeed""".split(),
)
def test_a_shared_beginning_is_no_hint(parser, name):
    assert unknown("flag", name, parser) == f"unknown flag {name!r}: --help-all lists them"


WRONG = {
    "--config none": "--config none.*count_up",
    "--tensor-model-parallel": "'--tensor-model-parallel': .*--tensor-model-parallel-size",
    "--num-layers two": "--num-layers.*'two'",
    "stray": "'stray'",
    # A script of another program has many unknown flags; all are named at once.
    "--mock-data --output-dir out --lr 1e-3 --split 99,1 --split=1": "'--mock-data': .*; .*'--output-dir': .*--save.*; "
    ".*'--split': [^;]*$",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words_are_named(words):
    with pytest.raises(ConfigurationError, match=WRONG[words]):
        parse_args(words.split())
