"""The adaptor for slime: weights and rejection as a function for its ``--custom-tis-function-path``.

slime passes the responses of a micro-batch as one tensor each, of different lengths, cut over context-parallel ranks.

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
    """The response tokens of one CP rank, as slime cuts the sequences, and conversions between their arrangements.

    slime pads a sequence (prompt and response) to 2·cp equal chunks, and each rank has two of them. The *local tokens*
    of a response are the positions in these two chunks that predict one of its tokens. Over all ranks these positions
    run from the last of the prompt to the last but one of the sequence.

    Values of tokens come in three arrangements:

    - by response: n tensors, of the local tokens or of the whole response; slime passes and takes these;
    - [t]: the local tokens of all responses, one response after the other;
    - the shape of ``layout``: all local positions, those of prompts and padding included.

    Args:
        total_lengths: number of tokens of prompt and response, for each sequence.
        response_lengths: number of tokens of each response.
        cp: the group whose other ranks have the other chunks.

    Attributes:
        cp: the group whose other ranks have the other chunks.
        lengths: number of tokens of each whole response.
        counts: number of local tokens of each response.
        layout: the local chunks of the sequences, packed.

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

        # For each local position the index, in its response, of the token that it predicts. At positions that predict
        # none it is negative or not below the response's length.
        sequence = self.layout.sequence_index
        totals = torch.tensor(total_lengths, dtype=torch.int64)
        responses = torch.tensor(self.lengths, dtype=torch.int64)
        first_positions = totals - responses - 1
        index_in_response = self.layout.positions() - first_positions[sequence]
        predicts_response = (index_in_response >= 0) & (index_in_response < responses[sequence])

        # [t]: for each local token its index in the layout's shape, and its index in all whole responses, joined.
        self._index_in_layout = predicts_response.nonzero().squeeze(1)
        response_starts = responses.cumsum(0) - responses
        self._index_in_responses = (index_in_response + response_starts[sequence])[self._index_in_layout]
        self.counts = torch.bincount(sequence[self._index_in_layout], minlength=len(self.lengths)).tolist()

    def joined(self, name: str, values: Sequence[Tensor]) -> Tensor:
        """Join one tensor of local tokens for each response: [t], detached."""
        return torch.cat(self._checked(name, values, self.counts)).detach()

    def select_local(self, name: str, values: Sequence[Tensor]) -> Tensor:
        """Select the local tokens, [t], from one tensor for each whole response."""
        whole_responses = torch.cat(self._checked(name, values, self.lengths))
        return whole_responses[self._index_in_responses.to(whole_responses.device)]

    def to_layout(self, values: Tensor) -> Tensor:
        """Write values of local tokens, [t], to their places in the layout's shape; 0 at prompts and padding."""
        layout_values = values.new_zeros(self.layout.shape)
        layout_values[self._index_in_layout.to(values.device)] = values
        return layout_values

    def from_layout(self, values: Tensor) -> Tensor:
        """Read the values of local tokens, [t], from values in the layout's shape: the inverse of ``to_layout``."""
        return values[self._index_in_layout.to(values.device)]

    def without_rejected(self, masks: Sequence[Tensor], accepted: Tensor) -> list[Tensor]:
        """Return the masks of whole responses with 0 at the tokens that any CP rank rejects.

        Args:
            masks: n tensors [response length], of any dtype.
            accepted: bool [t]: the local tokens that are accepted.

        Collectives: one SUM of one byte a token over the CP group.
        """
        is_accepted = torch.zeros(sum(self.lengths), dtype=torch.uint8, device=accepted.device)
        is_accepted[self._index_in_responses.to(accepted.device)] = accepted.to(torch.uint8)
        # One rank alone has each token, and the others add 0 to it.
        accepted_of_responses = all_reduce_sum(is_accepted, self.cp).bool().split(self.lengths)
        return [
            torch.where(accepted_of_response, mask, torch.zeros_like(mask))
            for accepted_of_response, mask in zip(accepted_of_responses, masks, strict=True)
        ]

    def _checked(self, name: str, values: Sequence[Tensor] | None, lengths: Sequence[int]) -> list[Tensor]:
        """Return the tensors as a list that is never empty; ValueError unless their lengths are ``lengths``."""
        if values is None:
            raise ValueError(f"{name} is None: make slime keep the log-probs of engine and trainer")
        if len(values) != len(lengths):
            raise ValueError(f"{name} has {len(values)} entries: expected {len(lengths)}, one for every response")
        place = f" on CP rank {self.layout.cp_rank} of {self.layout.cp_size}"
        for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
            checked_tensor(f"{name}[{index}]", value, (length,), place)
        return list(values) or [torch.empty(0)]  # torch.cat needs at least one tensor


