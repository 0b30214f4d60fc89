"""Responses of rollout batches that were not trained on yet: checkpoints of partial rollouts keep them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rc.launch.engines import Progress, Sample
from megatron_rc.launch.rollouts.batches import batch_of, samples_of
from megatron_rc.launch.rollouts.turns import Conversation
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import RolloutBatch, SamplingParams, load_rollouts, save_rollouts

FILES = "rollouts-"  # beginning of the names of a checkpoint's files with responses
_Call = tuple[int, int]  # number of the rollout batch, and the call's seed


class OpenRollouts:
    """Responses of one replica's batches under way, of a run with ``--rl-partial-rollouts``; makes no collective.

    Which weights sample a token follows from timing, so a resumed run cannot repeat these responses: it takes them from
    the checkpoint, and asks for the missing ones. ``replica`` is None on a rank without an engine, which keeps nothing.
    """

    def __init__(self, config: RunConfig, replica: int | None) -> None:
        self.config = config
        self.replica = replica
        self._calls: dict[_Call, Progress] = {}
        self._lock = threading.Lock()  # of the calls: threads sample while the trainer saves

    def progress(
        self,
        step: int,
        seed: int,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        longest: int,
        ends: ResponseEnds,
    ) -> Progress:
        """Responses of one call for the batch that begins at ``step``, those of a checkpoint included."""
        number = self._number(step)
        progress = Progress(number, [list(prompt) for prompt in prompts], sampling, {})
        prompts_by_index = dict(enumerate(progress.prompts))
        with self._lock:
            loaded = self._calls.get((number, seed))
            self._calls[number, seed] = progress
            if loaded is None or loaded.sampling != sampling:
                return progress
            for index, sample in loaded.samples.items():
                is_same_prompt = prompts_by_index.get(index) == loaded.prompts[index]
                if is_same_prompt and self._fits(sample, step, longest, ends):
                    progress.samples[index] = sample
        return progress

    def forget_before(self, step: int) -> None:
        """Forget the batches that begin before ``step``: they were trained on."""
        with self._lock:
            first = self._number(step)
            self._calls = {call: progress for call, progress in self._calls.items() if call[0] >= first}

    def save(self, folder: Path, step: int) -> None:
        """Write the responses of batches that have steps after ``step`` into the folder of a checkpoint, or OSError."""
        with self._lock:
            calls = dict(self._calls)
        for (number, seed), progress in calls.items():
            if number < self._number(step):
                continue
            batch = self._batch(progress)
            if batch is not None:
                save_rollouts(batch, folder / f"{FILES}{self.replica:04d}-{number}-{seed}.safetensors")

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote on this replica; OSError or ValueError for a file that cannot be read."""
        if self.replica is None:
            return
        for path in folder.glob(f"{FILES}{self.replica:04d}-*.safetensors"):
            number, seed = map(int, path.stem.split("-")[2:])
            batch = load_rollouts(path)
            rows = dict(zip(batch.sample_ids.tolist(), samples_of(batch), strict=True))
            prompts = {index: prompt for index, (prompt, _) in rows.items()}
            samples = {index: sample for index, (_, sample) in rows.items()}
            self._calls[number, seed] = Progress(number, prompts, batch.sampling, samples)

    def _number(self, step: int) -> int:
        """Number of the rollout batch of an optimizer step: a run that was stopped within a batch begins it again."""
        return step // self.config.updates_per_rollout

    def _fits(self, sample: Sample, step: int, longest: int, ends: ResponseEnds) -> bool:
        """Whether the flags would give this response now: the resumed run may have others."""
        length = len(sample.token_ids)
        end = ends.length_of(sample.token_ids)
        is_whole = end == length if end is not None else length == longest
        is_fresh = min(sample.versions or ()) >= step - (self.config.rollouts.rollout_staleness or 0)
        return is_whole and length <= longest and is_fresh

    def _batch(self, progress: Progress) -> RolloutBatch | None:
        """The good responses of a call, numbered by their prompts; None if there are none."""
        # A copy, because the sampling thread adds responses meanwhile.
        samples = {
            index: sample
            for index, sample in progress.samples.copy().items()
            if sample.token_ids and sample.versions and sample.fault is None
        }
        if not samples:
            return None
        rows = [Conversation(progress.prompts[index], (sample,)) for index, sample in samples.items()]
        batch = batch_of(
            rows,
            max(len(row.prompt) + len(row.token_ids) for row in rows),
            pad=0,
            sampling=progress.sampling,
            has_experts=any(sample.routed_experts is not None for sample in samples.values()),
            has_support=any(sample.support is not None for sample in samples.values()),
        )
        return dataclasses.replace(batch, sample_ids=torch.tensor([*samples]))
