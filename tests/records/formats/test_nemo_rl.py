"""Records in NeMo-RL's format."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from megatron_rc.records.formats.nemo_rl import from_nemo_rl, to_nemo_rl
from tests.support.records import FIELDS, HALF, batches, cut, identical, known


def nemo_example():
    """An example by hand: columns as in the tokens, the log-prob of token t in column t, zeros elsewhere."""
    return {
        "input_ids": torch.tensor([[11, 12, 13, 14, 15, 16, 0], [11, 12, 23, 24, 0, 0, 0], [31, 32, 33, 0, 0, 0, 0]]),
        "input_lengths": torch.tensor([6, 4, 3], dtype=torch.int32),
        "generation_logprobs": torch.tensor(
            [[0, 0, -0.13, 0, 0, -0.16, 0], [0, 0, -0.23, -0.24, 0, 0, 0], [0, -0.32, -0.33, 0, 0, 0, 0]]
        ),
        "token_mask": torch.tensor([[0, 0, 1, 0, 0, 1, 0], [0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0]]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "total_reward": torch.tensor([0.5, -1.0, 0.25]),
        "prev_logprobs": torch.tensor(
            [[0, 0, -0.26, 0, 0, -0.32, 0], [0, 0, -0.46, -0.48, 0, 0, 0], [0, -0.64, -0.66, 0, 0, 0, 0]]
        ),
        "truncated": torch.tensor([False, True, False]),
        "advantages": torch.zeros(3, 7),
    }


def test_nemo_rl_is_read_token_by_token():
    batch = from_nemo_rl(nemo_example(), sampling=HALF, policy_version=6)
    batch.validate()
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 0, 0, 1, 0], [0, 0, 1, 1, 0, 0, 0], [0] * 7]
    labels, mask, log_probs = batch.label_aligned()
    torch.testing.assert_close(-100 * log_probs[mask], labels[mask].float())
    assert torch.equal(batch.old_log_probs, 2 * batch.rollout_log_probs)
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.finish_reasons.tolist() == [0, 1, 0]
    assert batch.rewards.tolist() == [0.5, -1.0, 0.25]
    assert batch.policy_versions.eq(6).all()
    assert identical(from_nemo_rl(nemo_example(), sampling=HALF, policy_version=[6] * 3, group_ids=[0, 0, 1]), batch)


def messages():
    """The same rollouts as messages; the assistant's message in the prompt's history was not sampled."""

    def message(role, *tokens, sampled=False, **more):
        own = {"role": role, "content": "text", "token_ids": torch.tensor(tokens)}
        return own | ({"generation_logprobs": -torch.tensor(tokens) / 100} if sampled else {}) | more

    return [
        [
            message("user", 11),
            message("assistant", 12),
            message("assistant", 13, sampled=True),
            message("tool", 14, 15),
            message("assistant", 16, sampled=True),
        ],
        [
            message("user", 11, 12),
            message("assistant", 23, 24, sampled=True),
            {"role": "user", "content": "untokenised"},
        ],
        [message("user", 31), message("assistant", 32, 33, sampled=True)],
    ]


def test_message_logs_say_the_same():
    fields = nemo_example()
    logs = {"message_log": messages(), "loss_multiplier": fields["sample_mask"]}
    logs |= {name: fields[name] for name in ("total_reward", "truncated")}
    batch = from_nemo_rl(logs, sampling=HALF, policy_version=6)
    expected = from_nemo_rl(fields, sampling=HALF, policy_version=6)
    columns = {name: getattr(expected, name)[:, :6] for name in FIELDS[:4]}
    assert identical(batch, dataclasses.replace(expected, **columns, old_log_probs=None))


def test_masks_of_messages_come_before_roles():
    logs = messages()
    for message in logs[1][:2]:  # NeMo-RL adds these masks before it trains
        message["token_loss_mask"] = torch.full_like(message["token_ids"], message["role"] == "assistant")
        message.setdefault("generation_logprobs", torch.zeros(2))
    logs[1][0]["routed_experts"] = torch.ones(2, 3, 1, dtype=torch.uint8)
    fields = {"message_log": logs, "loss_multiplier": torch.ones(3), "total_reward": torch.zeros(3)}
    batch = from_nemo_rl(fields, sampling=HALF, policy_version=0)
    assert batch.response_mask[1].int().tolist() == [0, 0, 1, 1, 0, 0]
    assert batch.routed_experts[1, :, 0, 0].tolist() == [1, 1, -1, -1, -1, -1]
    assert batch.finish_reasons.eq(0).all()


def test_logged_lines_are_read():
    fields = nemo_example()
    names = {"input_ids": "token_ids", "token_mask": "token_loss_mask", "sample_mask": "sample_loss_mask"}
    names |= {"total_reward": "rewards"}
    logged = {names.get(name, name): value.tolist() for name, value in fields.items()}
    batch = from_nemo_rl(logged, sampling=HALF, policy_version=6)
    assert identical(batch, from_nemo_rl(fields, sampling=HALF, policy_version=6))


def test_nemo_rl_is_written_as_it_is_read():
    fields = nemo_example()
    written = to_nemo_rl(from_nemo_rl(fields, sampling=HALF, policy_version=6), pad_token_id=0)
    del fields["advantages"]
    # A sequence that is masked as a whole keeps its tokens, but not the start of its response.
    for name, value in fields.items():
        assert torch.equal(written[name][:2], value[:2]), name
    assert written["sample_mask"].tolist() == [1, 1, 0]
    assert written["prompt_ids_for_adv"][:2, :2].tolist() == [[11, 12], [11, 12]]


@settings(max_examples=25, deadline=None)
@given(batch=batches(ordinary=True))
def test_nemo_rl_and_back(batch):
    """Lost: sample ids, names of groups, versions, abort as a finish reason, sampling parameters."""
    fields = to_nemo_rl(batch, pad_token_id=0)
    read_batch = from_nemo_rl(fields, sampling=batch.sampling, policy_version=3, group_ids=batch.group_ids.tolist())
    expected = cut(known(batch))
    assert identical(
        read_batch,
        dataclasses.replace(
            expected,
            sample_ids=torch.arange(batch.num_sequences),
            policy_versions=torch.full(expected.tokens.shape, 3, dtype=torch.int32),
            finish_reasons=(batch.finish_reasons == 1).long(),
        ),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.zeros(3, 7)}, "input_ids is torch.float32: expected integers"),
        ({"input_lengths": torch.tensor([6, 8, 3])}, "input_lengths of sequence 1 is 8: expected 0 to 7"),
        ({"sample_mask": torch.tensor([1, 0.5, 0])}, "sample_mask of sequence 1 is 0.5: expected 0 or 1"),
        ({"total_reward": None}, "total_reward is missing: score the responses first"),
        ({"policy_version": [1, 2]}, r"policy_version has shape \(2,\): expected \(3,\)"),
        ({"message_log": [[{"role": "user"}]]}, "message_log of sequence 0 has no message with token_ids"),
        (
            {"message_log": [[{"token_ids": [1, 2], "token_loss_mask": [0, 1], "role": "assistant"}]]},
            "message 0 of sequence 0: generation_logprobs are missing, but token_loss_mask trains on it",
        ),
        (
            {"message_log": [[{"token_ids": [1, 2], "generation_logprobs": torch.zeros(2).bfloat16()}]]},
            "message 0 of sequence 0: generation_logprobs is torch.bfloat16, which shifts the ratios by percents",
        ),
    ],
)
def test_wrong_nemo_rl_batches_are_refused(change, message):
    arguments = {"policy_version": 6, "group_ids": None}
    arguments |= {name: change[name] for name in arguments if name in change}
    fields = nemo_example() | {name: value for name, value in change.items() if name not in arguments}
    with pytest.raises(ValueError, match=message):
        from_nemo_rl(fields, sampling=HALF, **arguments)
