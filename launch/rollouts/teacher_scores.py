"""A teacher's log-probs at the sampled tokens of a rollout batch: from a server, or from files of an earlier run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from megatron_rc.launch.engines.requests import API_KEY
from megatron_rc.launch.engines.teacher_server import (
    SERVED_TEMPERATURE,
    SERVERS,
    ScoredSequence,
    ScoreRequest,
    VllmTeacher,
)
from megatron_rc.launch.rollouts.recorded import file_name
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.distillation import DistillationSection
from megatron_rc.launch.tasks import Text
from megatron_rc.records.rollout import RolloutBatch
from megatron_rc.records.storage import read_file, write_file
from megatron_rc.records.support import take_support

SCHEMA_VERSION = 1  # rises if the meaning of a tensor changes


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """Log-probs of one teacher for one replica's rollout batch, in token positions as the batch.

    Attributes:
        tokens: [n, s] int64, the batch's tokens, by which a file is recognised.
        log_probs: [n, s] float32, log-prob of each sampled token in nats; 0 elsewhere.
        top_ids: [ids] int32, the likeliest tokens at each sampled token, one token after the other, row after row.
        top_counts: [n, s] int32, number of these ids; 0 at tokens that were not sampled.
        top_log_probs: [ids] float32, their log-probs.
    """

    tokens: Tensor
    log_probs: Tensor
    top_ids: Tensor
    top_counts: Tensor
    top_log_probs: Tensor

    def to(self, device: torch.device) -> TeacherScores:
        """The scores with their tensors on a device."""
        return TeacherScores(**{field.name: getattr(self, field.name).to(device) for field in fields(TeacherScores)})


@dataclass(frozen=True)
class Header:
    """What a file of scores says of them."""

    temperature: float
    vocab_size: int
    schema_version: int = SCHEMA_VERSION


class ServedTeacher:
    """Scores the rollout batches of one replica with its server; may run on a thread. Makes no collective."""

    def __init__(self, config: RunConfig, settings: DistillationSection, text: Text, replica: int) -> None:
        self.config = config
        self.settings = settings
        self.replica = replica
        # A run without a server needs no HTTP library.
        from megatron_rc.launch.engines.http_client import HttpClient

        url = (settings.teacher_url or "").split(",")[replica]
        http = HttpClient(url, config.engine.rollout_timeout, api_key=os.environ.get(API_KEY))
        kind = SERVERS[settings.teacher_server]
        self.server = kind(http, settings.teacher_top_k, config.model.vocab_size, text.decode)
        if isinstance(self.server, VllmTeacher):
            self.server.model = settings.teacher_model
        self.server.wait_until_ready(config.engine.rollout_timeout)

    def score(self, batch: RolloutBatch, prompts: Sequence[Sequence[int]] | None = None) -> TeacherScores:
        """Score the sampled tokens of all rows; EngineError as in :class:`TeacherServer`.

        ``prompts``: the teacher's own prompt of each row; None: the policy's.
        """
        places = [mask.nonzero().flatten().tolist() for mask in batch.response_mask]
        rows = [row for row, sampled in enumerate(places) if sampled]
        requests = []
        for row in rows:
            begin = places[row][0]
            tokens = batch.tokens[row, : places[row][-1] + 1].tolist()
            prompt = tokens[:begin] if prompts is None else list(prompts[row])
            requests.append(ScoreRequest(prompt, tokens[begin:]))
        scored = self.server.score(requests, self.config.engine.rollout_concurrency)
        return _scores_of(batch, dict(zip(rows, scored, strict=True)))

    def save(self, scores: TeacherScores, step: int) -> None:
        """Write the scores of the rollout batch of an optimizer step to ``--save-teacher``, if that is given."""
        if self.settings.save_teacher:
            header = Header(SERVED_TEMPERATURE, self.config.model.vocab_size)
            write_scores(scores, header, self.settings.save_teacher, file_name(step, self.replica))


def _scores_of(batch: RolloutBatch, scored: dict[int, ScoredSequence]) -> TeacherScores:
    """The scores of a batch from those of its rows; a row's begin at its first sampled token."""
    log_probs = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    counts = torch.zeros(batch.tokens.shape, dtype=torch.int32)
    ids: list[int] = []
    values: list[float] = []
    for row, sequence in sorted(scored.items()):
        first = int(batch.response_mask[row].nonzero()[0])
        for position in batch.response_mask[row].nonzero().flatten().tolist():
            number = position - first
            log_probs[row, position] = sequence.log_probs[number]
            counts[row, position] = len(sequence.top_ids[number])
            ids += sequence.top_ids[number]
            values += sequence.top_log_probs[number]
    return TeacherScores(
        tokens=batch.tokens.long(),
        log_probs=log_probs,
        top_ids=torch.tensor(ids, dtype=torch.int32),
        top_counts=counts,
        top_log_probs=torch.tensor(values, dtype=torch.float32),
    )


