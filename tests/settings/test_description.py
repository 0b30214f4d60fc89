"""The description of a config: every fact, and flags that make it again."""

import shlex

import pytest

from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.presets import PRESETS
from tests.settings.test_flags import from_flags
from tests.support.tables import table

DESCRIBED = [
    *(RolloutCorrectionConfig.preset(name) for name in PRESETS),
    RolloutCorrectionConfig(),
    RolloutCorrectionConfig(
        rollout_is="geometric",
        rollout_is_threshold=3,
        rollout_is_mode="clamp",
        rollout_is_threshold_lower=0.1,
        rollout_is_batch_normalize=True,
        rollout_is_batch_normalize_scope="accepted",
        rollout_rs="seq_sum_k1,group_any,opsm,group_mean_k2,seq_max_k3",
        rollout_rs_threshold="2,0.01,1,1",
        rollout_rs_threshold_lower=0.1,
        rollout_token_veto_threshold=1e-6,
        rejection_denominator="original",
        bad_log_probs="reject_sequence",
        metric_prefix="mis match's/",
    ),
    RolloutCorrectionConfig.from_dict({"use_tis": True, "tis_mode": "mask", "tis_batch_normalize": True}, "slime"),
]


@pytest.mark.parametrize("config", DESCRIBED, ids=range(len(DESCRIBED)))
def test_the_flags_of_a_description_make_the_same_config(config):
    lines = config.describe().splitlines()
    (flags,) = [line for line in lines if line.startswith("flags: ")]
    assert from_flags(*shlex.split(flags.removeprefix("flags: "))) == config
    assert lines[lines.index(flags) + 1 :] == [f"note: {note}" for note in config.notes]


def test_a_description_says_every_fact():
    assert DESCRIBED[-2].describe().splitlines()[:-1] == [
        "decoupled: π_old is computed, ρ = π_old / π_rollout, PPO's ratio is π_θ / π_old",
        "sequence weights w = (Π ρ_t)^(1/n), the geometric mean, clamped to [0.1, 3]",
        "the weights are divided by their mean over the accepted sequences of the global batch",
        "rejects sequences whose Π ρ_t is outside [0.1, 2] (seq_sum_k1)",
        "rejects all responses of a prompt of which one is rejected as a whole (group_any)",
        "rejects sequences with A < 0 whose mean of -log ρ is above 0.01 nats (opsm)",
        "rejects all responses of a prompt whose mean k2 = ½(log ρ)² over their tokens is above 1 nats (group_mean_k2)",
        "rejects sequences whose largest k3 = ρ - 1 - log ρ is above 1 nats (seq_max_k3)",
        "rejects sequences with a token whose ρ_t is below 1e-06 (veto)",
        "the loss is averaged over all trained tokens, rejected ones too",
        "a NaN, infinite or positive log-prob at a trained position: its sequence is rejected and counted",
        "metrics are named mis match's/…",
    ]


FACTS = """
disabled | the weights are measured, not applied
disabled | no rejection by divergence
decoupled_k3_rs | no importance weights
decoupled_token_is | token weights w_t = ρ_t, truncated at 2
decoupled_token_icepop | token weights w_t = ρ_t, 0 outside [0.5, 5]
decoupled_geo_rs | rejects sequences whose geometric mean ρ is outside [0.999, 1.001] (seq_mean_k1)
bypass_ppo_clip | bypass: π_old := π_rollout, ρ = π_θ / π_rollout; PPO clips ρ itself
measured | the weights are measured, not applied: the ratio of the loss is the correction
pg_is | bypass: π_old := π_rollout, ρ = π_θ / π_rollout; REINFORCE, without clipping
slime | token weights w_t = ρ_t, not truncated
slime | the weights are divided by their mean over the valid tokens of the global batch
"""


@table("name fact", FACTS)
def test_facts_of_a_description(name, fact):
    made = {"slime": DESCRIBED[-1], "measured": RolloutCorrectionConfig.ppo_is_bypass(2.0)}
    config = made.get(name) or RolloutCorrectionConfig.preset(name)
    assert fact in config.describe().splitlines()


def test_a_veto_that_is_only_measured_rejects_nothing():
    config = RolloutCorrectionConfig("token", rollout_is_apply=False, rollout_token_veto_threshold=1e-4)
    lines = config.describe().splitlines()
    assert "counts sequences with a token whose ρ_t is below 0.0001 (veto)" in lines
    assert "no rejection by divergence" in lines
    assert not config.rejects
