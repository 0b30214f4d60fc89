"""Records in verl's format."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from megatron_rc.records.formats.verl import from_verl, to_verl
from megatron_rc.records.rollout import FINISH_REASONS
from tests.support.records import HALF, batches, changed, cut, example, identical, known


def verl_example():
    """An example by hand: prompts of 2 and 3 tokens padded on the left, responses of 4 and 2 on the right.

    Entry j of the log-probs is for responses[j].
    """
    pad = 0
    prompts = torch.tensor([[pad, 11, 12], [21, 22, 23]])
    responses = torch.tensor([[13, 14, 15, 16], [24, 25, pad, pad]])
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]]),
        "rollout_log_probs": torch.tensor([[-0.13, 0.0, 0.0, -0.16], [-0.24, -0.25, 0.0, 0.0]]),
        "rm_scores": torch.tensor([[0.0, 0.0, 0.0, 0.5], [0.0, -1.5, 0.0, 0.0]]),
        "old_log_probs": torch.tensor([[-0.26, 0.0, 0.0, -0.32], [-0.48, -0.5, 0.0, 0.0]]),
    }, {"uid": ["b", "a"], "param_version_start": [3, 4], "data_source": ["x", "x"]}


def test_verl_is_read_token_by_token():
    batch = from_verl(*verl_example(), sampling=HALF)
    batch.validate(vocab_size=26)
    assert batch.tokens.tolist() == [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 0]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 0, 1, 1, 0]]
    assert batch.turn_ids[0].tolist() == [-1, -1, 0, -1, -1, 1], "a tool's tokens have response_mask 0"
    expected = torch.tensor([[0, 0, -0.13, 0, 0, -0.16], [0, 0, 0, -0.24, -0.25, 0]])
    assert torch.equal(batch.rollout_log_probs, expected)
    assert torch.equal(batch.old_log_probs, 2 * expected)
    assert batch.policy_versions.unique(dim=1).tolist() == [[3], [4]]
    assert batch.group_ids.tolist() == [0, 1]
    assert batch.rewards.tolist() == [0.5, -1.5]
    assert [FINISH_REASONS[index] for index in batch.finish_reasons] == ["length", "stop"]
    # Log-probs follow from token ids: token 13 has -0.13.
    labels, mask, log_probs = batch.label_aligned()
    torch.testing.assert_close(-100 * log_probs[mask], labels[mask].float())


def test_verl_is_written_as_it_is_read():
    tensors, others = verl_example()
    tensors["routed_experts"] = torch.arange(2 * 7 * 2).view(2, 7, 2, 1) * tensors["attention_mask"][..., None, None]
    batch = from_verl(tensors, others, sampling=HALF)
    assert batch.routed_experts[0, :, 0, 0].tolist() == [2, 4, 6, 8, 10, 12]
    written, names = to_verl(batch, pad_token_id=0)
    assert set(written) == set(tensors)
    routes = torch.where(tensors["attention_mask"][..., None, None] == 1, tensors["routed_experts"], -1)
    for name, value in (tensors | {"routed_experts": routes.int()}).items():
        assert torch.equal(written[name], value), name
    assert names == {"uid": ["0", "1"], "param_version_start": [3, 4], "param_version_end": [3, 4]}
    wide, _ = to_verl(batch, pad_token_id=9, prompt_length=5, response_length=6)
    assert wide["prompts"].tolist() == [[9, 9, 9, 11, 12], [9, 9, 21, 22, 23]]
    assert wide["responses"].tolist() == [[13, 14, 15, 16, 9, 9], [24, 25, 9, 9, 9, 9]]
    assert wide["rm_scores"].nonzero().tolist() == [[0, 3], [1, 1]]


def test_scores_of_earlier_turns_stay_with_their_turns():
    """The last sampled token has the rest, and a tool's token belongs to it."""
    tensors, others = verl_example()
    tensors["rm_scores"] = torch.tensor([[0.25, 0.0, 1.0, 0.5], [0.125, -1.5, 0.0, 0.0]])
    batch = from_verl(tensors, others, sampling=HALF)
    assert batch.rewards.tolist() == [1.75, -1.375]
    assert batch.turn_rewards.tolist() == [[0, 0, 0.25, 0, 0, 0], [0, 0, 0, 0.125, 0, 0]]
    written, _ = to_verl(batch, pad_token_id=0)
    assert written["rm_scores"].tolist() == [[0.25, 0, 0, 1.5], [0.125, -1.5, 0, 0]]
    assert from_verl(*verl_example(), sampling=HALF).turn_rewards is None


@settings(max_examples=25, deadline=None)
@given(batch=batches(ordinary=True))
def test_verl_and_back(batch):
    """Lost: sample ids, names of groups, finish reasons, versions within a sequence, sampling parameters."""
    read_batch = from_verl(*to_verl(batch, pad_token_id=0), sampling=batch.sampling)
    mask = batch.response_mask
    expected = cut(known(batch))
    oldest = torch.where(mask, batch.policy_versions, 2**31 - 1).amin(dim=1)
    groups = list(dict.fromkeys(batch.group_ids.tolist()))
    assert identical(
        read_batch,
        dataclasses.replace(
            expected,
            sample_ids=torch.arange(len(mask)),
            group_ids=torch.tensor([groups.index(group) for group in batch.group_ids.tolist()]),
            finish_reasons=read_batch.finish_reasons,
            policy_versions=oldest.unsqueeze(1).expand(expected.tokens.shape),
        ),
    )


