"""Plan and apply: the correction of a whole rollout batch, and the correction inside the loss of bypass mode."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_rc.correction.inputs import (
    AgreedCounts,
    Layouts,
    PlanInputs,
    Tensors,
    check_counts,
    collect_masks,
    collect_shards,
)
from megatron_rc.correction.metrics import derive_metrics
from megatron_rc.correction.proximal import interpolate
from megatron_rc.correction.result import BypassPlan, CorrectionResult, HeaderShape, merge_headers
from megatron_rc.correction.stages import (
    BatchSums,
    Pair,
    batch_sums,
    check_version_given,
    finish,
    group_sums,
    header_shape,
    reduce_batch,
    reduce_groups,
    reduce_sequences,
    sequence_sums,
)
from megatron_rc.correction.weights import normalization
from megatron_rc.loss.aggregation import denominator
from megatron_rc.loss.metrics import MAXIMA, SUMS, LossStatistics, derive_loss_metrics
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import ParallelGroups, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig


@torch.no_grad()
def correct_rollouts(
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    response_mask: Tensors,
    config: RolloutCorrectionConfig,
    layout: Layouts | None = None,
    groups: ParallelGroups | None = None,
    *,
    advantages: Tensors | None = None,
    rewards: Tensors | None = None,
    group_ids: Tensors | None = None,
    num_groups: int | None = None,
    sequence_ids: Tensors | None = None,
    policy_versions: Tensors | None = None,
    current_version: int | None = None,
    max_staleness: int = 0,
    mini_batch_ids: Tensors | None = None,
    num_mini_batches: int = 1,
    compile: bool = False,
) -> CorrectionResult:
    """Importance weights, accepted mask, denominators and metrics of a whole rollout batch.

    Every tensor argument and the layout may be lists with one entry a micro-batch; weights and mask then are lists too.

    Args:
        train_log_probs: log π_train, the layout's local shape, nats; detached.
        rollout_log_probs: log π_rollout of the same tokens, of the same shape.
        response_mask: bool, of the same shape; what stands elsewhere changes no bit of any result.
        config: what to correct.
        layout: which tokens these are. Default: padded ``[b, s]``, whole sequences.
        groups: ``cp`` and ``dp_cp`` hold the other tokens. Default: this process alone.
        advantages: [n], or like the log-probs; ``opsm`` needs them.
        rewards: [n]; rejected shares are reported by their sign.
        group_ids: [n] int64 in [0, num_groups): the prompt of each sequence; group criteria need them.
        num_groups: prompts of the whole batch.
        sequence_ids: [n] int64, unique over DP, below 2²¹; error messages name them. Default: the local index.
        policy_versions: [n] or like the log-probs, int64: the version of the weights that sampled.
        current_version: of the weights that train; staleness is its distance from ``policy_versions``.
        max_staleness: the last bucket of staleness holds everything from here on.
        mini_batch_ids: [n] int64 in [0, num_mini_batches). Default: 0.
        num_mini_batches: optimizer steps that share the batch.
        compile: run the pass over padded tokens through ``torch.compile``: seconds for the first call of each shape and
            configuration, then less time. After eight of them (torch's ``recompile_limit``) others run as they are.

    The counts ``num_*``, ``current_version`` and ``max_staleness`` are the same on every rank.

    Returns:
        The result; call its ``check()`` before any optimizer step.

    Collectives: one SUM over ``cp`` (and one MAX with a ``seq_max`` criterion), one SUM and one MAX over ``dp_cp`` (and
    one SUM of ``[num_groups, k]`` with a group criterion); none for a group of size 1. The sizes do not depend on the
    number of tokens.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit together (alike on all ranks).
    """
    inputs = PlanInputs(
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
        layout=layout,
        advantages=advantages,
        rewards=rewards,
        group_ids=group_ids,
        sequence_ids=sequence_ids,
        policy_versions=policy_versions,
        mini_batch_ids=mini_batch_ids,
    )
    groups = groups or ParallelGroups()
    counts = AgreedCounts(num_mini_batches, num_groups, current_version, max_staleness)
    batch = _sums(inputs, config, counts, groups, compile)
    return finish(batch, reduce_batch(batch.pair, groups))


def _sums(
    inputs: PlanInputs,
    config: RolloutCorrectionConfig,
    counts: AgreedCounts,
    groups: ParallelGroups,
    compile: bool,
    first_id: int = 0,
) -> BatchSums:
    """Everything before the reduction over the batch; sequences without ids are counted from ``first_id``."""
    local = sequence_sums(collect_shards(inputs, counts, groups, first_id), config, compile=compile)
    sequences = reduce_sequences(local.pair, groups)
    prompts = reduce_groups(group_sums(local, sequences), groups) if config.needs_prompts else None
    return batch_sums(local, sequences, prompts)


class RolloutCorrection:
    """The correction for a trainer.

    Decoupled: ``plan`` before the schedule decides everything. Bypass: ``plan`` before the schedule, ``in_loss`` for
    every micro-batch inside it, ``finish_step`` before the optimizer's step. In both modes ``record`` takes what the
    loss measured of a micro-batch, and ``finish_step`` reduces it. ``proximal_interpolation`` goes bypass mode's way:
    what is said of that below holds for both.

    Args:
        config: what to correct.
        groups: ``cp`` and ``dp_cp`` carry the reductions of the last stage, ``pp`` the header to the other stages.
        loss: the objective: its aggregation decides the denominators.
        has_auxiliary_losses: the model adds losses of its own to the gradients (MoE balancing or z losses, multi-token
            prediction).
        compile: as :func:`correct_rollouts` has it.

    Attributes:
        loss: the objective, its algorithm filled in.
        step: bypass mode: what is known of the step that ``finish_step`` ended last: ``check()`` before the optimizer's
            step.
        sequence_log_ratio: bypass mode: [n] float64, the mean of log π_θ/π_rollout over each whole sequence of the
            micro-batch that ``in_loss`` saw last.
        proximal_log_probs: with ``proximal_interpolation``: log π_old of that micro-batch, like its log-probs.

    Raises:
        ValueError: settings that cannot be exact together; names them and the remedy.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        groups: ParallelGroups,
        *,
        loss: PolicyLossConfig,
        has_auxiliary_losses: bool = False,
        compile: bool = False,
    ) -> None:
        self.config = config
        self.groups = groups
        self.loss = resolve_objective(config, loss, has_auxiliary_losses=has_auxiliary_losses)
        self.compile = compile
        self.sequence_log_ratio: Tensor | None = None
        self.proximal_log_probs: Tensor | None = None
        self._ended: CorrectionResult | None = None
        self._statistics: LossStatistics | None = None
        self._plan: BypassPlan | None = None
        self._counts = AgreedCounts()
        self._pair: Pair | None = None
        self._mini_batch: int | None = None
        self._seen = 0
        self._headers: list[Tensor] = []

    @torch.no_grad()
    def plan(
        self,
        inputs: PlanInputs | None,
        *,
        num_mini_batches: int = 1,
        num_groups: int | None = None,
        current_version: int | None = None,
        max_staleness: int = 0,
        device: torch.device | None = None,
    ) -> CorrectionResult | BypassPlan:
        """Prepare a rollout batch, alike on all pipeline stages.

        Args:
            inputs: this rank's part; None on the stages that hold no log-probs.
            num_mini_batches: optimizer steps that share the batch, equal on every rank.
            num_groups: prompts of the whole batch.
            current_version: of the weights that train.
            max_staleness: the last bucket of staleness.
            device: of the header, where ``inputs`` is None.

        Returns:
            Decoupled: the result, on stages without log-probs with weights and mask None. Bypass: the denominators
            under the response mask, known on the last stage alone.

        Collectives: decoupled, those of :func:`correct_rollouts` on the last stage, then one broadcast over ``pp``;
        bypass, one SUM over ``cp`` and one SUM over ``dp_cp``, on the last stage.

        Raises:
            ValueError: shapes or ids that do not fit. Bad data is reported by ``check()`` of the result.
        """
        counts = AgreedCounts(num_mini_batches, num_groups, current_version, max_staleness)
        self._check_plan(inputs, counts)
        if self.config.corrects_in_loss:
            self._headers, self._pair, self._mini_batch, self._seen = [], None, None, 0
            self._statistics = None
            # A step is one mini-batch, and no criterion that needs the prompts is there.
            self._counts = dataclasses.replace(counts, num_mini_batches=1, num_groups=None)
            self._plan = None if inputs is None else self._plan_bypass(inputs, counts)
            return self._plan or BypassPlan(None)
        if inputs is None:
            shape = header_shape(self.config, counts)
            header = torch.zeros(len(shape), dtype=torch.float64, device=device)
            return CorrectionResult(self.config, shape, self._broadcast(header))
        batch = _sums(inputs, self.config, counts, self.groups, self.compile)
        result = finish(batch, reduce_batch(batch.pair, self.groups))
        result.header = self._broadcast(result.header)
        return result

    @torch.no_grad()
    def in_loss(
        self,
        log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor,
        *,
        layout: SequenceLayout | None = None,
        advantages: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        policy_versions: Tensor | None = None,
        mini_batch: int = 0,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Bypass mode: correct one micro-batch from π_θ, inside the loss function.

        With ``proximal_interpolation`` π_train is :attr:`proximal_log_probs` in place of π_θ.

        Args:
            log_probs: log π_θ, the layout's local shape, nats; only its values are used.
            rollout_log_probs: log π_rollout of the same tokens.
            response_mask: bool, of the same shape.
            layout: which tokens these are. Default: padded ``[b, s]``.
            advantages: [n] or like the log-probs; ``opsm`` needs them.
            sequence_ids: [n] int64; error messages name them. Default: sequences are counted since the step began.
            policy_versions: [n] or like the log-probs, int64: the version of the weights that sampled; needed where the
                plan was given the current version, else not looked at.
            mini_batch: the optimizer step, one for all micro-batches until ``finish_step``.

        Returns:
            (weights, mask, lengths): detached weights, bounded but not normalised, or None where none are applied
            (``ppo_clip`` only measures them); the accepted tokens m'; [n] float64, tokens of each whole sequence in the
            denominator.

        Collectives: one SUM over ``cp`` (and one MAX with a ``seq_max`` criterion).

        Raises:
            ValueError: shapes that do not fit, or another mini-batch than that of the step so far.
            RuntimeError: decoupled mode, or no ``plan`` before.
        """
        if not self.config.corrects_in_loss or self._plan is None:
            raise RuntimeError(
                "in_loss belongs to bypass_mode and proximal_interpolation, after plan() on the last pipeline stage"
            )
        if not 0 <= mini_batch < self._plan.num_mini_batches:
            raise ValueError(f"mini_batch={mini_batch} is not in [0, {self._plan.num_mini_batches}) of the plan")
        if self._mini_batch not in (None, mini_batch):
            raise ValueError(
                f"mini_batch={mini_batch} in the step of mini-batch {self._mini_batch}: call finish_step() in between"
            )
        inputs = PlanInputs(
            log_probs,
            rollout_log_probs,
            response_mask,
            layout,
            advantages=advantages,
            sequence_ids=sequence_ids,
            policy_versions=None if self._counts.current_version is None else policy_versions,
        )
        if self.config.proximal_interpolation:
            self.proximal_log_probs = self._interpolated(inputs)
            inputs = dataclasses.replace(inputs, train_log_probs=self.proximal_log_probs)
        batch = _sums(inputs, self.config, self._counts, self.groups, self.compile, self._seen)
        sums, maxima = batch.pair
        if self._pair is not None:
            sums, maxima = self._pair[0] + sums, torch.maximum(self._pair[1], maxima)
        self._pair, self._mini_batch = (sums, maxima), mini_batch
        self._seen += batch.local.shards.num_sequences
        self.sequence_log_ratio = batch.mean_log_ratio
        weights, mask, lengths = batch.spread(None)
        return weights[0] if weights and self.config.applies_weights else None, mask[0], lengths

    def record(self, statistics: LossStatistics) -> None:
        """Add what the loss measured of one micro-batch to what ``finish_step`` reduces. Collectives: none."""
        self._statistics = statistics if self._statistics is None else self._statistics.merge(statistics)

    @torch.no_grad()
    def finish_step(self, device: torch.device | None = None) -> Tensor:
        """End one optimizer step, on every pipeline stage: reduce what the micro-batches added up.

        Args:
            device: of the result, on stages that hold no log-probs.

        Returns:
            0-D float64, D₀/G: what the gradients of a loss divided by D₀, the denominator under the response mask, are
            to be multiplied by; 0 where no token is accepted and the step must be skipped. In decoupled mode G was
            known before, and this is 1. Touches no gradient.

        Collectives: one SUM and one MAX over ``dp_cp`` on the last stage, then one broadcast over ``pp``.

        Raises:
            RuntimeError: bypass mode, and no micro-batch since the last step.
        """
        shape = _step_shape(self.config, self._counts)
        if self.groups.is_last_stage:
            message = self._step_header(device)
        else:
            message = torch.zeros(len(shape), dtype=torch.float64, device=device)
        message = self._broadcast(message)
        self._ended = CorrectionResult(self.config, shape, message)
        if self.config.corrects_in_loss:
            self._headers.append(message)
        self._pair, self._mini_batch, self._seen, self._statistics = None, None, 0, None
        return message[-1]

    @property
    def step(self) -> CorrectionResult | None:
        """See the class."""
        return self._ended if self.config.corrects_in_loss else None

    @property
    def scales_gradients(self) -> bool:
        """Whether ``finish_step`` can return anything but 1 for a step that is made: G is known only after it."""
        return self.config.corrects_in_loss and _is_unknown(self.config, self.loss)

    def loss_denominator(self, plan: CorrectionResult | BypassPlan, mini_batch: int) -> Tensor:
        """What the loss of a mini-batch is divided by: G, in bypass mode D₀; 0-D float64, at least 1 token's worth.

        Raises:
            RuntimeError: a stage without log-probs.
        """
        if isinstance(plan, CorrectionResult):
            counts = plan.denominators[mini_batch]
            accepted = self.config.rejection_denominator == "accepted"
            tokens, sequences = counts[2:] if accepted else counts[:2]
        elif plan.counts is not None:
            tokens, sequences = plan.counts[mini_batch, :2]
        else:
            raise RuntimeError("the loss is computed on the last pipeline stage only")
        # A mini-batch without tokens has a loss of 0, whatever it is divided by.
        return self._denominator(tokens.clamp(min=1), sequences.clamp(min=1))

    def loss_metrics(self) -> dict[str, float]:
        """Metrics of the loss of the step that ``finish_step`` ended last, equal on all ranks.

        Host synchronisations: one, in bypass mode shared with ``step.check()`` and ``step.metrics()``.

        Raises:
            RuntimeError: no step has ended yet.
        """
        if self._ended is None:
            raise RuntimeError("loss_metrics() before finish_step()")
        found = self._ended.on_host()
        named = dict(zip(SUMS, found.tables["loss_sums"], strict=True))
        extremes = {name: found.maxima[f"loss_{name}"] for name in MAXIMA}
        metrics = derive_loss_metrics(named, extremes)
        # Each micro-batch was divided by D₀.
        metrics["loss/total"] *= found.maxima["factor"]
        return metrics

    def metrics(self) -> dict[str, float]:
        """Bypass mode: metrics over all steps since the last ``plan``, which mix policies: each step has another π_θ.

        Host synchronisations: one.
        """
        if not self._headers:
            return {}
        shape = _step_shape(self.config, self._counts)
        metrics = derive_metrics(shape.read(merge_headers(shape, self._headers).tolist()), self.config)
        return metrics | {f"{self.config.metric_prefix}mixed_policies": float(len(self._headers))}

    def _check_plan(self, inputs: PlanInputs | None, counts: AgreedCounts) -> None:
        """What every stage can see, before any of them waits for another."""
        check_counts(counts)
        check_version_given(self.config, counts)
        if self.config.needs_prompts and counts.num_groups is None:
            raise ValueError(f"rollout_rs={self.config.rollout_rs} needs the prompts of the batch: pass num_groups=")
        if (inputs is None) == self.groups.is_last_stage:
            raise ValueError("plan() takes the inputs on the last pipeline stage, and None on all others")

    def _plan_bypass(self, inputs: PlanInputs, counts: AgreedCounts) -> BypassPlan:
        masks = collect_masks(inputs, counts, self.groups)
        tokens = all_reduce_sum(masks.tokens, self.groups.cp)
        return BypassPlan(all_reduce_sum(masks.mini_batch_counts(tokens), self.groups.dp_cp))

    def _interpolated(self, inputs: PlanInputs) -> Tensor:
        """The proximal policy's log-probs of a micro-batch: the plan's weights are the steps behind that have ended."""
        shards = collect_shards(inputs, self._counts, self.groups)
        (part,) = shards.parts
        versions = part.versions
        if versions is None and shards.versions is not None:
            versions = part.layout.expand(shards.versions)
        if versions is None or self._counts.current_version is None:
            raise RuntimeError("proximal_interpolation needs versions, which the plan asked for")
        staleness = (self._counts.current_version - versions).clamp(min=0)
        return interpolate(part.train, part.rollout, staleness, updates=len(self._headers))

    def _step_header(self, device: torch.device | None) -> Tensor:
        """The step's global sums and maxima, as ``_step_shape`` has them."""
        if self.config.corrects_in_loss and (self._pair is None or self._plan is None):
            raise RuntimeError("finish_step() without a micro-batch: call in_loss() in the loss function first")
        measured = self._statistics or LossStatistics.nothing(device if self._pair is None else self._pair[0].device)
        nothing = measured.sums.new_empty(0)
        sums, maxima = self._pair or (nothing, nothing)
        pair = torch.cat([sums, measured.sums]), torch.cat([maxima, measured.maxima])
        header = torch.cat([*reduce_batch(pair, self.groups), nothing.new_ones(1)])
        if self._plan is not None:
            result = CorrectionResult(self.config, _step_shape(self.config, self._counts), header)
            # Found by the plan, which the other stages did not see.
            result.shape.unpack(header)[0]["bad_mini_batch_ids"].add_(self._plan.bad_ids)
            header[-1] = self._factor(result, self._plan)
        return header

    def _factor(self, step: CorrectionResult, plan: BypassPlan) -> Tensor:
        """D₀/G of the step that has just been reduced; G = (the aggregation's denominator) · w̄."""
        if self._mini_batch is None:
            raise RuntimeError("finish_step() before in_loss()")
        tokens, sequences, accepted_tokens, accepted_sequences = step.denominators[0]
        if self.config.rejection_denominator == "accepted":
            tokens, sequences = accepted_tokens, accepted_sequences
        factor = self.loss_denominator(plan, self._mini_batch) / self._denominator(tokens, sequences)
        if self.config.rollout_is_batch_normalize:
            sums, _ = step.shape.unpack(step.header)
            factor = factor * normalization(sums["normalize_weight"], sums["normalize_count"])
        return torch.where(accepted_tokens > 0, factor, 0.0)

    def _denominator(self, tokens: Tensor, sequences: Tensor) -> Tensor:
        return denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)

    def _broadcast(self, header: Tensor) -> Tensor:
        return broadcast(header, group_size(self.groups.pp) - 1, self.groups.pp)


