"""What other programs' records become, and back: lines of JSON, verl, NeMo-RL and slime."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings

from megatron_rc.records.formats.jsonl import from_json_lines, read_jsonl, to_json_lines, write_jsonl
from megatron_rc.records.formats.nemo_rl import from_nemo_rl, to_nemo_rl
from megatron_rc.records.formats.slime import from_slime, to_slime
from megatron_rc.records.formats.verl import from_verl, to_verl
from megatron_rc.records.rollout import FINISH_REASONS, RolloutBatch, SamplingParams, load_rollouts, save_rollouts
from tests.records.test_rollout import FIELDS, HALF, batches, changed, cut, example, known
from tests.support.records import identical

# JSON lines


@settings(max_examples=25, deadline=None)
@given(batch=batches())
def test_lines_keep_what_a_record_says(batch):
    (found,) = from_json_lines(to_json_lines(batch), batch_size=10)
    assert identical(found, cut(known(batch)))


def test_lines_are_plain_json():
    first, *_ = map(json.loads, to_json_lines(example()))
    assert first == {
        "schema_version": 1,
        "sample_id": 7,
        "group_id": 3,
        "reward": 0.5,
        "finish_reason": "stop",
        "sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "log_probs_mode": "processed"},
        "tokens": [11, 12, 13, 14, 15, 16],
        "response_mask": [0, 0, 1, 0, 0, 1],
        "rollout_log_probs": [None, None, -0.125, None, None, -0.3125],
        "policy_versions": [None, None, 4, None, None, 4],
        "routed_experts": example().routed_experts[0, :6].tolist(),
    }


def test_files_of_lines_are_read_batch_by_batch(tmp_path):
    path, batch = tmp_path / "rollouts.jsonl", example()
    other = dataclasses.replace(example(False), sampling=SamplingParams())
    assert write_jsonl((part for part in (batch, other)), path) == 6
    found = list(read_jsonl(path, batch_size=2))
    assert [part.sample_ids.tolist() for part in found] == [[7, 5], [9], [7, 5], [9]]
    assert [part.sampling.temperature for part in found] == [0.5, 0.5, 1.0, 1.0]
    assert identical(RolloutBatch.concatenate(found[:2]), known(batch))
    path.write_text(path.read_text().rstrip("\n"))  # what stands after the last line does not matter
    assert sum(part.num_sequences for part in read_jsonl(path, batch_size=64)) == 6


def test_reading_holds_one_batch_at_a_time():
    taken = []
    lines = (taken.append(line) or line for line in to_json_lines(example()))
    first = next(from_json_lines(lines, batch_size=1))
    assert first.sample_ids.tolist() == [7]
    assert len(taken) == 2


def record(**change):
    """The first line of the example with other fields; ``...`` takes one away."""
    fields = json.loads(next(to_json_lines(example()))) | change
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"line 2: no JSON .* the file is cut off or damaged"),
        (record()[:-9], "line 2: no JSON"),
        ("[]", "line 2: a JSON list: expected an object"),
        ("{}", "schema_version is None: this release reads version 1"),
        (record(schema_version=2), "schema_version is 2"),
        (record(text="hello"), "fields unknown or missing: text"),
        (record(reward=..., tokens=...), "fields unknown or missing: reward, tokens"),
        (record(tokens=[1, 2.5, 3, 4, 5, 6]), "tokens: expected a list of integers"),
        (record(tokens="hello!"), "tokens: expected a list of integers"),
        (record(tokens=[1, 2, 3, 4, 5, 2**70]), "tokens: expected a list of integers"),
        (record(tokens=[1, 2]), "response_mask: expected 0 or 1 for each of 2 tokens"),
        (record(response_mask=[0, 0, 2, 0, 0, 1]), "response_mask: expected 0 or 1 for each of 6 tokens"),
        (record(response_mask=[False] * 6), "response_mask: expected a list of integers"),
        (record(rollout_log_probs=[None] * 6), "rollout_log_probs has None at token 2: expected a number, or null if"),
        (record(rollout_log_probs=[-0.1, -0.2]), "rollout_log_probs: expected a list of 6, one for each token"),
        (record(rollout_log_probs=[None, None, "-1", None, None, -1]), "rollout_log_probs has '-1' at token 2"),
        (record(rollout_log_probs=[math.nan] * 6), "NaN is no JSON: a position that was not sampled has null"),
        (record(policy_versions=[1.0] * 6), "policy_versions has 1.0 at token 0"),
        (record(policy_versions=[2**31] * 6), "policy_versions has numbers beyond 32 bits"),
        (
            record(policy_versions=[2**64] * 6),
            f"policy_versions has {2**64} at token 0: expected an integer of 64 bits",
        ),
        (record(policy_versions=3), "policy_versions: expected a list of 6"),
        (record(sample_id="7"), "sample_id is '7': expected an integer"),
        (record(group_id=None), "group_id is None: expected an integer"),
        (record(reward="1"), "reward is '1': expected a number"),
        (record(reward=True), "reward is True: expected a number"),
        (record(finish_reason="eos"), "finish_reason is 'eos': expected one of stop, length, abort"),
        (record(finish_reason=["stop"]), "finish_reason is"),
        (record(sampling={"temperature": 1.0}), "sampling parameters: log_probs_mode, top_k, top_p unknown or missing"),
        (record(routed_experts=[[[1]]]), r"routed_experts has shape \(1, 1, 1\): expected \(6, any, any\)"),
        (record(routed_experts=[[[1.5]]] * 6), "routed_experts is torch.float32: expected integers"),
        (record(routed_experts=[[[1]], [[1, 2]]] * 3), "routed_experts is no tensor of shape"),
    ],
)
def test_lines_that_are_no_records_are_named(line, message):
    with pytest.raises(ValueError, match=message):
        list(from_json_lines([record(), line], batch_size=4))


def test_files_of_lines_that_are_damaged_are_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_jsonl([example()], path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"rollouts.jsonl: line 3: no JSON"):
        list(read_jsonl(path, batch_size=2))
    path.write_bytes(whole + b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"rollouts.jsonl: 'utf-8' codec"):
        list(read_jsonl(path, batch_size=2))
    with pytest.raises(FileNotFoundError, match="nowhere is missing"):
        read_jsonl(tmp_path / "nowhere", batch_size=2)
    with pytest.raises(ValueError, match="batch_size=0: expected at least 1"):
        read_jsonl(path, batch_size=0)


@pytest.mark.parametrize(("name", "at"), [("rollout_log_probs", (1, 3)), ("rewards", 1)])
def test_lines_cannot_say_nan(tmp_path, name, at):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("old")
    with pytest.raises(
        ValueError, match="sample 5 has a log-prob or a reward that is not finite, which JSON cannot say"
    ):
        write_jsonl([changed(example(), name, math.nan, at)], path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


# verl


def verl_example():
    """By hand: prompts of 2 and 3 tokens padded on the left, responses of 4 and 2 on the right.

    Entry j of the log-probs is that of responses[j].
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
    expected = torch.tensor([[0, 0, -0.13, 0, 0, -0.16], [0, 0, 0, -0.24, -0.25, 0]])
    assert torch.equal(batch.rollout_log_probs, expected)
    assert torch.equal(batch.old_log_probs, 2 * expected)
    assert batch.policy_versions.unique(dim=1).tolist() == [[3], [4]]
    assert batch.group_ids.tolist() == [0, 1]
    assert batch.rewards.tolist() == [0.5, -1.5]
    assert [FINISH_REASONS[index] for index in batch.finish_reasons] == ["length", "stop"]
    # Token ids give the log-probs away: -0.13 is that of token 13.
    labels, mask, log_probs = batch.label_aligned()
    torch.testing.assert_close(-100 * log_probs[mask], labels[mask].float())


