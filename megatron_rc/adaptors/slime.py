"""slime: weights and rejection for ``--custom-tis-function-path``, of ragged responses, exact over CP ranks.

Arguments and results follow slime of 21 August 2026 (commit 624b824), ``policy_loss_function`` in
``slime/backends/megatron_utils/loss.py``. See docs/adaptors.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rc.adaptors.shared import check_micro_batch_config, checked_tensor, corrected, refuse, token_metrics
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group, ParallelGroups, group_rank, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.dialects.slime import BUILT_IN, OF_EXAMPLES, SLIME

Answer = tuple[Tensor, list[Tensor], dict[str, Tensor]]
# Prefixes of this function's names in ``--custom-config-path``: an unknown name with one of them is an error.
_PREFIXES = ("tis_", "rs_", "mis_")


class Chunks:
    """The tokens of ragged responses that a CP rank holds, as slime cuts them.

    A sequence is padded to 2·cp equal chunks; a rank holds two. The local tokens of a response are the positions in
    these chunks that predict one of its tokens: from the prompt's last position to the sequence's last but one.

    Args:
        total_lengths: tokens of prompt and response of each sequence.
        response_lengths: tokens of each response.
        cp: the group that holds the other chunks.

    Attributes:
        cp: the group that holds the other chunks.
        lengths: tokens of each whole response.
        counts: local tokens of each response.
        layout: the local chunks of whole sequences, packed.

    Raises:
        ValueError: impossible lengths.
    """

    def __init__(self, total_lengths: Sequence[int], response_lengths: Sequence[int], cp: Group | None) -> None:
        for index, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
            if not 0 <= response < total:
                raise ValueError(
                    f"response_lengths[{index}]={response}: expected 0 or more, below total_lengths {total}"
                )
        self.cp = cp
        self.lengths = list(response_lengths)
        cp_size = group_size(cp)
        num_chunks = 2 * cp_size if cp_size > 1 else 1
        padded_lengths = [-(-total // num_chunks) * num_chunks for total in total_lengths]
        local_lengths = [length // cp_size for length in padded_lengths]
        self.layout = SequenceLayout.packed([0, *accumulate(local_lengths)], cp_rank=group_rank(cp), cp_size=cp_size)

        # The response's token that each local position predicts, from 0; outside of the response for other positions.
        sequence = self.layout.sequence_index
        totals = torch.tensor(total_lengths, dtype=torch.int64)
        responses = torch.tensor(self.lengths, dtype=torch.int64)
        first_positions = totals - responses - 1
        token = self.layout.positions() - first_positions[sequence]
        is_of_response = (token >= 0) & (token < responses[sequence])

        # [t]: index of each local token in the layout's shape, and in all whole responses, one after the other.
        self._index_in_layout = is_of_response.nonzero().squeeze(1)
        response_starts = responses.cumsum(0) - responses
        self._index_in_responses = (token + response_starts[sequence])[self._index_in_layout]
        self.counts = torch.bincount(sequence[self._index_in_layout], minlength=len(self.lengths)).tolist()

    def joined(self, name: str, values: Sequence[Tensor]) -> Tensor:
        """The local tokens of all responses, [t], one response after the other, from one tensor for each response."""
        return torch.cat(self._checked(name, values, self.counts)).detach()

    def cut(self, name: str, values: Sequence[Tensor]) -> Tensor:
        """The local tokens of all responses, [t], from tensors of whole responses."""
        whole_responses = torch.cat(self._checked(name, values, self.lengths))
        return whole_responses[self._index_in_responses.to(whole_responses.device)]

    def spread(self, values: Tensor) -> Tensor:
        """Values of local tokens, [t], in the layout's shape, with 0 at prompts and padding."""
        spread_values = values.new_zeros(self.layout.shape)
        spread_values[self._index_in_layout.to(values.device)] = values
        return spread_values

    def local(self, values: Tensor) -> Tensor:
        """The values of local tokens, [t], from values in the layout's shape: the inverse of ``spread``."""
        return values[self._index_in_layout.to(values.device)]

    def whole_masks(self, masks: Sequence[Tensor], accepted: Tensor) -> list[Tensor]:
        """The masks of whole responses, with 0 at rejected tokens.

        Args:
            masks: n tensors [response length], of any dtype.
            accepted: bool [t], of the local tokens.

        Collectives: one SUM of one byte a token over the CP group.
        """
        is_accepted = torch.zeros(sum(self.lengths), dtype=torch.uint8, device=accepted.device)
        is_accepted[self._index_in_responses.to(accepted.device)] = accepted.to(torch.uint8)
        # Each token is on one rank, so that the sum has every rank's answer.
        accepted_of_responses = all_reduce_sum(is_accepted, self.cp).bool().split(self.lengths)
        return [
            torch.where(accepted_of_response, mask, torch.zeros_like(mask))
            for accepted_of_response, mask in zip(accepted_of_responses, masks, strict=True)
        ]

    def _checked(self, name: str, values: Sequence[Tensor] | None, lengths: Sequence[int]) -> list[Tensor]:
        """The tensors as a list that is never empty; ValueError unless there is one of each length."""
        if values is None:
            raise ValueError(f"{name} is None: make slime keep the log-probs of engine and trainer")
        if len(values) != len(lengths):
            raise ValueError(f"{name} has {len(values)} entries: expected {len(lengths)}, one for every response")
        place = f" on CP rank {self.layout.cp_rank} of {self.layout.cp_size}"
        for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
            checked_tensor(f"{name}[{index}]", value, (length,), place)
        return list(values) or [torch.empty(0)]  # torch.cat needs at least one tensor