def test_verl_without_a_response_keeps_its_reward():
    batch = changed(example(False), "response_mask", False, 1)
    tensors, others = to_verl(batch, pad_token_id=0)
    read_batch = from_verl(tensors, others, sampling=HALF)
    assert read_batch.rewards.tolist() == batch.rewards.tolist()
    assert read_batch.response_mask.sum(dim=1).tolist() == [2, 0, 3]
    assert others["param_version_start"] == [4, 0, 6]


def test_verls_older_forms_are_read():
    tensors, others = verl_example()
    tensors["token_level_scores"] = tensors["rm_scores"] * 2
    del tensors["response_mask"], tensors["input_ids"], others["param_version_start"]
    batch = from_verl(tensors, others, sampling=HALF, policy_version=8)
    assert batch.response_mask.sum(dim=1).tolist() == [4, 2]
    assert batch.rewards.tolist() == [1.0, -3.0]
    assert batch.policy_versions.eq(8).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": None}, "prompts is missing"),
        ({"rollout_log_probs": None}, "rollout_log_probs is missing: set .*calculate_log_probs=True"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]] * 2)}, "attention_mask of sequence 0.* prompts"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1]] * 2)}, "attention_mask of .* responses padded"),
        ({"response_mask": torch.ones(2, 4)}, "response_mask of sequence 1 has padding marked as sampled"),
        ({"input_ids": torch.zeros(2, 7)}, "input_ids of sequence 0, column 1 differ"),
        ({"rm_scores": None}, "token_level_scores and rm_scores are missing: score the responses first"),
        ({"uid": None}, "uid is missing in non_tensors"),
        ({"uid": ["a"]}, "uid has 1 entries: expected 2"),
    ],
)
def test_wrong_verl_batches_are_refused(change, message):
    tensors, others = verl_example()
    for name, value in change.items():
        fields = others if name in ("uid", "param_version_start") else tensors
        fields.pop(name, None)
        if value is not None:
            fields[name] = value
    with pytest.raises(ValueError, match=message):
        from_verl(tensors, others, sampling=HALF)


def test_verls_columns_must_suffice():
    with pytest.raises(ValueError, match="prompt_length=3: the longest prompt needs 5, make it at least that"):
        to_verl(example(), pad_token_id=0, prompt_length=3)
    with pytest.raises(ValueError, match="response_length=2: the longest response needs 4"):
        to_verl(example(), pad_token_id=0, response_length=2)


def nested_example():
    """The example in the form of verl's default trainer: rows of any length, no attention mask."""
    tensors, others = verl_example()
    tensors["routed_experts"] = torch.arange(2 * 7 * 2).view(2, 7, 2, 1) * tensors["attention_mask"][..., None, None]
    is_token = tensors["attention_mask"] != 0
    columns = {3: is_token[:, :3], 4: is_token[:, 3:], 7: is_token}
    rows = {
        name: [row[mask] for row, mask in zip(value, columns[value.shape[1]], strict=True)]
        for name, value in tensors.items()
        if name != "attention_mask"
    }
    return (
        {
            name: torch.nested.as_nested_tensor(rows_of_tensor, layout=torch.jagged)
            for name, rows_of_tensor in rows.items()
        },
        tensors,
        others,
    )


def test_verls_nested_tensors_are_the_same_records():
    nested, tensors, others = nested_example()
    batch, expected = (from_verl(form, others, sampling=HALF) for form in (nested, tensors))
    # Without columns of padding a response's limit is unknown.
    assert [FINISH_REASONS[index] for index in batch.finish_reasons] == ["stop", "stop"]
    assert identical(dataclasses.replace(batch, finish_reasons=expected.finish_reasons), expected)
    batch.validate(vocab_size=26)
    # verl stacks rows of one length.
    nested["prompts"] = torch.tensor([[10, 11, 12], [21, 22, 23]])
    nested |= {"input_ids": None, "routed_experts": None, "old_log_probs": None}
    assert from_verl(nested, others, sampling=HALF).tokens[0].tolist() == [10, 11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_log_probs": None}, "rollout_log_probs is missing: set .*calculate_log_probs=True"),
        ({"rollout_log_probs": torch.zeros(2, 4)}, "rollout_log_probs has 4 tokens in sequence 1: expected 2"),
        ({"old_log_probs": [[-1.0] * 4, [-1.0] * 2]}, "old_log_probs is list: expected a nested tensor, a row a seq"),
        ({"prompts": torch.ones(3, 2)}, "prompts has 3 rows and responses 2: expected one each"),
    ],
)
def test_nested_tensors_that_do_not_fit_are_refused(change, message):
    nested, _, others = nested_example()
    with pytest.raises(ValueError, match=message):
        from_verl(nested | change, others, sampling=HALF)
