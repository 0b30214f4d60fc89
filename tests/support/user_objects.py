"""An objective and rejection criteria as a user's module may have them."""

from megatron_rc.loss.objectives import Objective, TokenLoss
from megatron_rc.settings.bounds import RATIO, UPPER
from megatron_rc.settings.criteria import K1, K3
from megatron_rc.settings.criterion import Criterion, Need

GOOD_ONLY = Objective(
    "own_good_only",
    "log-likelihood of what has a positive advantage",
    lambda terms: TokenLoss(-terms.advantages.clamp(min=0) * terms.log_probs),
    weighed_in_bypass=True,
    by_sequence=False,
    clips=False,
    takes_dual_clip=False,
)
SEQ_MIN = Criterion(
    "own_seq_min",
    "sequence",
    "sequences whose smallest ρ_t",
    RATIO,
    needs=(Need("min", K1),),
    statistic=lambda values: values.min(K1),
)
TAKEN = Criterion(
    "token_k3",
    "sequence",
    "sequences whose k3",
    UPPER,
    needs=(Need("sum", K3),),
    statistic=lambda values: values.sum(K3),
)