class SlimeCorrection:
    """A function for ``--custom-tis-function-path``; slime names the object by its module and name.

    Without slime's ``--use-tis`` (with ``--get-mismatch-metrics`` alone) it measures, and corrects nothing.

    Args:
        config: the correction's settings. slime calls once a micro-batch and divides by the tokens before rejection,
            so that rejection needs ``rejection_denominator="original"``. Default: slime's settings from its ``args``,
            with the names of its example (``tis_level``, ``rs_level``, …, or ``mis_level``, …), which slime reads from
            ``--custom-config-path``.
        groups: ``groups.cp`` holds the other chunks of the responses. Default: Megatron's.
        allow_zero_log_probs: accept rollout log-probs that are all 0; see :func:`megatron_rc.correct_rollouts`.

    Raises:
        ValueError: a setting that one micro-batch cannot serve, with the remedy.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig | None = None,
        groups: ParallelGroups | None = None,
        *,
        allow_zero_log_probs: bool = False,
    ) -> None:
        if config is not None:
            _check(config)
        self.config = config
        self.groups = groups
        self.allow_zero_log_probs = allow_zero_log_probs

    def __call__(
        self,
        args: Any,
        *,
        pg_loss: Tensor,
        train_log_probs: Sequence[Tensor],
        rollout_log_probs: Sequence[Tensor],
        loss_masks: Sequence[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        **others: Any,
    ) -> Answer:
        """Correct one micro-batch of n responses.

        Args:
            args: slime's arguments.
            pg_loss: [t], the loss of each local token of the responses, one response after the other.
            train_log_probs: n tensors: log π_old of the local tokens of each response, in zigzag chunks of the whole
                sequence (prompt and response, padded to 2·cp equal chunks).
            rollout_log_probs: n tensors: log π_rollout of the same tokens.
            loss_masks: n tensors [response length] of any dtype, of whole responses; 0 for a token that is not trained.
            total_lengths: tokens of prompt and response.
            response_lengths: tokens of the response.
            others: none; arguments of other versions of slime are refused.

        Returns:
            (``pg_loss`` times the weights, 0 for tokens that are not trained; masks of whole responses, 0 for rejected
            tokens, of the dtype of ``loss_masks``; metrics of local tokens, [t] each, which slime averages over the
            tokens of ``loss_masks``).

        Collectives: those of ``correct_rollouts`` over ``groups.cp``, and with rejection one SUM of one byte a token.
        Host synchronisations: one.

        Raises:
            ValueError: lists or tensors of wrong lengths; missing, NaN, infinite or positive log-probs at trained
                tokens, alike on all CP ranks.
        """
        if others:
            raise ValueError(f"{min(others)} is no argument of slime's TIS function of August 2026: leave it out")
        self.config = self.config or config_from_args(args)
        cp = (self.groups or ParallelGroups.from_megatron()).cp
        chunks = Chunks(total_lengths, response_lengths, cp)
        old = chunks.joined("train_log_probs", train_log_probs)
        rollout = chunks.joined("rollout_log_probs", rollout_log_probs)
        mask = chunks.cut("loss_masks", loss_masks) != 0
        checked_tensor("pg_loss", pg_loss, tuple(old.shape), " of all responses")
        weights, accepted = self._corrected(chunks, old, rollout, mask)
        metrics = token_metrics(self.config.metric_prefix, old - rollout, mask, accepted, weights)
        masks = list(loss_masks)
        if not getattr(args, "use_tis", True):  # --get-mismatch-metrics alone: measure, and change nothing
            return pg_loss, masks, metrics

        loss = pg_loss if weights is None else pg_loss * weights.to(pg_loss.dtype)
        loss = torch.where(accepted, loss, torch.zeros_like(loss))
        if self.config.rejects:
            masks = chunks.whole_masks(masks, accepted)
        return loss, masks, metrics

    def _corrected(self, chunks: Chunks, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return (weights or None, accepted tokens) of the local tokens, [t] each, from values of the same tokens."""
        assert self.config is not None
        _, weights, accepted = corrected(
            chunks.spread(old),
            chunks.spread(rollout),
            chunks.spread(mask),
            self.config,
            layout=chunks.layout,
            # slime calls for one micro-batch: other data-parallel ranks have other calls.
            groups=ParallelGroups(cp=chunks.cp, dp_cp=chunks.cp),
            allow_zero_log_probs=self.allow_zero_log_probs,
        )
        local_weights = None if weights is None else chunks.local(weights)
        return local_weights, chunks.local(accepted)


