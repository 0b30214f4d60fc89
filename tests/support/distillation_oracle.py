"""Divergences of two policies by plain expressions over whole logits, for float64."""

import torch


def sampled_log_probs(logits, tokens):
    """[n, s - 1], log-prob of each token but the first; ``logits``: [n, s - 1, v]."""
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def divergences(logits, teacher_logits, kind, beta):
    """[n, s - 1] of [n, s - 1, v]: KL(student ‖ teacher), KL(teacher ‖ student), or the generalised Jensen-Shannon.

    JSD(β) = β KL(teacher ‖ M) + (1 - β) KL(student ‖ M), M = β teacher + (1 - β) student.
    """
    student = logits.log_softmax(-1)
    teacher = teacher_logits.log_softmax(-1)
    if kind == "reverse_kl":
        return _kl(student, teacher)
    if kind == "forward_kl":
        return _kl(teacher, student)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def top_k_divergence(logits, top_ids, top_log_probs, labels, label_log_probs, tail):
    """[n, s - 1], KL(student ‖ teacher) from the teacher's likeliest tokens [n, s - 1, k]; see the flags' help."""
    student = logits.log_softmax(-1)
    of_top = student.gather(-1, top_ids)
    if tail == "none":
        return _kl(of_top.log_softmax(-1), top_log_probs.log_softmax(-1))
    inside = _kl(of_top, top_log_probs)
    if tail == "rest":
        rest = (1 - of_top.exp().sum(-1)).log()
        rest_of_teacher = (1 - top_log_probs.exp().sum(-1)).log()
        return inside + rest.exp() * (rest - rest_of_teacher)
    if tail != "sampled":
        raise ValueError(tail)
    log_prob = student.gather(-1, labels[..., None]).squeeze(-1)
    is_in_top = (top_ids == labels[..., None]).any(-1)
    # For a token that p samples, x = log p/q has the mean KL(p ‖ q), and (x + 1) ∇log p has the mean of its gradient.
    log_ratio = (log_prob - label_log_probs).detach()
    estimate = log_ratio + (log_ratio + 1) * (log_prob - log_prob.detach())
    return inside + torch.where(is_in_top, 0, estimate)


def _kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)
