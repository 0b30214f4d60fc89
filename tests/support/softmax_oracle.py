"""Log-probs, entropy and Σπ² of a softmax by their formulas, which every way of the library to make them must equal."""

import torch


def log_probs_entropy_squares(logits, labels, *, counted=None, kept=None, entropy_over_kept=False):
    """Log-prob of each label, entropy and Σπ² of dense logits, [3, ...], in their graph.

    Args:
        logits: [..., v], float64, divided by the temperature, without columns of padding.
        labels: [...] int64; what stands at tokens that do not count is not read.
        counted: [...] bool, results elsewhere are 0. Default: labels of 0 and above.
        kept: [..., v] bool: log-probs and Σπ² are those of a softmax over these tokens. Default: over all.
        entropy_over_kept: the entropy is over the kept tokens, too.
    """
    counted = labels >= 0 if counted is None else counted
    of_all = logits.log_softmax(-1)
    of_kept = of_all
    if kept is not None:
        of_kept = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)

    label = labels.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    log_probs = of_kept.gather(-1, label).squeeze(-1)
    of_entropy = of_kept if entropy_over_kept else of_all
    probabilities = of_entropy.exp()
    entropy = -(probabilities * of_entropy.masked_fill(probabilities == 0, 0)).sum(-1)
    squares = of_kept.exp().square().sum(-1)
    return torch.where(counted, torch.stack([log_probs, entropy, squares]), 0)
