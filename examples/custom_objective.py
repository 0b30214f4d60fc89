"""An objective of one's own: ``--policy-loss python:examples.custom_objective:GOOD_ONLY``.

In bypass mode the flag is ``--loss-type``. Weights, masks, denominators and metrics need no further code.
"""

from megatron_rc.loss.objectives import Objective, TokenLoss, TokenTerms


def good_only(terms: TokenTerms) -> TokenLoss:
    """-max(A, 0) log π_θ of every token: tokens with a negative advantage add nothing."""
    return TokenLoss(-terms.advantages.clamp(min=0) * terms.log_probs)


GOOD_ONLY = Objective(
    "good_only",
    "log-likelihood of tokens with a positive advantage",
    good_only,
    weighed_in_bypass=True,  # its loss holds no ratio π_θ/π_rollout, so that the weights must multiply it
    by_sequence=False,  # log_ratio is each token's own, not the mean of its sequence
    clips=False,  # it does not clip the ratio: --grpo-clamp-eps-lower with it is an error
    takes_dual_clip=False,
)