def write_scores(scores: TeacherScores, header: Header, folder: str | Path, name: str) -> None:
    """Write scores to a file of this name, which appears when it is complete."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tensors = {field.name: getattr(scores, field.name) for field in fields(TeacherScores)}
    write_file(Path(folder) / name, tensors, asdict(header))


def read_scores(path: str | Path) -> tuple[TeacherScores, Header]:
    """Read the scores of a file; ValueError if it is missing, damaged or of another form."""
    try:
        tensors, header = read_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    names = {field.name for field in fields(TeacherScores)}
    if set(tensors) != names or header.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has no log-probs of a teacher in this version's form: write it again")
    if set(header) != {field.name for field in fields(Header)}:
        raise ValueError(f"{path} does not say its temperature and vocabulary: write it again")
    return TeacherScores(**tensors), Header(**header)


class RecordedTeacher:
    """Reads the scores that :func:`write_scores` wrote beside the files of ``--load-rollouts``."""

    def __init__(self, config: RunConfig, settings: DistillationSection, replica: int) -> None:
        self.config = config
        self.settings = settings
        self.replica = replica

    def read(self, batch: RolloutBatch, names: Sequence[str]) -> TeacherScores:
        """Return the scores of this replica's share of a rollout batch; ``names``: the files of the whole batch.

        Raises:
            ValueError: a file is missing, damaged or of another temperature, or its tokens are not the batch's.
        """
        length = self.config.training.seq_length
        parts = [self._read_file(name) for name in names]
        whole = TeacherScores(
            tokens=torch.cat([_at_length(part.tokens, length) for part in parts]),
            log_probs=torch.cat([_at_length(part.log_probs, length) for part in parts]),
            top_ids=torch.cat([part.top_ids for part in parts]),
            top_counts=torch.cat([_at_length(part.top_counts, length) for part in parts]),
            top_log_probs=torch.cat([part.top_log_probs for part in parts]),
        )
        size = self.config.rollouts.sequences // self.config.data_parallel_size
        scores = rows_of(whole, slice(self.replica * size, (self.replica + 1) * size))
        has_shape = scores.tokens.shape == batch.tokens.shape
        if not has_shape or bool(((scores.tokens != batch.tokens) & batch.response_mask).any()):
            raise ValueError(
                f"--teacher-files {self.settings.teacher_files}: {', '.join(names)} scored other tokens than the "
                "rollouts of --load-rollouts have: give the folder that was written for them"
            )
        return scores

    def _read_file(self, name: str) -> TeacherScores:
        path = Path(self.settings.teacher_files or "") / name
        scores, header = read_scores(path)
        check_header(header, str(path), self.config, self.settings)
        return scores


def make_teacher(config: RunConfig, text: Text, replica: int) -> ServedTeacher | RecordedTeacher | None:
    """Make the teacher of one replica; None if there is none, or it is a model of this run."""
    settings = config.distillation
    if settings is None or not config.has_teacher_scores:
        return None
    if settings.teacher_files:
        return RecordedTeacher(config, settings, replica)
    return ServedTeacher(config, settings, text, replica)


def check_header(header: Header, where: str, config: RunConfig, settings: DistillationSection) -> None:
    """Raise ValueError if recorded log-probs are of another temperature or vocabulary than the run's."""
    if header.temperature != settings.teacher_temperature:
        raise ValueError(
            f"{where} has log-probs at temperature {header.temperature:g}, --teacher-temperature is "
            f"{settings.teacher_temperature:g}: set it alike"
        )
    if header.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"{where} has log-probs over {header.vocab_size} tokens, the policy has {config.model.vocab_size}: they "
            "cannot be compared"
        )


def _at_length(values: Tensor, length: int) -> Tensor:
    """[n, length], with 0 added or columns cut off."""
    return torch.nn.functional.pad(values[:, :length], (0, max(0, length - values.shape[1])))


def rows_of(scores: TeacherScores, rows: slice) -> TeacherScores:
    """The scores of some rows."""
    places = torch.arange(scores.top_counts.numel()).view_as(scores.top_counts)[rows]
    top_ids, top_counts = take_support(scores.top_ids, scores.top_counts, places)
    top_log_probs, _ = take_support(scores.top_log_probs, scores.top_counts, places)
    return TeacherScores(
        tokens=scores.tokens[rows],
        log_probs=scores.log_probs[rows],
        top_ids=top_ids,
        top_counts=top_counts,
        top_log_probs=top_log_probs,
    )
