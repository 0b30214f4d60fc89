"""Rollout Correction for PPO with Megatron-Core, exact on sharded log-probs."""

from megatron_rc.config import RolloutCorrectionConfig
from megatron_rc.correction import CorrectionResult, PlanInputs, RolloutCorrection, correct_rollouts

__all__ = ["CorrectionResult", "PlanInputs", "RolloutCorrection", "RolloutCorrectionConfig", "correct_rollouts"]
