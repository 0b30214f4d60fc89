"""An objective of one's own: ``--policy-loss python:examples.custom_objective:GOOD_ONLY``.

In bypass mode the flag is ``--loss-type``. Weights, masks, denominators and metrics follow by themselves.
"""

from megatron_rc.loss.objectives import Objective, TokenLoss, TokenTerms


def good_only(terms: TokenTerms) -> TokenLoss:
    """-max(A, 0) log π_θ of every token: what has a negative advantage is not unlearnt."""
    return TokenLoss(-terms.advantages.clamp(min=0) * terms.log_probs)


GOOD_ONLY = Objective(
    "good_only",
    "log-likelihood of what has a positive advantage",
    good_only,
    weighed_in_bypass=True,  # there its loss holds no ratio π_θ/π_rollout, so the weights must multiply it
    by_sequence=False,  # log_ratio is each token's own, not the mean of its sequence
    clips=False,  # it does not clip the ratio: --grpo-clamp-eps-lower beside it is an error
    takes_dual_clip=False,
)