def test_verl_is_written_as_it_is_read():
    tensors, others = verl_example()
    tensors["routed_experts"] = torch.arange(2 * 7 * 2).view(2, 7, 2, 1) * tensors["attention_mask"][..., None, None]
    batch = from_verl(tensors, others, sampling=HALF)
    assert batch.routed_experts[0, :, 0, 0].tolist() == [2, 4, 6, 8, 10, 12]
    found, names = to_verl(batch, pad_token_id=0)
    assert set(found) == set(tensors)
    routes = torch.where(tensors["attention_mask"][..., None, None] == 1, tensors["routed_experts"], -1)
    for name, value in (tensors | {"routed_experts": routes.int()}).items():
        assert torch.equal(found[name], value), name
    assert names == {"uid": ["0", "1"], "param_version_start": [3, 4], "param_version_end": [3, 4]}
    wide, _ = to_verl(batch, pad_token_id=9, prompt_length=5, response_length=6)
    assert wide["prompts"].tolist() == [[9, 9, 9, 11, 12], [9, 9, 21, 22, 23]]
    assert wide["responses"].tolist() == [[13, 14, 15, 16, 9, 9], [24, 25, 9, 9, 9, 9]]
    assert wide["rm_scores"].nonzero().tolist() == [[0, 3], [1, 1]]


