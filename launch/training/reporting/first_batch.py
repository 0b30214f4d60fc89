"""A warning after the first step of a start whose geometric bounds reject most of the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_rc.settings.config import RolloutCorrectionConfig

_NAME = "rollout_corr/rollout_rs_seq_mean_k1"
_MOST = 5.0  # nats of a mean log-ratio; policies that are further apart need a repair, not bounds
_WIDTH = 1.96  # deviations to each side of the mean that hold 95 % of normal numbers


def warn_of_bounds(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> str | None:
    """A sentence if bounds on geometric means reject more than half of the tokens, else None.

    ``metrics``: the metrics of a step under their usual names. The sentence names bounds that would reject about 5 % of
    the sequences, as if the logs of their geometric means were normal; none if these are beyond any use.
    """
    rejected = metrics.get(f"{_NAME}_masked_fraction", 0.0)
    bounds = next((criterion for criterion in correction.criteria if criterion.name == "seq_mean_k1"), None)
    if bounds is None or not rejected > 0.5:
        return None
    now = f"{math.exp(bounds.lower):.6g}_{math.exp(bounds.upper):.6g}"
    warning = f"warning: the bounds {now} on the geometric mean reject {rejected:.0%} of the first batch of this start"
    # The metrics describe -log ρ.
    middle = -metrics[f"{_NAME}_seq_mean"]
    width = _WIDTH * metrics[f"{_NAME}_seq_std"]
    if not 1e-6 < width < _MOST - abs(middle):
        return f"{warning}: measure the policies' distance first (python -m megatron_rc.doctor)"
    digits = max(3, 1 - math.floor(math.log10(width)), 2 + math.ceil((width - middle) / math.log(10)))
    lower = math.floor(math.exp(middle - width) * 10**digits) / 10**digits
    upper = math.ceil(math.exp(middle + width) * 10**digits) / 10**digits
    proposed = f"{lower:.{digits}f}_{upper:.{digits}f}"
    return f"{warning}; {proposed} would reject about 5 % of its sequences (--rollout-rs-threshold)"
