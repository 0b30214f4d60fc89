"""Bad responses: how they are recognised, and ``--bad-samples``.

A fault of all answers, or a refusal by the server, is no bad response: the engine raises an error for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_rc.launch.engines import EngineError, RolloutEngine, Sample
from megatron_rc.launch.engines.answers import derive_seed, fault_in_log_probs
from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import FINISH_REASONS, RolloutBatch, SamplingParams

BAD_FOLDER = "bad"
SAMPLES_FILE = "samples.jsonl"
_DROPPED = FINISH_REASONS.index("abort")
_CUT_OFF = FINISH_REASONS.index("length")
# Added to the number of a retry, so that no other request has its seed.
_TRIES_FROM = 1 << 32


class GoodSamples:
    """Samples from an engine, and handles bad responses as ``--bad-samples`` says. Makes no collective.

    ``ends`` is what ends a response. ``open_rollouts`` keeps the responses of rollout batches under way; None: nothing
    is kept.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: RolloutEngine,
        ends: ResponseEnds,
        replica: int,
        open_rollouts: OpenRollouts | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.replica = replica
        self.ends = ends
        self.open_rollouts = open_rollouts
        self.policy = config.guards.bad_samples
        self._counts = threading.local()  # with --rl-partial-rollouts several threads sample and evaluate
        self.file = bad_folder(config) / SAMPLES_FILE
        urls = config.engine.rollout_url
        self.name = urls.split(",")[replica] if urls else f"--rollout-engine {config.engine.rollout_engine}"

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        longest: int,
        seed: int,
        step: int | None = None,
    ) -> list[Sample]:
        """One response for each prompt, in their order; a dropped one has no token and the finish reason "abort".

        The ``bad_lengths`` of a response tell of the bad ones before it.

        ``step``: optimizer step at which their rollout batch begins; None: they belong to none.

        Raises EngineError if a response is bad, with ``--bad-samples stop``.
        """
        samples = self._ask(prompts, params, longest, seed, step)
        faults = self._faults(samples, longest)
        if faults and self.policy == "stop":
            raise EngineError(next(iter(faults.values())))
        self._count_and_write(faults, prompts, samples, attempt=1, step=step)
        bad_lengths: dict[int, tuple[int, ...]] = {index: () for index in faults}

        retries = self.config.guards.bad_sample_attempts if self.policy == "resample" else 0
        for number in range(retries):
            if not faults:
                break
            seed_of_try = derive_seed(seed, _TRIES_FROM + number)
            again = self._ask([prompts[index] for index in faults], params, longest, seed_of_try, step)
            for index, sample in zip(faults, again, strict=True):
                bad_lengths[index] += (len(samples[index].token_ids),)
                samples[index] = sample
            faults = self._faults(samples, longest)
            self._count_and_write(faults, prompts, samples, attempt=number + 2, step=step)
        for index in faults:
            bad_lengths[index] += (len(samples[index].token_ids),)
            samples[index] = Sample([], [], "abort")
        for index, lengths in bad_lengths.items():
            samples[index] = dataclasses.replace(samples[index], bad_lengths=lengths)
        return samples

    def _faults(self, samples: Sequence[Sample], longest: int) -> dict[int, str]:
        """Error messages of the bad responses, by their index."""
        faults = {}
        for index, sample in enumerate(samples):
            fault = self.fault_of(sample, longest, index)
            if fault is not None:
                faults[index] = fault
        return faults

    def _ask(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, longest: int, seed: int, step: int | None
    ) -> list[Sample]:
        if step is None or self.open_rollouts is None:
            return self.engine.sample(prompts, params, longest, seed)
        progress = self.open_rollouts.progress(step, seed, prompts, params, longest, self.ends)
        return list(cast(Any, self.engine).sample(prompts, params, longest, seed, progress))

    @property
    def bad(self) -> int:
        """Number of bad responses to this thread so far, retries included."""
        return getattr(self._counts, "bad", 0)

    def fault_of(self, sample: Sample, longest: int, index: int) -> str | None:
        """Return an error message if the response to prompt number ``index`` is bad; None if it is good.

        ``longest`` is the number of tokens that were asked for.
        """
        where = f"{self.name}, prompt {index}:"
        vocabulary = self.config.model.vocab_size
        if not sample.token_ids:
            return f"{where} the response is empty, expected at least one token"
        if len(sample.token_ids) > longest:
            return f"{where} {len(sample.token_ids)} tokens came, {longest} were asked for"
        for name, values in (("log-probs", sample.log_probs), ("versions", sample.versions)):
            if values is not None and len(values) != len(sample.token_ids):
                return f"{where} {len(values)} {name} came for {len(sample.token_ids)} tokens"
        for position, token in enumerate(sample.token_ids):
            if not 0 <= token < vocabulary:
                return (
                    f"{where} response token {position} is {token}, expected less than the vocabulary's {vocabulary}: "
                    "do the engine and the trainer use the same tokenizer?"
                )
        if self.config.correction.bad_log_probs != "error":
            return None  # the correction rejects bad log-probs by itself
        if sample.fault:
            return sample.fault
        # With "stop", the check of the whole rollout batch finds bad log-probs later, and names the sample.
        if self.policy == "stop":
            return None
        return fault_in_log_probs(sample.log_probs, where)

    def _count_and_write(
        self,
        faults: dict[int, str],
        prompts: Sequence[Sequence[int]],
        samples: Sequence[Sample],
        *,
        attempt: int,
        step: int | None,
    ) -> None:
        """Count the bad responses, and append a line for each to the run's ``bad/samples.jsonl``.

        Args:
            faults: error messages of the bad responses, by their index.
            prompts: tokens of all prompts.
            samples: responses to all prompts.
            attempt: 1 for the first responses, then one more for each retry.
            step: optimizer step at which their rollout batch begins; None: they belong to none.
        """
        self._counts.bad = self.bad + len(faults)
        if not faults:
            return
        lines = []
        for index, fault in faults.items():
            sample = samples[index]
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "replica": self.replica,
                "index": index,
                "try": attempt,
                "error": fault,
                "step": step,
                # The engine's weights now. Other ones may have sampled the response: ``versions`` has them for each
                # token, and is null if the engine's ``version`` sampled all of them.
                "weights": self.engine.version,
                "versions": sample.versions,
                "prompt": list(prompts[index]),
                "tokens": sample.token_ids,
                "log_probs": [value if math.isfinite(value) else str(value) for value in sample.log_probs],
            }
            lines.append(json.dumps(line) + "\n")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            raise EngineError(
                f"{self.file} cannot be written ({error.strerror}): make room, or choose another --runs-dir"
            ) from error


def bad_folder(config: RunConfig) -> Path:
    """Folder of a run's bad samples and batches."""
    return Path(config.launch.runs_dir) / config.launch.run_name / BAD_FOLDER


def dropped(batch: RolloutBatch) -> Tensor:
    """[n] bool: dropped responses. They have no token and count in no reward."""
    return (batch.finish_reasons == _DROPPED) & ~batch.response_mask.any(dim=1)


def cut_off(batch: RolloutBatch) -> Tensor:
    """[n] bool: responses that ended at the length limit."""
    return batch.finish_reasons == _CUT_OFF


def without_overlong(batch: RolloutBatch) -> RolloutBatch:
    """Mask all tokens of responses that were cut off, as DAPO does (Yu et al. 2025, overlong filtering).

    Their rewards stay, so the baselines of the other responses do not change.
    """
    is_whole = ~cut_off(batch).unsqueeze(1)
    return dataclasses.replace(batch, response_mask=torch.where(is_whole, batch.response_mask, False))