@settings(max_examples=25, deadline=None)
@given(batch=batches(ordinary=True))
def test_verl_and_back(batch):
    """Lost: sample ids, the names of groups, finish reasons, versions within a sequence, sampling parameters."""
    found = from_verl(*to_verl(batch, pad_token_id=0), sampling=batch.sampling)
    mask, kept = batch.response_mask, cut(known(batch))
    oldest = torch.where(mask, batch.policy_versions, 2**31 - 1).amin(dim=1)
    _, groups = numbered(batch.group_ids)
    assert identical(
        found,
        dataclasses.replace(
            kept,
            sample_ids=torch.arange(len(mask)),
            group_ids=groups,
            finish_reasons=found.finish_reasons,
            policy_versions=oldest.unsqueeze(1).expand(kept.tokens.shape),
        ),
    )


def numbered(ids):
    order = list(dict.fromkeys(ids.tolist()))
    return order, torch.tensor([order.index(value) for value in ids.tolist()])


def test_verl_without_a_response_keeps_its_reward():
    batch = changed(example(False), "response_mask", False, 1)
    tensors, others = to_verl(batch, pad_token_id=0)
    found = from_verl(tensors, others, sampling=HALF)
    assert found.rewards.tolist() == batch.rewards.tolist()
    assert found.response_mask.sum(dim=1).tolist() == [2, 0, 3]
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
        ({"responses": torch.zeros(3, 4)}, r"responses has shape \(3, 4\): expected \(2, any\)"),
        ({"rollout_log_probs": None}, "rollout_log_probs is missing: set .*calculate_log_probs=True"),
        ({"rollout_log_probs": torch.zeros(2, 7)}, r"rollout_log_probs has shape \(2, 7\): expected \(2, 4\)"),
        ({"rollout_log_probs": torch.zeros(2, 3)}, "rollout_log_probs has shape"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask has shape"),
        (
            {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]] * 2)},
            "sequence 0 is not that of prompts padded on the l",
        ),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1]] * 2)}, "is not that of responses padded on the right"),
        ({"response_mask": torch.ones(2, 4)}, "response_mask of sequence 1 has padding marked as sampled"),
        ({"input_ids": torch.zeros(2, 7)}, "input_ids of sequence 0, column 1 is not what prompts and responses have"),
        ({"rm_scores": None}, "token_level_scores and rm_scores are missing: score the responses first"),
        ({"rm_scores": torch.zeros(2)}, "rm_scores has shape"),
        ({"routed_experts": torch.zeros(2, 4, 2, 1).int()}, "routed_experts has shape"),
        ({"uid": None}, "uid is missing in non_tensors"),
        ({"uid": ["a"]}, "uid has 1 entries: expected 2"),
        ({"uid": [["a"], ["b"]]}, "what should say which prompt a sample belongs to cannot be compared"),
        ({"param_version_start": ["new", "old"]}, r"sequence 0 has the weight versions \['new'\]"),
        ({"param_version_start": [3, 2**64]}, f"sequence 1 has the weight version {2**64}, beyond 32 bits: pass the"),
    ],
)
def test_wrong_verl_batches_are_refused(change, message):
    tensors, others = verl_example()
    for name, value in change.items():
        place = others if name in ("uid", "param_version_start") else tensors
        place.pop(name, None)
        if value is not None:
            place[name] = value
    with pytest.raises(ValueError, match=message):
        from_verl(tensors, others, sampling=HALF)


def test_verls_columns_must_suffice():
    with pytest.raises(ValueError, match="prompt_length=3: the longest prompt needs 5, make it at least that"):
        to_verl(example(), pad_token_id=0, prompt_length=3)
    with pytest.raises(ValueError, match="response_length=2: the longest response needs 4"):
        to_verl(example(), pad_token_id=0, response_length=2)


