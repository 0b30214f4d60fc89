"""Recorded rollouts: files that one run writes (``--save-rollouts``) and another reads instead of sampling.

Each replica writes one file per rollout batch, ``step-<step>-replica-<replica>.safetensors`` (see
:mod:`megatron_rc.records.rollout`). The reading run may have another number of data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.records.rollout import RolloutBatch, SamplingParams, load_rollouts, save_rollouts

_log = logging.getLogger("megatron_rc")
_NAME = re.compile(r"step-(\d{7})-replica-(\d{4})\.safetensors")


def write_rollouts(batch: RolloutBatch, folder: str | Path, step: int, replica: int) -> None:
    """Write one replica's share of the rollout batch of an optimizer step."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    # A run that was killed while it wrote leaves a partial file.
    for partial in Path(folder).glob(f".step-*-replica-{replica:04d}.safetensors.*"):
        partial.unlink(missing_ok=True)
    save_rollouts(batch, Path(folder) / file_name(step, replica))


def add_log_probs(folder: str | Path, step: int, replica: int, log_probs: Mapping[str, Tensor]) -> None:
    """Write the trainer's log-probs, [n, s] in token positions, into the file that :func:`write_rollouts` wrote."""
    path = Path(folder) / file_name(step, replica)
    batch = load_rollouts(path)
    length = batch.tokens.shape[1]
    fields: dict[str, Any] = {name: values[:, :length] for name, values in log_probs.items()}
    save_rollouts(dataclasses.replace(batch, **fields), path)


def file_name(step: int, replica: int) -> str:
    """Return the name of the file with one replica's share of the rollout batch of an optimizer step."""
    return f"step-{step:07d}-replica-{replica:04d}.safetensors"


def find_rollouts(folder: str | Path) -> dict[int, list[Path]]:
    """Files of each complete rollout batch, in the order of steps and replicas; ValueError if there is none."""
    files_of_steps = _files_of_steps(folder)
    num_replicas = 1 + max(replica for files in files_of_steps.values() for replica in files)
    complete = {}
    for step, files in files_of_steps.items():
        if len(files) == num_replicas:
            complete[step] = [files[replica] for replica in range(num_replicas)]
    if not complete:
        raise ValueError(
            f"{folder} has no complete rollout batch: every batch lacks files of the {num_replicas} replicas"
        )
    return complete


def _files_of_steps(folder: str | Path) -> dict[int, dict[int, Path]]:
    """Record files by step and replica, in the order of steps."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder")
    files: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in sorted(Path(folder).glob("*.safetensors")):
        if match := _NAME.fullmatch(path.name):
            files[int(match[1])][int(match[2])] = path
    if not files:
        raise ValueError(f"{folder} holds no rollouts (step-<step>-replica-<replica>.safetensors)")
    return files


class RecordedRollouts:
    """Reads the rollout batches of a folder; the numbers of sequences and prompts are over all replicas."""

    def __init__(self, folder: str | Path, length: int, sequences: int, prompts: int) -> None:
        complete = find_rollouts(folder)
        self.files = list(complete.values())
        # The run that wrote them failed or was killed at these steps.
        skipped = ", ".join(str(step) for step in _files_of_steps(folder) if step not in complete)
        if skipped:
            _log.warning(
                "--load-rollouts %s: skipped steps %s, because files of some replicas are missing", folder, skipped
            )
        self.length = length
        self.sequences = sequences
        self.prompts = prompts

    def names(self, index: int) -> list[str]:
        """Names of the files of the ``index``-th rollout batch, in the order of the replicas."""
        return [path.name for path in self.files[index]]

    def read(self, index: int, replica: int, replicas: int) -> RolloutBatch:
        """One replica's share of the ``index``-th rollout batch: whole groups, in the order of the records.

        Raises ValueError if a file is damaged, or the batch does not have the sizes of the flags.
        """
        paths = self.files[index]
        batch = RolloutBatch.concatenate([load_rollouts(path) for path in paths])
        if not batch.response_mask.any():
            raise ValueError(f"{paths[0].parent}: no response of the batch of {paths[0].name} has a token: remove it")
        # Some sources number their prompts on from batch to batch; here group ids start at 0 in each batch.
        names, group_ids = batch.group_ids.unique(return_inverse=True)
        has_sizes = batch.num_sequences == self.sequences and len(names) == self.prompts
        if not has_sizes or (group_ids.diff() < 0).any():
            raise ValueError(
                f"{paths[0].parent}: the batch of {paths[0].name} has {batch.num_sequences} sequences, the flags ask "
                f"for {self.sequences}, of {self.prompts} prompts one after the other ({len(names)} found): give the "
                "--grpo-prompts-per-step and --grpo-group-size that wrote it"
            )
        try:
            batch = dataclasses.replace(batch, group_ids=group_ids).at_length(self.length)
        except ValueError as problem:
            raise ValueError(f"{paths[0].parent}: --seq-length {self.length} is too short: {problem}") from None
        share = self.sequences // replicas
        return batch.rows(slice(replica * share, (replica + 1) * share))

    def read_for(self, config: RunConfig, index: int, replica: int) -> RolloutBatch:
        """:meth:`read`, for a run with this configuration; ValueError if the run cannot train on the records."""
        batch = self.read(index, replica, config.data_parallel_size)
        _check_sampling(batch.sampling, config)
        _check_split_rollouts(batch, config)
        return batch


def _check_sampling(recorded: SamplingParams, config: RunConfig) -> None:
    """Check that records were sampled as the flags say, for the trainer computes the same distribution."""
    flags = {"temperature": "rl-default-temperature"}
    if not config.rollouts.allow_truncated_sampling:
        flags |= {"top_p": "rollout-top-p", "top_k": "rollout-top-k", "min_p": "rollout-min-p"}
    for name, flag in flags.items():
        was = getattr(recorded, name)
        now = getattr(config.rollouts.sampling, name)
        if was != now:
            raise ValueError(
                f"the rollouts in {config.rollouts.load_rollouts} were sampled at {name} {was}, --{flag} is {now}: "
                "set it alike"
            )


def _check_split_rollouts(batch: RolloutBatch, config: RunConfig) -> None:
    """Check that a run can train on rollouts of several rows; ValueError names the flag that counts each row."""
    if not batch.has_split_rollouts:
        return
    reason = "counts each row as a response, and rows of these records are parts of one rollout (rollout_ids)"
    aggregation = config.loss.aggregation
    if aggregation.startswith("seq-mean"):
        raise ValueError(f"--loss-aggregation {aggregation} {reason}: use token-mean or token-sum")
    estimator = config.advantages.advantage_estimator
    if estimator == "optimal-token-baseline":
        raise ValueError(f"--advantage-estimator {estimator} {reason}: use an estimator of responses, such as grpo")