def config_from_args(args: Any) -> RolloutCorrectionConfig:
    """The settings that slime's arguments describe.

    Settings of slime's example count before its built-in ones (``--tis-clip``). ``--use-opsm`` is left to slime, which
    applies it besides this function.

    Args:
        args: slime's arguments, with the names of ``--custom-config-path``.

    Raises:
        ValueError: a wrong setting, one that a micro-batch cannot serve, or an unknown name with slime's prefixes.
    """
    settings = {name: value for name, value in vars(args).items() if name in OF_EXAMPLES or name.startswith(_PREFIXES)}
    of_example = {name: value for name, value in settings.items() if name not in BUILT_IN}
    # slime's own parser always sets its built-in ones, so that they count only if no other one is there.
    if of_example:
        settings = of_example
    settings |= {name: getattr(args, name) for name in ("use_tis", "use_mis") if hasattr(args, name)}
    config = RolloutCorrectionConfig.from_dict(settings, dialect=SLIME.name)
    if config.rollout_is_batch_normalize:
        raise ValueError(
            "tis_batch_normalize=True: slime calls for one micro-batch at a time, and the mean of the weights needs "
            "the global batch: set tis_batch_normalize to False"
        )
    _check(config)
    return config


def _check(config: RolloutCorrectionConfig) -> None:
    """Raise ValueError for settings that slime's call cannot serve."""
    alternative = "slime's own --use-rollout-logprobs is PPO against the engine's log-probs, without weights"
    refuse(config, bypass_mode=f"slime computes its loss's ratio itself; {alternative}")
    for criterion in config.criteria:
        if criterion.only_negative:
            raise ValueError(
                f"rollout_rs={criterion.name!r} needs advantages, which slime does not pass: leave it out and use "
                "slime's own --use-opsm, which it applies besides this function"
            )
    check_micro_batch_config(config, "slime")


correct = SlimeCorrection()
