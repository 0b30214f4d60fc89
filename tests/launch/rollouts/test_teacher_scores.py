"""Recorded log-probs of a teacher: of any number of replicas, and of these rollouts alone."""

import dataclasses

import pytest
import torch

from megatron_rc.launch.rollouts.recorded import file_name
from megatron_rc.launch.rollouts.teacher_scores import Header, RecordedTeacher, TeacherScores, read_scores, write_scores
from megatron_rc.launch.run_config.distillation import DistillationSection
from tests.support.recorded_training import SEQUENCES, VOCABULARY, flags, recorded_batch, run_config

HEADER = Header(temperature=1.0, vocab_size=VOCABULARY)
TOP_K = 3


def scores_of(batch):
    """Numbers that say where they belong: the log-prob of the i-th entry is -i."""
    counts = torch.where(batch.response_mask, TOP_K, 0).int()
    entries = torch.arange(int(counts.sum()))
    return TeacherScores(
        tokens=batch.tokens,
        log_probs=torch.where(batch.response_mask, -batch.tokens.float(), 0),
        top_ids=(entries % VOCABULARY).int(),
        top_counts=counts,
        top_log_probs=-entries.float(),
    )


@pytest.fixture
def teacher(tmp_path):
    """A reader of the second of two replicas, and the names of the files that two other replicas wrote."""
    config = run_config(flags(tmp_path, "--micro-batch-size=1"), 2)
    settings = DistillationSection(teacher_files=str(tmp_path), teacher_temperature=1.0)
    whole = scores_of(recorded_batch(0))
    names = [file_name(0, replica) for replica in range(2)]
    for name, rows in zip(names, (slice(0, 5), slice(5, SEQUENCES)), strict=True):
        write_scores(_rows_by_loops(whole, rows), HEADER, tmp_path, name)
    return RecordedTeacher(config, settings, replica=1), names


def _rows_by_loops(scores, rows):
    """The scores of some rows; columns after the last sampled token are cut off."""
    starts = torch.nn.functional.pad(scores.top_counts.sum(1).cumsum(0), (1, 0))
    entries = slice(int(starts[rows.start]), int(starts[rows.stop]))
    return TeacherScores(
        tokens=scores.tokens[rows, :15],
        log_probs=scores.log_probs[rows, :15],
        top_ids=scores.top_ids[entries],
        top_counts=scores.top_counts[rows, :15],
        top_log_probs=scores.top_log_probs[entries],
    )


def test_a_replica_reads_its_share_of_all_files(teacher):
    reader, names = teacher
    whole = scores_of(recorded_batch(0))
    share = recorded_batch(0, replica=1, replicas=2)
    results = reader.read(share, names)
    rows = slice(SEQUENCES // 2, SEQUENCES)
    assert torch.equal(results.log_probs, whole.log_probs[rows])
    assert torch.equal(results.top_counts, whole.top_counts[rows])
    begin = int(whole.top_counts[: SEQUENCES // 2].sum())
    assert torch.equal(results.top_log_probs, whole.top_log_probs[begin:])
    assert torch.equal(results.top_ids, whole.top_ids[begin:])


def test_scores_of_other_rollouts_are_refused(teacher):
    reader, names = teacher
    for other in (recorded_batch(1, replica=1, replicas=2), recorded_batch(0)):
        with pytest.raises(ValueError, match=r"--teacher-files .* scored other tokens"):
            reader.read(other, names)


def test_files_that_are_no_scores(teacher, tmp_path):
    _, (name, _) = teacher
    with pytest.raises(ValueError, match=r"nowhere is missing"):
        read_scores(tmp_path / "nowhere")
    scores, header = read_scores(tmp_path / name)
    assert header == HEADER
    write_scores(scores, dataclasses.replace(header, schema_version=2), tmp_path, name)
    with pytest.raises(ValueError, match=r"no log-probs of a teacher in this version's form"):
        read_scores(tmp_path / name)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cut off, damaged"):
        read_scores(path)
