"""Rollout Correction for PPO with Megatron-Core, exact on sharded log-probs."""

from megatron_rc.config import RolloutCorrectionConfig
from megatron_rc.correction import RolloutCorrection, correct_rollouts
from megatron_rc.inputs import PlanInputs
from megatron_rc.result import CorrectionResult

__all__ = ["CorrectionResult", "PlanInputs", "RolloutCorrection", "RolloutCorrectionConfig", "correct_rollouts"]
