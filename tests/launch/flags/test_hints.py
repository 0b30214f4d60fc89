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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "--adv-estimator",
            "did you mean --advantage-estimator?",
        ),
        ("algorithm.adv_estimator", "did you mean --advantage-estimator?"),
        ("actor_rollout_ref.actor.optim.lr", "did you mean --lr?"),
        ("--nproc_per_node", "it stands on the command line of `python -m megatron_rc.launch`"),
        ("--output-dir", "did you mean --save?"),
        ("--n_samples_per_prompt", "did you mean --grpo-group-size?"),
        ("--attention_backend", "did you mean --attention-backend?"),
        ("--atention-backend", "did you mean --attention-backend?"),
        ("--use-flash-attn", "did you mean --attention-backend?"),
        ("--use-mcore-models", "what it asks for is always so here: leave it out"),
        ("--use-rotary-position-embeddings", "use --position-embedding-type rope"),
        ("--mock-data", "it is of Megatron-LM's data for pretraining; prompts come from --task or --prompt-data"),
        ("--no-load-rng", "it is of Megatron-LM's own training loop"),
        ("--cache-mla-latents", "it changes how multi-latent attention is computed"),
        ("--n-samples-per-promt", "did you mean --grpo-group-size?"),
        ("--nproc_per_nod", "did you mean --nproc-per-node? it stands on the command line of"),
        ("--nnode", "did you mean --nnodes? it stands on the command line of"),
        ("--rdzv_endpont", "did you mean --rdzv-endpoint? it stands on the command line of"),
        ("--max-restart", "did you mean --max-restarts? it stands on the command line of"),
        ("--mock-dat", "if --mock-data is meant, it is of Megatron-LM's data for pretraining"),
        ("--eval-iters", "did you mean --eval-problems?"),
        ("--zzz", "--help-all lists them"),
    ],
)
def test_an_unknown_flag_gets_a_hint(parser, name, hint):
    assert unknown("flag", name, parser).startswith(f"unknown flag {name!r}: {hint}")


def test_all_unknown_flags_are_named_at_once():
    """Who comes with a script of another program has many."""
    words = "--mock-data --output-dir out --lr 1e-3 --split 99,1 --split=1"
    hints = "'--mock-data': .*; unknown flag '--output-dir': .*; unknown flag '--split': [^;]*$"
    with pytest.raises(ConfigurationError, match=hints):
        parse_args(words.split())


def test_the_hint_stands_in_the_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"unknown flag '--output-dir': did you mean --save\?"):
        parse_args(["--output-dir=out"])
    (tmp_path / "a.yaml").write_text("eps-clip: 0.2\n")
    with pytest.raises(ConfigurationError, match=r"unknown key 'eps-clip': did you mean grpo-clamp-eps-lower\?"):
        parse_args([f"--config={tmp_path}/a.yaml"])
