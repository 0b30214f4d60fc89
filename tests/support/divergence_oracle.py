"""Divergences of two distributions by their definitions, in float64. Imports nothing of the library."""

import torch


def divergence(kind, student, teacher, *, beta=0.5, kept=None):
    """The divergence at each position, [...], in the student's graph.

    Args:
        kind: ``reverse_kl``, ``forward_kl`` or ``jsd``.
        student: [..., v], float64 logits, divided by the temperature, without columns of padding.
        teacher: like ``student``.
        beta: β of ``jsd``.
        kept: [..., v] bool: both distributions are over these tokens. Default: over all.
    """
    if kept is not None:
        student = student.masked_fill(~kept, -torch.inf)
        teacher = teacher.masked_fill(~kept, -torch.inf)
    return of_log_probs(kind, student.log_softmax(-1), teacher.log_softmax(-1), beta)


def of_log_probs(kind, log_p, log_q, beta):
    """As :func:`divergence`, of log-probs."""
    p = log_p.exp()
    q = log_q.exp()
    if kind == "reverse_kl":
        return mean_of(p, log_p, log_q)
    if kind == "forward_kl":
        return mean_of(q, log_q, log_p)
    mixture = beta * q + (1 - beta) * p
    log_mixture = torch.where(mixture == 0, 1, mixture).log()
    return beta * mean_of(q, log_q, log_mixture) + (1 - beta) * mean_of(p, log_p, log_mixture)


def mean_of(weights, first, second):
    """Σ w (first - second) over the last dimension, in which a weight of 0 counts for nothing."""
    difference = torch.where(weights == 0, 0, first) - torch.where(weights == 0, 0, second)
    return (weights * difference).sum(-1)


def of_top_k(tail, kind, student, teacher, ids, *, beta=0.5, label=None):
    """The divergence at one position from a few of the teacher's tokens, 0-D, in the student's graph.

    Args:
        tail: ``sampled``, ``rest`` or ``none``.
        kind: as for :func:`divergence`.
        student: [v], float64 logits, divided by the temperature.
        teacher: [v], float64 logits of the whole distribution.
        ids: list of the tokens that are known.
        beta: β of ``jsd``.
        label: the sampled token, for ``sampled``; its summand has the gradient of the mean over such tokens.
    """
    log_p = student.log_softmax(-1)
    log_q = teacher.log_softmax(-1)
    others = [token for token in range(len(student)) if token not in ids]
    if tail == "none":
        return divergence(kind, student[ids], teacher[ids], beta=beta) if ids else 0 * student.sum()
    if tail == "rest":
        events = [log[ids] for log in (log_p, log_q)]
        if others:
            events = [
                torch.cat([of_ids, log[others].logsumexp(0, keepdim=True)])
                for of_ids, log in zip(events, (log_p, log_q), strict=True)
            ]
        return of_log_probs(kind, *events, beta)
    known = of_log_probs(kind, log_p[ids], log_q[ids], beta)
    if label in ids:
        return known
    # Of a sum over v of f(v) the summand of one v, divided by its probability.
    summand = of_log_probs(kind, log_p[[label]], log_q[[label]], beta)
    return known + summand / log_p[label].exp().detach()
