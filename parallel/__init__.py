"""Tensors split over ranks: the tokens and the vocabulary rows that each rank holds."""

from megatron_rc.parallel.divergence import vocab_parallel_divergence
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.linear import linear_log_probs_and_entropy
from megatron_rc.parallel.linear_divergence import linear_divergence
from megatron_rc.parallel.processor import log_prob_processor
from megatron_rc.parallel.request import LogProbRequest, LogProbs
from megatron_rc.parallel.teacher import TeacherStates, TeacherTopK
from megatron_rc.parallel.top_k import linear_top_k_divergence, top_k_divergence
from megatron_rc.parallel.vocab import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy

__all__ = [
    "LogProbRequest",
    "LogProbs",
    "ParallelGroups",
    "SequenceLayout",
    "TeacherStates",
    "TeacherTopK",
    "linear_divergence",
    "linear_log_probs_and_entropy",
    "linear_top_k_divergence",
    "log_prob_processor",
    "top_k_divergence",
    "vocab_parallel_divergence",
    "vocab_parallel_log_probs",
    "vocab_parallel_log_probs_and_entropy",
]
