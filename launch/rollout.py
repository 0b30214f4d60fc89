"""Collect a rollout batch: the engine of each data-parallel replica samples, scores and shares it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.batch import FINISH_REASONS, RolloutBatch, SamplingParams
from megatron_rc.launch.distributed import agree
from megatron_rc.launch.engines import RolloutEngine, Sample
from megatron_rc.launch.engines.choice import make_engine
from megatron_rc.launch.recorded import RecordedRollouts, write_rollouts
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.tasks.characters import EOS, PAD, token_id
from megatron_rc.launch.weights.choice import export_model
from megatron_rc.parallel.collectives import broadcast
from megatron_rc.parallel.groups import ParallelGroups, group_rank


class RolloutCollector:
    """Samples on the first rank of each replica (TP, CP and PP rank 0) and broadcasts to the rest of it.

    Args:
        args: the validated flags.
        task: prompts and rewards.
        groups: of this rank.
        engine: on the first rank of each replica; default there: the one that ``--rollout-engine`` names. Unused
            elsewhere, and with ``--load-rollouts``, which reads what another run sampled.
    """

    def __init__(
        self, args: argparse.Namespace, task: Task, groups: ParallelGroups, engine: RolloutEngine | None = None
    ) -> None:
        self.args, self.task, self.groups = args, task, groups
        self.device = torch.device("cpu") if args.on_cpu else torch.device("cuda", torch.cuda.current_device())
        self.is_engine_rank = group_rank(groups.tp) == group_rank(groups.cp) == group_rank(groups.pp) == 0
        self.engine, self.recorded = None, None
        if self.is_engine_rank and args.load_rollouts:
            sequences = args.grpo_prompts_per_step * args.grpo_group_size
            self.recorded = RecordedRollouts(args.load_rollouts, args.seq_length, sequences, args.grpo_prompts_per_step)
        elif self.is_engine_rank:
            self.engine = engine or self._default_engine()
        self.sampling = SamplingParams(temperature=args.rl_default_temperature)

    def sync_weights(self, chunks: Sequence[torch.nn.Module], version: int) -> None:
        """Hand the trainer's weights to every engine, where there are any.

        Raises:
            AgreedError: on every rank, if an engine refused them.
        """
        if self.args.load_rollouts:
            return
        error = None
        weights = export_model(chunks, self.args, self.groups)
        if self.engine is not None:
            try:
                self.engine.load_weights(weights, version)
            except Exception as problem:  # other ranks wait in the iterator for whatever it raises
                error = f"the rollout engine refused the weights of step {version}: {problem}"
        # The other ranks gather and send inside the iterator; an engine that failed must not leave them waiting.
        for _ in weights:
            pass
        agree(self.args, error)

    def collect(self, step: int) -> RolloutBatch:
        """The replica's share of the rollout batch that starts at optimizer step ``step``, on all its ranks.

        Raises:
            AgreedError: on every rank, if sampling, scoring or the checks failed on any.
        """
        batch, error = None, None
        if self.is_engine_rank:
            try:
                batch = self._obtain(step)
            except Exception as problem:  # whatever an engine or a reward raises, the other ranks must hear of it
                error = f"the rollout of step {step} failed: {type(problem).__name__}: {problem}"
        agree(self.args, error)
        return self._share(batch)

    def _obtain(self, step: int) -> RolloutBatch:
        """This replica's records, sampled or read, checked, and written down where that is asked for."""
        args, replica = self.args, parallel_state.get_data_parallel_rank()
        if self.recorded is not None:
            batch = self.recorded.read(step // args.updates_per_rollout, replica, args.data_parallel_size)
            if batch.sampling.temperature != self.sampling.temperature:
                raise ValueError(
                    f"the rollouts in {args.load_rollouts} were sampled at temperature {batch.sampling.temperature}, "
                    f"--rl-default-temperature is {self.sampling.temperature}: set it alike"
                )
        elif self.engine is not None:
            batch = self._sample(self.engine, step)
        else:
            raise RuntimeError("rollouts are obtained on the first rank of a replica only")
        batch.validate(vocab_size=args.vocab_size, allow_truncated_sampling=args.allow_truncated_sampling)
        if args.save_rollouts:
            write_rollouts(batch, args.save_rollouts, step, replica)
        return batch

    def _sample(self, engine: RolloutEngine, step: int) -> RolloutBatch:
        args = self.args
        replica = parallel_state.get_data_parallel_rank()
        prompts = args.grpo_prompts_per_step // args.data_parallel_size
        first = (step // args.updates_per_rollout) * args.grpo_prompts_per_step + replica * prompts
        problems = self.task.problems(first, prompts)
        repeated = [problem for problem in problems for _ in range(args.grpo_group_size)]
        encoded = [self.task.tokenizer.encode(problem.prompt).ids for problem in repeated]
        room = args.seq_length - args.max_response_length
        if max(map(len, encoded)) > room:
            raise ValueError(f"a prompt has {max(map(len, encoded))} tokens, --seq-length leaves room for {room}")
        seed = args.seed + 1_000_003 * step + replica
        samples = engine.sample(encoded, self.sampling, args.max_response_length, seed)
        texts = [self.task.tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples]
        rewards = [self.task.reward(problem, text) for problem, text in zip(repeated, texts, strict=True)]
        return self._batch(encoded, samples, rewards, engine.version, replica * prompts)

    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[Sample],
        rewards: Sequence[float],
        version: int,
        first_group: int,
    ) -> RolloutBatch:
        rows, length = len(samples), self.args.seq_length
        tokens = torch.full((rows, length), token_id(self.task.tokenizer, PAD))
        mask = torch.zeros(rows, length, dtype=torch.bool)
        log_probs = torch.zeros(rows, length)
        for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
            end = len(prompt) + len(sample.token_ids)
            tokens[row, : len(prompt)] = torch.tensor(prompt)
            tokens[row, len(prompt) : end] = torch.tensor(sample.token_ids)
            mask[row, len(prompt) : end] = True
            log_probs[row, len(prompt) : end] = torch.tensor(sample.log_probs)
        group = torch.arange(rows) // self.args.grpo_group_size + first_group
        return RolloutBatch(
            tokens=tokens,
            response_mask=mask,
            rollout_log_probs=log_probs,
            policy_versions=torch.full((rows, length), version, dtype=torch.int32),
            sample_ids=torch.arange(rows) + first_group * self.args.grpo_group_size,
            group_ids=group,
            rewards=torch.tensor(rewards, dtype=torch.float32),
            finish_reasons=torch.tensor([FINISH_REASONS.index(sample.finish_reason) for sample in samples]),
            sampling=self.sampling,
        )

    def _share(self, batch: RolloutBatch | None) -> RolloutBatch:
        """Broadcast from the first rank of the replica: over TP×CP on the first stage, then over PP."""
        length = self.args.seq_length
        rows = self.args.grpo_prompts_per_step * self.args.grpo_group_size // self.args.data_parallel_size
        integers = torch.zeros(rows, 3 * length + 3, dtype=torch.int64)
        floats = torch.zeros(rows, length + 1)
        if batch is not None:
            per_row = [batch.sample_ids, batch.group_ids, batch.finish_reasons]
            # Records may be of other dtypes, and what the receivers wait for is not.
            columns = [values.unsqueeze(1) for values in per_row]
            whole = [batch.tokens, batch.response_mask, batch.policy_versions, *columns]
            integers = torch.cat([values.long() for values in whole], dim=1)
            floats = torch.cat([batch.rollout_log_probs.float(), batch.rewards.float().unsqueeze(1)], dim=1)
        integers, floats = self._broadcast(integers), self._broadcast(floats)
        tokens, mask, versions, rest = integers.split([length, length, length, 3], dim=1)
        return RolloutBatch(
            tokens=tokens,
            response_mask=mask.bool(),
            rollout_log_probs=floats[:, :-1],
            policy_versions=versions.int(),
            sample_ids=rest[:, 0],
            group_ids=rest[:, 1],
            rewards=floats[:, -1],
            finish_reasons=rest[:, 2],
            sampling=self.sampling,
        )

    def _broadcast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        if group_rank(self.groups.pp) == 0:
            tensor = broadcast(tensor, 0, parallel_state.get_tensor_and_context_parallel_group())
        return broadcast(tensor, 0, self.groups.pp)

    def _default_engine(self) -> RolloutEngine:
        eos, pad = token_id(self.task.tokenizer, EOS), token_id(self.task.tokenizer, PAD)
        return make_engine(self.args, eos, pad, self.device, parallel_state.get_data_parallel_rank())