# NeMo-RL


def nemo_example():
    """By hand: as wide as the tokens, with the log-prob of token t in column t and zeros elsewhere."""
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


def test_fields_that_nobody_scored_are_no_log_probs():
    """verl 0.9.1 copies the engine's in bypass mode, NeMo-RL writes zeros with force_on_policy_ratio."""
    tensors, non_tensors = verl_example()
    copied = tensors | {"old_log_probs": tensors["rollout_log_probs"].clone()}
    assert from_verl(copied, non_tensors, sampling=HALF).old_log_probs is None
    copied["old_log_probs"][1, 0] -= 0.01
    assert from_verl(copied, non_tensors, sampling=HALF).old_log_probs is not None
    zeros = nemo_example() | {"prev_logprobs": torch.zeros(3, 7)}
    assert from_nemo_rl(zeros, sampling=HALF).old_log_probs is None


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
    """The same rollouts as messages; the assistant of the prompt's history was not sampled."""

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
    found = from_nemo_rl(logs, sampling=HALF, policy_version=6)
    expected = from_nemo_rl(fields, sampling=HALF, policy_version=6)
    columns = {name: getattr(expected, name)[:, :6] for name in FIELDS[:4]}
    assert identical(found, dataclasses.replace(expected, **columns, old_log_probs=None))


def test_masks_of_messages_come_before_roles():
    logs = messages()
    for message in logs[1][:2]:  # what NeMo-RL adds before it trains
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
    found = from_nemo_rl(logged, sampling=HALF, policy_version=6)
    assert identical(found, from_nemo_rl(fields, sampling=HALF, policy_version=6))


def test_nemo_rl_is_written_as_it_is_read():
    fields = nemo_example()
    found = to_nemo_rl(from_nemo_rl(fields, sampling=HALF, policy_version=6), pad_token_id=0)
    del fields["advantages"]
    # A sequence that is masked as a whole keeps its tokens, and not where its response began.
    for name, value in fields.items():
        assert torch.equal(found[name][:2], value[:2]), name
    assert found["sample_mask"].tolist() == [1, 1, 0]
    assert found["prompt_ids_for_adv"][:2, :2].tolist() == [[11, 12], [11, 12]]


@settings(max_examples=25, deadline=None)
@given(batch=batches(ordinary=True))
def test_nemo_rl_and_back(batch):
    """Lost: sample ids, the names of groups, versions, abort as a reason to finish, sampling parameters."""
    fields = to_nemo_rl(batch, pad_token_id=0)
    found = from_nemo_rl(fields, sampling=batch.sampling, policy_version=3, group_ids=batch.group_ids.tolist())
    kept = cut(known(batch))
    assert identical(
        found,
        dataclasses.replace(
            kept,
            sample_ids=torch.arange(batch.num_sequences),
            policy_versions=torch.full(kept.tokens.shape, 3, dtype=torch.int32),
            finish_reasons=(batch.finish_reasons == 1).long(),
        ),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_ids": torch.zeros(3, 7)}, "input_ids is torch.float32: expected integers"),
        ({"input_lengths": None}, "input_lengths is missing"),
        ({"input_lengths": torch.tensor([6, 8, 3])}, "input_lengths of sequence 1 is 8: expected 0 to 7"),
        ({"generation_logprobs": None}, "generation_logprobs is missing"),
        ({"generation_logprobs": torch.zeros(3, 6)}, r"generation_logprobs has shape \(3, 6\): expected \(3, 7\)"),
        ({"token_mask": torch.zeros(3, 6)}, "token_mask has shape"),
        ({"sample_mask": None}, "sample_mask is missing"),
        ({"sample_mask": torch.tensor([1, 0.5, 0])}, "sample_mask of sequence 1 is 0.5: expected 0 or 1"),
        ({"total_reward": None}, "total_reward is missing: score the responses first"),
        ({"truncated": torch.zeros(2)}, "truncated has shape"),
        ({"routed_experts": torch.zeros(3, 7, 2).int()}, "routed_experts has shape"),
        ({"policy_version": [1, 2]}, r"policy_version has shape \(2,\): expected \(3,\)"),
        ({"group_ids": [0]}, r"group_ids has shape \(1,\): expected \(3,\)"),
        ({"group_ids": ["a", "b", "c"]}, "group_ids is no tensor of shape"),
        ({"message_log": [[{"role": "user"}]]}, "message_log of sequence 0 has no message with token_ids"),
        (
            {"message_log": [[{"token_ids": [1, 2], "token_loss_mask": [0, 1], "role": "assistant"}]]},
            "message 0 of sequence 0: generation_logprobs are missing, but token_loss_mask trains on it",
        ),
        (
            {"message_log": [[{"token_ids": [1, 2], "generation_logprobs": [-1.0], "role": "assistant"}]]},
            r"message 0 of sequence 0: generation_logprobs has shape \(1,\): expected \(2,\)",
        ),
    ],
)
def test_wrong_nemo_rl_batches_are_refused(change, message):
    given = {"policy_version": 6, "group_ids": None}
    given |= {name: change[name] for name in given if name in change}
    fields = nemo_example() | {name: value for name, value in change.items() if name not in given}
    with pytest.raises(ValueError, match=message):
        from_nemo_rl(fields, sampling=HALF, **given)


