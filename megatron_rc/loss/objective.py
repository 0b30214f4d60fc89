"""The records of an objective under the name that they had before: ``megatron_rc.loss.objectives`` has them."""

from megatron_rc.loss.objectives import Objective, TokenLoss, TokenTerms

__all__ = ["Objective", "TokenLoss", "TokenTerms"]
