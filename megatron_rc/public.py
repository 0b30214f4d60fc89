"""The list of public names, which ``megatron_rc`` hands out: what a user imports from it, and nothing else.

``docs/design.md`` begins with the words and symbols that their docstrings use.
"""

from megatron_rc.advantages.distillation import distillation_advantages
from megatron_rc.advantages.group import group_advantages
from megatron_rc.advantages.returns import TokenAdvantages, gae, outcome_rewards, reinforce_plus_plus, remax, whiten
from megatron_rc.advantages.token_baseline import optimal_token_baseline
from megatron_rc.batch.chain import (
    CorrectionResult,
    batch_sums,
    correct_rollouts,
    finish,
    group_sums,
    reduce_batch,
    reduce_groups,
    reduce_sequences,
    sequence_sums,
)
from megatron_rc.correction.inputs import AgreedCounts, PlanInputs, collect_shards
from megatron_rc.loss.aggregation import aggregate_loss
from megatron_rc.loss.kl import kl_penalty
from megatron_rc.loss.policy import PolicyLossConfig, policy_loss
from megatron_rc.records.formats.jsonl import from_json_lines, read_jsonl, to_json_lines, write_jsonl
from megatron_rc.records.formats.nemo_rl import from_nemo_rl, to_nemo_rl
from megatron_rc.records.formats.slime import from_slime, to_slime
from megatron_rc.records.formats.verl import from_verl, to_verl
from megatron_rc.records.rollout import RolloutBatch, SamplingParams, load_rollouts, save_rollouts
from megatron_rc.records.support import support_of
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.flags import (
    add_rollout_correction_args,
    policy_loss_config_from_args,
    rollout_correction_config_from_args,
)
from megatron_rc.training.micro_batch import MicroBatch
from megatron_rc.training.plan import LossScale, StepError
from megatron_rc.training.rollout_correction import RolloutCorrection
from megatron_rc.training.schedule import masked_loss, wrap_finalize

__all__ = [
    "AgreedCounts",
    "CorrectionResult",
    "LossScale",
    "MicroBatch",
    "PlanInputs",
    "PolicyLossConfig",
    "RolloutBatch",
    "RolloutCorrection",
    "RolloutCorrectionConfig",
    "SamplingParams",
    "StepError",
    "TokenAdvantages",
    "add_rollout_correction_args",
    "aggregate_loss",
    "batch_sums",
    "collect_shards",
    "correct_rollouts",
    "distillation_advantages",
    "finish",
    "from_json_lines",
    "from_nemo_rl",
    "from_slime",
    "from_verl",
    "gae",
    "group_advantages",
    "group_sums",
    "kl_penalty",
    "load_rollouts",
    "masked_loss",
    "optimal_token_baseline",
    "outcome_rewards",
    "policy_loss",
    "policy_loss_config_from_args",
    "read_jsonl",
    "reduce_batch",
    "reduce_groups",
    "reduce_sequences",
    "reinforce_plus_plus",
    "remax",
    "rollout_correction_config_from_args",
    "save_rollouts",
    "sequence_sums",
    "support_of",
    "to_json_lines",
    "to_nemo_rl",
    "to_slime",
    "to_verl",
    "whiten",
    "wrap_finalize",
    "write_jsonl",
]