# slime


def slime_example():
    """By hand: entry j of the log-probs is that of the j-th token of the response, the last response_length tokens."""
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
    labels, mask, log_probs = batch.label_aligned()
    torch.testing.assert_close(-100 * log_probs[mask], labels[mask].float())
    assert torch.equal(batch.old_log_probs[0], 2 * batch.rollout_log_probs[0])
    assert batch.old_log_probs[1, :3].isnan().all()  # this sample says none
    assert batch.sample_ids.tolist() == [40, 41]
    assert batch.group_ids.tolist() == [20, 20]
    assert batch.rewards.tolist() == [0.5, -1.0]
    assert batch.finish_reasons.tolist() == [0, 1]
    assert batch.policy_versions[:, 0].tolist() == [3, 4]  # of a response that several versions wrote, the oldest
    assert batch.routed_experts[0, :, 0, 0].tolist() == [0, 2, 4, 6, 8, -1]
    assert batch.routed_experts[1, :, 0, 0].tolist() == [0, 2, -1, -1, -1, -1]


def test_slime_is_written_as_it_is_read():
    sample, other = slime_example()
    batch = from_slime([sample, other | {"log_probs": [-0.46]}], sampling=HALF, reward_key="math")
    found, other = to_slime(batch)
    assert set(found) == set(sample) - {"response"}
    for name in set(found) - {"rollout_log_probs", "log_probs", "rollout_routed_experts"}:
        assert found[name] == sample[name], name
    for name in ("rollout_log_probs", "log_probs"):
        assert found[name] == pytest.approx(sample[name])
    assert torch.equal(found["rollout_routed_experts"], sample["rollout_routed_experts"].int())
    assert other["loss_mask"] == [1]
    assert other["weight_versions"] == ["4"]