class SlimeCorrection:
    """The correction as the function that slime's ``--custom-tis-function-path`` names: an object that can be called.

    ``--custom-tis-function-path`` takes the module and the name of such an object, for example ``correct``. If
    slime runs with ``--get-mismatch-metrics`` but without ``--use-tis``, the object only measures: the loss and the
    masks stay as they are.

    Args:
        config: the correction's settings. If they reject, they must have ``rejection_denominator="original"``, because
            slime divides its loss by the tokens before rejection. Default: the settings in slime's ``args``, by the
            names of slime's examples (``tis_level``, ``rs_level``, …, or ``mis_level``, …). slime reads them from the
            file of ``--custom-config-path``.
        groups: the other ranks of ``groups.cp`` have the other chunks of the sequences. Default: Megatron's groups.
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
            pg_loss: [t], the loss of each local token (see :class:`Chunks`), one response after the other.
            train_log_probs: n tensors: log π_old of the local tokens of each response.
            rollout_log_probs: n tensors: log π_rollout of the same tokens.
            loss_masks: n tensors [response length] of any dtype, of whole responses; 0 for a token that is not trained.
            total_lengths: n numbers of tokens of prompt and response.
            response_lengths: n numbers of tokens of the response.
            others: must be empty: arguments that other versions of slime pass are refused.

        Returns:
            (loss, masks, metrics). The loss is ``pg_loss`` times the weights, and 0 at tokens that are not trained or
            rejected. The masks are ``loss_masks`` with 0 at rejected tokens. The metrics are values of the local
            tokens, [t] each; slime averages them over the tokens of ``loss_masks``.

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
        mask = chunks.select_local("loss_masks", loss_masks) != 0
        checked_tensor("pg_loss", pg_loss, tuple(old.shape), " of all responses")
        weights, accepted = self._weights_and_accepted(chunks, old, rollout, mask)
        metrics = token_metrics(self.config.metric_prefix, old - rollout, mask, accepted, weights)
        masks = list(loss_masks)
        if not getattr(args, "use_tis", True):  # --get-mismatch-metrics alone: measure, and change nothing
            return pg_loss, masks, metrics

        loss = pg_loss if weights is None else pg_loss * weights.to(pg_loss.dtype)
        loss = torch.where(accepted, loss, torch.zeros_like(loss))
        if self.config.rejects:
            masks = chunks.without_rejected(masks, accepted)
        return loss, masks, metrics

    def _weights_and_accepted(
        self, chunks: Chunks, old: Tensor, rollout: Tensor, mask: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return (weights, or None if none are applied; bool, the accepted tokens) of one micro-batch.

        All tensors, the arguments ``old`` (log π_old), ``rollout`` (log π_rollout) and ``mask`` and the returned ones,
        are [t], over the local tokens.
        """
        assert self.config is not None
        _, weights, accepted = corrected(
            chunks.to_layout(old),
            chunks.to_layout(rollout),
            chunks.to_layout(mask),
            self.config,
            layout=chunks.layout,
            # No reduction over data-parallel ranks: slime calls for one micro-batch, and they may make fewer calls.
            groups=ParallelGroups(cp=chunks.cp, dp_cp=chunks.cp),
            allow_zero_log_probs=self.allow_zero_log_probs,
        )
        local_weights = None if weights is None else chunks.from_layout(weights)
        return local_weights, chunks.from_layout(accepted)


def config_from_args(args: Any) -> RolloutCorrectionConfig:
    """Return the correction's settings that slime's arguments describe.

    If the arguments have any name of slime's examples, such as ``tis_level``, slime's built-in settings, such as
    ``--tis-clip``, are ignored. ``--use-opsm`` is always ignored here: slime itself applies it, besides this function.

    Args:
        args: slime's arguments, to which slime has added the settings in the file of ``--custom-config-path``.

    Raises:
        ValueError: a wrong setting, one that a micro-batch cannot serve, or an unknown name with slime's prefixes.
    """
    settings = {name: value for name, value in vars(args).items() if name in OF_EXAMPLES or name.startswith(_PREFIXES)}
    example_settings = {name: value for name, value in settings.items() if name not in BUILT_IN}
    # slime's parser always sets the built-in ones, so that their presence does not say that the user chose them.
    if example_settings:
        settings = example_settings
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
