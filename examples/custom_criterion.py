"""A rejection criterion of one's own: ``--rollout-rs python:examples.custom_criterion:SEQ_MIN``.

It works beside others: ``--rollout-rs token_k1,python:examples.custom_criterion:SEQ_MIN`` with
``--rollout-rs-threshold 0.9_1.1,0.5_10``. Its metrics and errors, and the smallest value of a response whose tokens lie
on several ranks, need no further code.
"""

from megatron_rc.settings.bounds import RATIO
from megatron_rc.settings.criteria import K1
from megatron_rc.settings.criterion import Criterion, Need

SEQ_MIN = Criterion(
    "seq_min_k1",
    "sequence",  # one verdict for each response
    "sequences whose smallest ρ_t",
    RATIO,  # two bounds on a ratio: 0.5_10; one number u means 1/u to u
    needs=(Need("min", K1),),  # the smallest log ρ of the response's tokens
    statistic=lambda values: values.min(K1),
)
