"""An estimator of advantages of one's own: ``--advantage-estimator python:examples.custom_estimator:MAXRL``.

Baselines, weights, rejected responses, data-parallel ranks and metrics need no further code.
"""

import torch
from torch import Tensor

from megatron_rc.advantages.estimators import AdvantageEstimator, PromptTerms


def maxrl(terms: PromptTerms) -> Tensor:
    """(x - mean) / mean over the responses to a prompt, for rewards from 0 to 1; 0 if all of them are 0."""
    return torch.where(terms.means == 0, 0, terms.centred / terms.means)


MAXRL = AdvantageEstimator(
    name="maxrl",
    words="(x - mean) / mean",
    advantage=maxrl,
    needs_several=True,  # the only response to a prompt has nothing to compare it with
)
