"""Records in slime's format."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from megatron_rc.records.formats.nemo_rl import to_nemo_rl
from megatron_rc.records.formats.slime import from_slime, to_slime
from megatron_rc.records.formats.verl import to_verl
from tests.support.records import HALF, batches, changed, cut, example, identical, known


def slime_example():
    """An example by hand: entry j of the log-probs is for the j-th token of the response."""
    return [
        {
            "index": 40,
            "group_index": 20,
            "tokens": [11, 12, 13, 14, 15, 16],
            "response_length": 4,
            "loss_mask": [1, 0, 0, 1],
            "rollout_log_probs": [-0.13, 0.0, 0.0, -0.16],
            "log_probs": [-0.26, 0.0, 0.0, -0.32],
            "reward": 0.5,
            "status": "completed",
            "weight_versions": ["3"],
            "rollout_routed_experts": torch.arange(10, dtype=torch.uint8).view(5, 2, 1),
            "response": "text",
        },
        {
            "index": 41,
            "group_index": 20,
            "tokens": [11, 12, 23],
            "response_length": 1,
            "loss_mask": None,
            "rollout_log_probs": [-0.23],
            "reward": {"math": -1.0, "style": 2.0},
            "status": "truncated",
            "weight_versions": ["5", "4"],
            "rollout_routed_experts": torch.arange(4).view(2, 2, 1).tolist(),
        },
    ]


def test_slime_is_read_token_by_token():
    batch = from_slime(slime_example(), sampling=HALF, reward_key="math")
    batch.validate()
    assert batch.tokens.tolist() == [[11, 12, 13, 14, 15, 16], [11, 12, 23, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert batch.turn_ids[0].tolist() == [-1, -1, 0, -1, -1, 1], "a tool's tokens have loss_mask 0"
    labels, mask, log_probs = batch.label_aligned()
    torch.testing.assert_close(-100 * log_probs[mask], labels[mask].float())
    assert torch.equal(batch.old_log_probs[0], 2 * batch.rollout_log_probs[0])
    assert batch.old_log_probs[1, :3].isnan().all()  # this sample has none
    assert batch.sample_ids.tolist() == [40, 41]
    assert batch.group_ids.tolist() == [20, 20]
    assert batch.rewards.tolist() == [0.5, -1.0]
    assert batch.finish_reasons.tolist() == [0, 1]
    assert batch.policy_versions[:, 0].tolist() == [3, 4]  # the oldest version of a response
    assert batch.routed_experts[0, :, 0, 0].tolist() == [0, 2, 4, 6, 8, -1]
    assert batch.routed_experts[1, :, 0, 0].tolist() == [0, 2, -1, -1, -1, -1]
    first, second = slime_example()
    removed = from_slime([first | {"remove_sample": True}, second], sampling=HALF, reward_key="math")
    assert removed.response_mask.sum(dim=1).tolist() == [0, 1]
    with pytest.raises(ValueError, match="batches is empty"):
        from_slime([], sampling=HALF)


def test_slime_is_written_as_it_is_read():
    sample, other = slime_example()
    batch = from_slime([sample, other | {"log_probs": [-0.46]}], sampling=HALF, reward_key="math")
    results, other = to_slime(batch)
    assert set(results) == set(sample) - {"response"}
    for name in set(results) - {"rollout_log_probs", "log_probs", "rollout_routed_experts"}:
        assert results[name] == sample[name], name
    for name in ("rollout_log_probs", "log_probs"):
        assert results[name] == pytest.approx(sample[name])
    assert torch.equal(results["rollout_routed_experts"], sample["rollout_routed_experts"].int())
    assert other["loss_mask"] == [1]
    assert other["weight_versions"] == ["4"]


def test_rows_of_one_rollout_keep_its_number():
    first, second = slime_example()
    first = first | {"rollout_id": 12, "log_probs": None}
    second = second | {"rollout_id": 12, "reward": 0.5, "index": 42}
    alone = slime_example()[1] | {"rollout_id": None}
    batch = from_slime([first, alone, second], sampling=HALF, reward_key="math")
    assert batch.rollout_ids.tolist() == [12, 13, 12]
    assert batch.has_split_rollouts
    assert [sample["rollout_id"] for sample in to_slime(batch.rows([0, 2]))] == [12, 12]
    with pytest.raises(ValueError, match=r"rollout_ids: .* verl has no field"):
        to_verl(batch, pad_token_id=0)
    with pytest.raises(ValueError, match=r"rollout_ids: .* NeMo-RL has no field"):
        to_nemo_rl(batch, pad_token_id=0)
    with pytest.raises(ValueError, match="sample 0 of the list: rollout_id is 'a'"):
        from_slime([first | {"rollout_id": "a"}], sampling=HALF)


@settings(max_examples=25, deadline=None)
@given(batch=batches(ordinary=True))
def test_slime_and_back(batch):
    """Lost: versions within a sequence, the route of the last token, sampling parameters."""
    read_batch = from_slime(to_slime(batch), sampling=batch.sampling)
    mask = batch.response_mask
    expected = cut(known(batch))
    oldest = torch.where(mask, batch.policy_versions, 2**31 - 1).amin(dim=1, keepdim=True)
    used = (mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1, keepdim=True)
    # concatenate fills up with versions of 0
    position = torch.arange(expected.tokens.shape[1])
    routes = expected.routed_experts
    assert identical(
        read_batch,
        dataclasses.replace(
            expected,
            policy_versions=torch.where(position < used, oldest, 0),
            routed_experts=None
            if routes is None
            else torch.where((position == used - 1)[..., None, None], -1, routes).int(),
        ),
    )


def test_several_versions_are_all_written():
    batch = changed(example(False), "policy_versions", 3, (2, 6))
    assert to_slime(batch)[2]["weight_versions"] == ["3", "6"]
    assert to_verl(batch, pad_token_id=0)[1]["param_version_start"][2] == 3
    assert to_verl(batch, pad_token_id=0)[1]["param_version_end"][2] == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1.5] * 6}, "tokens is torch.float32: expected integers"),
        ({"response_length": 7}, "response_length is 7: expected 0 to 6, the number of tokens"),
        ({"response_length": ...}, "'response_length' is missing"),
        ({"rollout_log_probs": None}, "rollout_log_probs is missing: the engine was not asked for log-probs"),
        ({"loss_mask": [1, 0.5, 0, 1]}, "loss_mask has 0.5: expected 0 or 1"),
        ({"log_probs": torch.zeros(4).half()}, "log_probs is torch.float16, which shifts the ratios by percents"),
        ({"reward": None}, "reward is None: score the responses first"),
        ({"reward": {"math": 1.0}}, "reward has math: pass one of them as reward_key"),
        ({"status": "pending"}, "status is 'pending': expected one of completed, truncated, aborted, failed"),
        ({"group_index": "g"}, "group_index is 'g': expected an integer"),
        ({"weight_versions": [3.7]}, r"weight versions \[3.7\]: pass policy_version instead, an integer"),
        ({"weight_versions": ["default"]}, r"weight versions \['default'\]: pass policy_version"),
        ({"weight_versions": [str(2**31)]}, "sequence 0 has the weight version 2147483648, beyond 32 bits: pass the"),
    ],
)
def test_wrong_samples_are_refused(change, message):
    sample = slime_example()[0] | change
    with pytest.raises(ValueError, match=message):
        from_slime([{name: value for name, value in sample.items() if value is not ...}], sampling=HALF)