def resolve_objective(
    config: RolloutCorrectionConfig, loss: PolicyLossConfig, *, has_auxiliary_losses: bool = False
) -> PolicyLossConfig:
    """The objective with its algorithm filled in: ``ppo_clip``, in bypass mode the correction's ``loss_type``.

    Args:
        config: the correction.
        loss: the objective.
        has_auxiliary_losses: the model adds losses of its own to the gradients.

    Raises:
        ValueError: settings that contradict each other, or cannot be exact together; names them and the remedy.
    """
    algorithm = config.loss_type if config.bypass_mode else "ppo_clip"
    if config.corrects_in_loss:
        _check_in_loss(config, loss, has_auxiliary_losses)
    return dataclasses.replace(loss, algorithm=loss.algorithm or algorithm)


def _step_shape(config: RolloutCorrectionConfig, counts: AgreedCounts) -> HeaderShape:
    """What a step reduces: in bypass mode the correction's sums and maxima, then the loss's, then D₀/G."""
    known = header_shape(config, counts) if config.corrects_in_loss else HeaderShape((), ())
    sums = (*known.sums, ("loss_sums", (len(SUMS),)))
    return HeaderShape(sums, (*known.maxima, *(f"loss_{name}" for name in MAXIMA), "factor"))


def _is_unknown(config: RolloutCorrectionConfig, loss: PolicyLossConfig) -> bool:
    """Whether the denominator of bypass mode is known only after the schedule."""
    return config.rollout_is_batch_normalize or (
        loss.aggregation != "token-sum"
        and config.rejects
        and (config.rejection_denominator == "accepted" or config.bad_log_probs == "reject_token")
    )


def _check_in_loss(config: RolloutCorrectionConfig, loss: PolicyLossConfig, has_auxiliary_losses: bool) -> None:
    mode = "bypass_mode" if config.bypass_mode else "proximal_interpolation"
    if config.bypass_mode and loss.algorithm not in (None, config.loss_type):
        raise ValueError(
            f"algorithm={loss.algorithm!r} of the loss contradicts loss_type={config.loss_type!r}, which names the "
            "objective in bypass_mode: set them alike, or leave algorithm out"
        )
    if config.rollout_is_batch_normalize and (loss.entropy_coef or loss.kl_coef):
        raise ValueError(
            f"rollout_is_batch_normalize=True in {mode} scales all gradients by one factor, which must not scale "
            f"the terms of entropy_coef={loss.entropy_coef} and kl_coef={loss.kl_coef}: set them to 0, or use "
            "decoupled mode"
        )
    if _is_unknown(config, loss) and has_auxiliary_losses:
        raise ValueError(
            f"the loss's denominator is known only after the schedule ({mode} with "
            "rejection_denominator=accepted or rollout_is_batch_normalize), and scaling the gradients then would "
            "scale the model's auxiliary losses too: use rejection_denominator=original without batch normalisation, "
            "or decoupled mode"
        )
