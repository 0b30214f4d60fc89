"""The same rollouts through all formats: JSON lines, verl, NeMo-RL and slime."""

import dataclasses

import pytest
import torch

from megatron_rc.records.formats.nemo_rl import from_nemo_rl, to_nemo_rl
from megatron_rc.records.formats.slime import from_slime, to_slime
from megatron_rc.records.formats.verl import from_verl, to_verl
from tests.records.formats.test_nemo_rl import nemo_example
from tests.records.formats.test_slime import slime_example
from tests.records.formats.test_verl import verl_example
from tests.support.records import HALF, example


@pytest.mark.parametrize(
    ("program", "write"),
    [
        ("verl", lambda batch: to_verl(batch, pad_token_id=0)),
        ("NeMo-RL", lambda batch: to_nemo_rl(batch, pad_token_id=0)),
        ("slime", to_slime),
    ],
)
def test_tokens_that_the_trainer_did_not_score_cannot_be_said(program, write):
    batch = dataclasses.replace(example(), old_log_probs=torch.where(example().tokens == 25, torch.nan, -0.5))
    with pytest.raises(ValueError, match=rf"^sample 5 has tokens without old_log_probs \(NaN\), which {program}"):
        write(batch)
    write(batch.rows([0, 2]))


def test_synchronous_runs_name_no_versions():
    """Their weights have one version, 0; NeMo-RL's batches never have one."""
    tensors, others = verl_example()
    del others["param_version_start"]
    samples = [sample | {"weight_versions": []} for sample in slime_example()]
    read = [from_verl(tensors, others, sampling=HALF), from_slime(samples, sampling=HALF, reward_key="math")]
    for batch in [*read, from_nemo_rl(nemo_example(), sampling=HALF)]:
        assert not batch.policy_versions.any()


def test_fields_that_nobody_scored_are_no_log_probs():
    """verl 0.9.1 copies the engine's log-probs in bypass mode, NeMo-RL writes zeros with force_on_policy_ratio."""
    tensors, non_tensors = verl_example()
    copied = tensors | {"old_log_probs": tensors["rollout_log_probs"].clone()}
    assert from_verl(copied, non_tensors, sampling=HALF).old_log_probs is None
    copied["old_log_probs"][1, 0] -= 0.01
    assert from_verl(copied, non_tensors, sampling=HALF).old_log_probs is not None
    zeros = nemo_example() | {"prev_logprobs": torch.zeros(3, 7)}
    assert from_nemo_rl(zeros, sampling=HALF).old_log_probs is None
