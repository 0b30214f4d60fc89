"""An objective, an estimator and rejection criteria of a user's module: those of examples/ under other names."""

import dataclasses

from examples import custom_criterion, custom_estimator, custom_objective
from megatron_rc.settings.bounds import UPPER
from megatron_rc.settings.criteria import K3
from megatron_rc.settings.criterion import Criterion, Need

GOOD_ONLY = dataclasses.replace(custom_objective.GOOD_ONLY, name="own_good_only")
MAXRL = dataclasses.replace(custom_estimator.MAXRL, name="own_maxrl")
SEQ_MIN = dataclasses.replace(custom_criterion.SEQ_MIN, name="own_seq_min")
TAKEN = Criterion(
    "token_k3",
    "sequence",
    "sequences whose k3",
    UPPER,
    needs=(Need("sum", K3),),
    statistic=lambda values: values.sum(K3),
)