@settings(max_examples=25, deadline=None)
@given(batch=batches(ordinary=True))
def test_slime_and_back(batch):
    """Lost: versions within a sequence, the route of the last token, sampling parameters."""
    found = from_slime(to_slime(batch), sampling=batch.sampling)
    mask, kept = batch.response_mask, cut(known(batch))
    oldest = torch.where(mask, batch.policy_versions, 2**31 - 1).amin(dim=1, keepdim=True)
    used = (mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1, keepdim=True)
    # concatenate fills up with versions of 0
    position = torch.arange(kept.tokens.shape[1])
    routes = kept.routed_experts
    assert identical(
        found,
        dataclasses.replace(
            kept,
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


def test_samples_that_slime_removes_do_not_train():
    samples = slime_example()
    samples[0]["remove_sample"] = True
    assert from_slime(samples, sampling=HALF, reward_key="math").response_mask.sum(dim=1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "sample 0 of the list: tokens is missing"),
        ({"tokens": ["a"]}, "sample 0 of the list: tokens is no tensor of shape"),
        ({"tokens": [1.5] * 6}, "tokens is torch.float32: expected integers"),
        ({"response_length": 7}, "response_length is 7: expected 0 to 6, the number of tokens"),
        ({"response_length": ...}, "'response_length' is missing"),
        ({"rollout_log_probs": None}, "rollout_log_probs is missing: the engine was not asked for log-probs"),
        ({"rollout_log_probs": [-0.1] * 6}, r"rollout_log_probs has shape \(6,\): expected \(4,\)"),
        ({"rollout_log_probs": [-0.1] * 3}, r"rollout_log_probs has shape \(3,\): expected \(4,\)"),
        ({"loss_mask": [1] * 6}, r"loss_mask has shape \(6,\): expected \(4,\)"),
        ({"reward": None}, "reward is None: score the responses first"),
        ({"reward": {"math": 1.0}}, "reward has math: pass one of them as reward_key"),
        ({"status": "pending"}, "status is 'pending': expected one of completed, truncated, aborted, failed"),
        ({"status": ...}, "'status' is missing"),
        ({"index": None}, "index is None: expected an integer"),
        ({"group_index": "g"}, "group_index is 'g': expected an integer"),
        ({"weight_versions": ["default"]}, r"weight versions \['default'\]: pass policy_version"),
        ({"weight_versions": [str(2**31)]}, "sequence 0 has the weight version 2147483648, beyond 32 bits: pass the"),
        ({"weight_versions": [2**70]}, f"sequence 0 has the weight version {2**70}, beyond 32 bits: pass the number"),
        ({"index": 2**63}, f"index is {2**63}: expected an integer of 64 bits"),
        ({"rollout_routed_experts": torch.zeros(6, 2, 1).int()}, r"expected \(5, any, any\)"),
    ],
)
def test_wrong_samples_are_refused(change, message):
    sample = slime_example()[0] | change
    with pytest.raises(ValueError, match=message):
        from_slime([{name: value for name, value in sample.items() if value is not ...}], sampling=HALF)


def test_synchronous_runs_name_no_versions():
    """Their weights are all of one version, 0; NeMo-RL's batches never name one."""
    tensors, others = verl_example()
    del others["param_version_start"]
    samples = [sample | {"weight_versions": []} for sample in slime_example()]
    read = [from_verl(tensors, others, sampling=HALF), from_slime(samples, sampling=HALF, reward_key="math")]
    for batch in [*read, from_nemo_rl(nemo_example(), sampling=HALF)]:
        assert not batch.policy_versions.any()


def test_no_samples_are_no_batch():
    with pytest.raises(ValueError, match="batches is empty"):
        from_slime([], sampling=HALF)


# The same rollouts whatever they went through


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


def test_lines_say_null_of_tokens_that_the_trainer_did_not_score():
    batch = dataclasses.replace(example(), old_log_probs=torch.where(example().tokens == 25, torch.nan, -0.5))
    lines = list(to_json_lines(batch))
    assert json.loads(lines[1])["old_log_probs"] == [None, None, -0.5, None]
    (found,) = from_json_lines(lines, batch_size=3)
    assert found.old_log_probs[1, :4].isnan().tolist() == [False, False, False, True]
    bad = record(old_log_probs=[None, None, "x", None, None, -0.5])
    with pytest.raises(ValueError, match="line 1: old_log_probs has 'x' at token 2"):
        list(from_json_lines([bad], batch_size=1))
    with pytest.raises(ValueError, match="line 1: log_probs: expected a list of 6, one for each token"):
        list(from_json_lines([record(log_probs=[-0.5])], batch_size=1))


def test_all_formats_tell_the_same_rollouts(tmp_path):
    batch = dataclasses.replace(example(), old_log_probs=example().rollout_log_probs / 2)
    write_jsonl([batch], tmp_path / "lines")
    save_rollouts(batch, tmp_path / "file")
    (lines,) = read_jsonl(tmp_path / "lines", batch_size=3)
    routes = ["old_log_probs", "tokens", "response_mask", "rollout_log_probs", "rewards"]
    for found in (
        lines,
        load_rollouts(tmp_path / "file"),
        from_verl(*to_verl(batch, pad_token_id=0), sampling=HALF),
        from_nemo_rl(to_nemo_rl(batch, pad_token_id=0), sampling=HALF, policy_version=4),
        from_slime(to_slime(batch), sampling=HALF),
    ):
        for name in routes:
            assert torch.equal(getattr(found, name), getattr(batch, name)), name
        found.validate(vocab_size=39)
