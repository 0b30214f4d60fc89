"""The record that an engine hands to the trainer: its checks and its files."""

import ast
import builtins
import dataclasses
import json
import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rc.records.checks import FIELDS as RECORD
from megatron_rc.records.checks import TRAINER_LOG_PROBS
from megatron_rc.records.rollout import NO_EXPERT, RolloutBatch, SamplingParams, load_rollouts, save_rollouts
from tests.support.paths import ROOT
from tests.support.records import identical

HALF = SamplingParams(temperature=0.5)
FIELDS = tuple(field.name for field in dataclasses.fields(RolloutBatch))


def example(experts=True):
    """Two responses to one prompt and one to another, the first with a hole where a tool answered.

    Every number is another one, so that whatever is shifted or swapped is seen: sampled token t of sequence i has
    log-prob -(i + t/16), exact in float32.
    """
    tokens = torch.tensor(
        [[11, 12, 13, 14, 15, 16, 0, 0], [11, 12, 24, 25, 0, 0, 0, 0], [31, 32, 33, 34, 35, 36, 37, 38]]
    )
    mask = torch.tensor([[0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]).bool()
    log_probs = -(torch.arange(3).unsqueeze(1) + torch.arange(8) / 16)
    routes = torch.arange(3 * 8 * 2 * 2, dtype=torch.int32).view(3, 8, 2, 2)
    return RolloutBatch(
        tokens=tokens,
        response_mask=mask,
        rollout_log_probs=torch.where(mask, log_probs, 0.0),
        policy_versions=torch.where(mask, torch.tensor([[4], [5], [6]]), 0).int(),
        sample_ids=torch.tensor([7, 5, 9]),
        group_ids=torch.tensor([3, 3, 1]),
        rewards=torch.tensor([0.5, -1.0, 0.1]),
        finish_reasons=torch.tensor([0, 1, 2]),
        sampling=HALF,
        routed_experts=routes if experts else None,
    )


def changed(batch, name, value, at=...):
    tensor = getattr(batch, name).clone()
    tensor[at] = value
    return dataclasses.replace(batch, **{name: tensor})


def known(batch):
    """What every format keeps of the tensors: nothing behind the last sampled token or where none was sampled."""
    position = torch.arange(batch.tokens.shape[1])
    used = (position < (batch.response_mask * (position + 1)).amax(dim=1, keepdim=True)) | ~batch.response_mask.any(
        dim=1, keepdim=True
    )
    routes = batch.routed_experts
    scored = {
        name: torch.where(batch.response_mask, getattr(batch, name), 0.0)
        for name in TRAINER_LOG_PROBS
        if getattr(batch, name) is not None
    }
    return dataclasses.replace(
        batch,
        **scored,
        tokens=torch.where(used, batch.tokens, 0),
        rollout_log_probs=torch.where(batch.response_mask, batch.rollout_log_probs, 0.0),
        policy_versions=torch.where(batch.response_mask, batch.policy_versions, 0),
        routed_experts=None if routes is None else torch.where(used[..., None, None], routes, -1),
    )


def cut(batch):
    """Without columns that are padding in every sequence."""
    used = batch.response_mask.any(dim=0).nonzero()
    width = int(used[-1]) + 1 if batch.response_mask.any(dim=1).all() and len(used) else batch.tokens.shape[1]
    return dataclasses.replace(
        batch, **{name: value[:, :width] for name, value in batch.tensors().items() if RECORD[name].per_token}
    )


@st.composite
def batches(draw, ordinary=False):
    """Any record that is valid; ``ordinary`` ones sample at least one token of each sequence, and not the first."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    integers = st.integers(0, 2**40)

    def tensor(elements, *shape, dtype):
        size = math.prod(shape)
        return torch.tensor(draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype).view(shape)

    mask = tensor(st.booleans(), rows, length, dtype=torch.bool)
    mask[:, 0] = False
    if ordinary:
        mask[:, -1] |= ~mask.any(dim=1)
    log_probs = tensor(st.floats(-50, -(2.0**-20), width=32), rows, length, dtype=torch.float32)
    numbers = draw(st.lists(st.integers(0, 2**21 - 1), min_size=rows, max_size=rows, unique=True))
    experts = draw(st.booleans())
    scored = {name: log_probs / 2 for name in TRAINER_LOG_PROBS if draw(st.booleans())}
    if ordinary:
        scored.pop("log_probs", None)  # which no other program has
    elif "old_log_probs" in scored and draw(st.booleans()):
        scored["old_log_probs"] = torch.where(mask & (log_probs < -1), torch.nan, scored["old_log_probs"])
    return RolloutBatch(
        tokens=tensor(integers, rows, length, dtype=torch.int64),
        response_mask=mask,
        rollout_log_probs=log_probs,
        policy_versions=tensor(st.integers(0, 2**31 - 1), rows, length, dtype=torch.int32),
        sample_ids=torch.tensor(numbers),
        group_ids=tensor(st.integers(0, 3), rows, dtype=torch.int64),
        rewards=tensor(st.floats(-100, 100, width=32).map(lambda value: value + 0.0), rows, dtype=torch.float32),
        finish_reasons=tensor(st.integers(0, 2), rows, dtype=torch.int64),
        sampling=SamplingParams(draw(st.floats(0.25, 4))),
        routed_experts=tensor(st.integers(-1, 200), rows, length, 2, 1, dtype=torch.int32) if experts else None,
        **scored,
    )


# The checks


def test_a_good_batch_passes():
    batch = example()
    batch.validate(vocab_size=39)
    batch.to("cpu").validate()
    batch.rows([]).validate()
    dataclasses.replace(batch, sampling=SamplingParams(log_probs_mode="raw")).validate()
    dataclasses.replace(batch, sampling=SamplingParams(top_p=0.9, top_k=20)).validate(allow_truncated_sampling=True)
    changed(batch, "rollout_log_probs", 9e-5, (0, 2)).validate()
    for filler in (math.nan, math.inf, 1.0):
        changed(batch, "rollout_log_probs", filler, ~batch.response_mask).validate()
    changed(batch, "policy_versions", -1, ~batch.response_mask).validate()
    changed(batch, "sample_ids", 2**21 - 1, 0).validate()
    wide = {
        name: getattr(batch, name).to(dtype) for name, dtype in (("tokens", torch.int32), ("rewards", torch.float64))
    }
    dataclasses.replace(batch, **wide).validate()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", torch.zeros(3, dtype=torch.int64), r"tokens has shape \(3,\): expected \[sequences, length\]"),
        ("tokens", torch.zeros(3, 8), "tokens is torch.float32: expected integers"),
        (
            "response_mask",
            torch.zeros(3, 7).bool(),
            r"response_mask has shape \(3, 7\): expected \(3, 8\), that of tok",
        ),
        ("response_mask", torch.zeros(3, 8).long(), "response_mask is torch.int64: expected bool"),
        ("rollout_log_probs", torch.zeros(3, 8).bfloat16(), "rollout_log_probs is torch.bfloat16: expected float32 or"),
        ("rollout_log_probs", torch.zeros(2, 8), "rollout_log_probs has shape"),
        ("policy_versions", torch.zeros(3, 8), "policy_versions is torch.float32: expected integers"),
        ("policy_versions", torch.zeros(3).int(), "policy_versions has shape"),
        ("sample_ids", torch.zeros(3, 1).long(), r"sample_ids has shape \(3, 1\): expected \(3,\), one for each row"),
        ("sample_ids", torch.zeros(3), "sample_ids is torch.float32"),
        ("group_ids", torch.zeros(4).long(), "group_ids has shape"),
        ("group_ids", torch.zeros(3).bool(), "group_ids is torch.bool"),
        ("rewards", torch.zeros(3).long(), "rewards is torch.int64: expected float32 or float64"),
        ("rewards", torch.zeros(()), "rewards has shape"),
        ("finish_reasons", torch.zeros(3), "finish_reasons is torch.float32"),
        (
            "routed_experts",
            torch.zeros(3, 8, 2).int(),
            r"routed_experts has shape .* expected \(3, 8\) \+ \(layers, top_k",
        ),
        ("routed_experts", torch.zeros(3, 7, 2, 2).int(), "routed_experts has shape"),
        ("routed_experts", torch.zeros(3, 8, 2, 2).byte(), "routed_experts is torch.uint8: expected signed"),
        (
            "rewards",
            torch.zeros(3, device="meta"),
            r"rewards is on meta, tokens on cpu: move the batch with to\(device\)",
        ),
    ],
)
def test_wrong_shapes_dtypes_and_devices_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(example(), **{name: value}).validate()


def test_lists_are_no_tensors():
    with pytest.raises(TypeError, match="rewards is list: expected a tensor"):
        dataclasses.replace(example(), rewards=[1.0, 2.0, 3.0]).validate()


@pytest.mark.parametrize(
    ("name", "value", "at", "message"),
    [
        ("response_mask", True, (1, 0), "sample 5: its first token is marked as sampled, but nothing stands before it"),
        ("tokens", -1, (2, 3), "the token id of sample 9, token 3 is -1: expected 0 or more, padding included"),
        ("tokens", -100, (0, 7), "the token id of sample 7, token 7 is -100"),
        ("tokens", 39, (1, 1), "the token id of sample 5, token 1 is 39: expected less than the vocabulary's 39"),
        ("rollout_log_probs", math.nan, (0, 5), "the rollout log-prob of sample 7, token 5 is nan: expected a finite"),
        ("rollout_log_probs", -math.inf, (2, 6), "sample 9, token 6 is -inf"),
        ("rollout_log_probs", math.inf, (2, 6), "sample 9, token 6 is inf"),
        ("rollout_log_probs", 2e-4, (1, 3), r"sample 5, token 3 is 0\.00019"),
        ("policy_versions", -1, (1, 2), "the policy version of sample 5, token 2 is -1: expected 0 or more"),
        ("sample_ids", 5, 2, "sample_ids must be unique: 5 is that of 2 sequences"),
        ("sample_ids", -1, 1, "sample_ids has -1: expected 0 to 2097151"),
        ("sample_ids", 2**21, 1, "sample_ids has 2097152: expected 0 to 2097151: number the samples"),
        ("group_ids", -2, 0, "the group id of sample 7 is -2: expected 0 or more"),
        ("rewards", math.nan, 1, "the reward of sample 5 is nan: expected a finite number"),
        ("rewards", -math.inf, 1, "the reward of sample 5 is -inf"),
        ("finish_reasons", 3, 0, r"the finish reason of sample 7 is 3: expected 0 \(stop\), 1 \(length\), 2 \(abort\)"),
        ("finish_reasons", -1, 0, "the finish reason of sample 7 is -1"),
    ],
)
def test_wrong_values_are_refused_by_sample_and_position(name, value, at, message):
    with pytest.raises(ValueError, match=message):
        changed(example(), name, value, at).validate(vocab_size=39)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0: expected a number above 0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"top_p": 0.0}, "top_p=0.0: expected a number above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": None}, "top_p=None"),
        ({"top_k": -1}, "top_k=-1: expected an integer of at least 0, where 0 samples from all tokens"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_k": True}, "top_k=True"),
        ({"log_probs_mode": "raw_logprobs"}, "log_probs_mode='raw_logprobs': expected one of processed, raw"),
        (
            {"log_probs_mode": "raw", "temperature": 0.6},
            r"raw \(before temperature\) at temperature 0.6: ask the engine",
        ),
        ({"top_p": 0.9}, "top_p=0.9, top_k=0 sample from a truncated distribution, which is not the policy"),
        ({"top_k": 5}, "top_p=1.0, top_k=5 sample"),
    ],
)
def test_wrong_sampling_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(example(), sampling=SamplingParams(**change)).validate()


def zeros(length, rows=(0,), top_k=0):
    """Two sequences of ``length`` sampled tokens, those of ``rows`` with log-probs of 0.0."""
    batch = dataclasses.replace(example(False).rows([0, 1]), sampling=SamplingParams(top_k=top_k))
    shape, mask = (2, length + 1), torch.arange(length + 1).expand(2, -1) > 0
    log_probs = torch.full(shape, -0.1)
    log_probs[list(rows)] = 0.0
    return dataclasses.replace(
        batch,
        tokens=torch.ones(shape, dtype=torch.int64),
        response_mask=mask,
        rollout_log_probs=log_probs,
        policy_versions=torch.zeros(shape, dtype=torch.int32),
    )


def test_fillers_in_place_of_log_probs_are_refused():
    with pytest.raises(
        ValueError, match=r"all rollout log-probs of sample 5 are 0\.0, at 9 sampled tokens: the engine"
    ):
        zeros(9, rows=[1]).validate()
    with pytest.raises(ValueError, match=r"sample 7 are 0\.0, at 5 sampled tokens"):
        zeros(5, rows=[0, 1]).validate()


def test_log_probs_that_a_correction_rejects_can_be_allowed():
    batch = example()
    for value in (math.nan, math.inf, -math.inf, 0.5):
        batch.rollout_log_probs[0, 2] = value
        with pytest.raises(ValueError, match="the rollout log-prob of sample 7, token 2 is"):
            batch.validate()
        batch.validate(allow_bad_log_probs=True)
    batch.policy_versions[0, 2] = -1
    with pytest.raises(ValueError, match="the policy version of sample 7"):
        batch.validate(allow_bad_log_probs=True)


@pytest.mark.parametrize("name", TRAINER_LOG_PROBS)
def test_the_trainers_log_probs_may_lack_tokens_and_nothing_else(name):
    batch = dataclasses.replace(example(), **{name: torch.where(example().response_mask, -0.5, torch.inf)})
    changed(batch, name, math.nan, (0, 2)).validate()
    for value in (math.inf, -math.inf, 0.5):
        bad = changed(batch, name, value, (0, 2))
        with pytest.raises(ValueError, match=rf"^{name} of sample 7, token 2 is .*: expected a finite number of at mo"):
            bad.validate()
        bad.validate(allow_bad_log_probs=True)


def test_batches_that_the_trainer_did_not_score_join_those_that_it_did():
    batch = example()
    scored = dataclasses.replace(batch, old_log_probs=batch.rollout_log_probs / 2)
    joined = RolloutBatch.concatenate([scored.rows([0]), batch.rows([1, 2])])
    assert torch.equal(joined.old_log_probs[0], scored.old_log_probs[0])
    assert joined.old_log_probs[1:].isnan().all()
    assert joined.log_probs is None
    joined.validate()


def test_certain_tokens_are_no_fillers():
    zeros(8, rows=[1]).validate()
    zeros(4, rows=[0, 1]).validate()
    changed(zeros(9, rows=[0, 1]), "rollout_log_probs", -1e-7, (slice(None), 3)).validate()
    zeros(9, rows=[0, 1], top_k=1).validate(allow_truncated_sampling=True)
    changed(zeros(9), "response_mask", False, 0).validate()


# What a user does with a batch


def test_label_alignment_shifts_whole_sequences():
    batch = example()
    labels, mask, log_probs = batch.label_aligned()
    assert labels[0].tolist() == [12, 13, 14, 15, 16, 0, 0, 0]
    assert mask[0].nonzero().flatten().tolist() == [1, 4]
    assert log_probs[2].tolist() == [0, 0, 0, 0, -2 - 5 / 16, -2 - 6 / 16, -2 - 7 / 16, 0]


def test_rows_are_taken_in_any_way():
    batch = example()
    assert batch.num_sequences == 3
    for index in ([2, 0], torch.tensor([2, 0])):
        some = batch.rows(index)
        assert some.sample_ids.tolist() == [9, 7]
        assert torch.equal(some.routed_experts, batch.routed_experts[[2, 0]])
    assert identical(batch.rows(slice(1, 3)), batch.rows(torch.tensor([False, True, True])))
    assert identical(batch.rows(slice(None)), batch)
    with pytest.raises(IndexError):
        batch.rows([3])


def test_only_padding_is_cut_off():
    batch = example().rows([0, 1])
    again = batch.at_length(6).at_length(8)
    assert torch.equal(again.routed_experts[:, :6], batch.routed_experts[:, :6])
    assert (again.routed_experts[:, 6:] == NO_EXPERT).all()
    assert identical(dataclasses.replace(again, routed_experts=batch.routed_experts), batch)
    assert batch.at_length(9, pad_token_id=99).tokens[:, 8].tolist() == [99, 99]
    with pytest.raises(ValueError, match="sample 7 has sampled tokens behind its first 5: give it more room"):
        batch.at_length(5)


def test_concatenation_pads_to_the_longest():
    batch = example()
    short = dataclasses.replace(
        batch.rows([1]), **{name: getattr(batch, name)[1:2, :4] for name in (*FIELDS[:4], "routed_experts")}
    )
    joined = RolloutBatch.concatenate([short, batch.rows([0, 2])], pad_token_id=99)
    assert joined.tokens[0].tolist() == [11, 12, 24, 25, 99, 99, 99, 99]
    assert joined.routed_experts[0, 4:].eq(-1).all()
    assert identical(known(joined), known(batch.rows([1, 0, 2])))
    joined.validate(vocab_size=100)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"sampling": SamplingParams()}, "batches were sampled differently, .*temperature=0.5.* keep them apart"),
        ({"routed_experts": None}, r"different routed_experts, \[.., 2, 2\] and none"),
        ({"routed_experts": torch.zeros(3, 8, 2, 3).int()}, r"\[.., 2, 2\] and \[.., 2, 3\]"),
        ({"rewards": torch.zeros(3).double()}, "different rewards, torch.float32 on cpu and torch.float64 on cpu"),
    ],
)
def test_batches_that_do_not_go_together_stay_apart(other, message):
    with pytest.raises(ValueError, match=message):
        RolloutBatch.concatenate([example(), dataclasses.replace(example(), **other)])


def test_nothing_has_no_batch():
    with pytest.raises(ValueError, match="batches is empty"):
        RolloutBatch.concatenate([])


def test_identical_compares_bits():
    batch = changed(example(), "rollout_log_probs", math.nan, (0, 0))
    assert identical(batch, batch.rows(slice(None)))
    assert batch != batch.rows(slice(None))  # == is identity, and never an error
    assert not identical(batch, changed(batch, "rollout_log_probs", -0.0, (1, 0)))
    assert not identical(batch, dataclasses.replace(batch, tokens=batch.tokens.int()))
    assert not identical(batch, dataclasses.replace(batch, routed_experts=None))
    assert not identical(batch, dataclasses.replace(batch, sampling=SamplingParams()))


# Files


def payload(bits):
    """A float32 NaN that carries ``bits``."""
    return struct.unpack("f", struct.pack("I", 0x7FC00000 | bits))[0]


@settings(max_examples=25, deadline=None)
@given(batch=batches(), bits=st.integers(1, 2**20))
def test_files_keep_every_bit(tmp_path_factory, batch, bits):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    integers = torch.full(batch.tokens.shape, 0x7FC00000 | bits, dtype=torch.int32)
    log_probs = torch.where(batch.response_mask, batch.rollout_log_probs, integers.view(torch.float32))
    batch = dataclasses.replace(batch, rollout_log_probs=log_probs)
    save_rollouts(batch, path)
    found = load_rollouts(path)
    assert identical(found, batch)
    assert torch.equal(found.rollout_log_probs.view(torch.int32), log_probs.view(torch.int32))


def test_a_file_holds_views_wide_dtypes_and_bad_values(tmp_path):
    batch = example()
    both = torch.cat([batch.rollout_log_probs, batch.rewards.unsqueeze(1)], dim=1).double()
    batch = dataclasses.replace(
        batch,
        rollout_log_probs=both[:, :-1],
        rewards=both[:, -1],
        group_ids=batch.sample_ids,
        tokens=batch.tokens.int(),
    )
    batch = changed(batch, "rollout_log_probs", math.inf, (0, 2))
    save_rollouts(batch, tmp_path / "rollouts")
    assert identical(load_rollouts(tmp_path / "rollouts"), batch)
    save_rollouts(batch.rows([]), tmp_path / "rollouts")
    assert load_rollouts(str(tmp_path / "rollouts")).num_sequences == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts"]


def test_the_header_is_json_that_others_can_read(tmp_path):
    save_rollouts(example(False), tmp_path / "file")
    raw = (tmp_path / "file").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    own = json.loads(header["__metadata__"]["megatron_rc"])
    assert own["schema_version"] == 1
    assert own["sampling"] == {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "log_probs_mode": "processed"}
    assert own["shapes"]["tokens"] == [3, 8]
    assert "routed_experts" not in own["shapes"]


def test_a_file_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path):
    path = tmp_path / "file"
    save_rollouts(example(), path)
    whole = path.read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"file is cut off, damaged or no safetensors file .*: write it again"):
            load_rollouts(path)


def rewritten(path, tensors=None, header=None, metadata=None):
    """The example's file with something else in it."""
    from safetensors.torch import save_file

    batch = example()
    tensors = batch.tensors() | (tensors or {})
    tensors = {name: value for name, value in tensors.items() if value is not None}
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    own = {"schema_version": 1, "sampling": dataclasses.asdict(batch.sampling), "shapes": shapes} | (header or {})
    own = {name: value for name, value in own.items() if value is not None}
    save_file(tensors, path, metadata={"megatron_rc": json.dumps(own)} if metadata is None else metadata)
    return path


def test_the_rewritten_file_is_good_when_nothing_is_changed(tmp_path):
    assert identical(load_rollouts(rewritten(tmp_path / "file")), example())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": {"schema_version": 2}}, "file: schema_version is 2: this release reads version 1"),
        ({"header": {"schema_version": None}}, "schema_version is None"),
        ({"header": {"schema_version": True}}, "schema_version is True"),
        ({"header": {"notes": 1}}, "the header has notes, sampling, .*: expected schema_version, sampling, shapes"),
        ({"header": {"shapes": {"tokens": [3, 8]}}}, "do not have the shapes that the header names"),
        ({"header": {"sampling": {"temperature": 1}}}, "sampling parameters: .*top_k.* unknown or missing"),
        ({"header": {"sampling": 3}}, "sampling parameters are 3: expected"),
        ({"tensors": {"rewards": None}}, "tensors unknown or missing: rewards"),
        ({"tensors": {"values": torch.zeros(3)}}, "tensors unknown or missing: values"),
        (
            {"tensors": {"rollout_log_probs": torch.zeros(3, 8).half()}},
            "rollout_log_probs is torch.float16: expected fl",
        ),
        ({"tensors": {"response_mask": torch.zeros(3, 8).int()}}, "response_mask is torch.int32: expected bool"),
        ({"tensors": {"rewards": torch.zeros(2)}}, "rewards has shape"),
        (
            {"metadata": {}},
            "has tensors but no header of ours: expected a file that save_rollouts wrote",
        ),
        ({"metadata": {"megatron_rc": "{"}}, "the header of .* is no JSON"),
        ({"metadata": {"megatron_rc": "[]"}}, "the header of .* is a list: expected a JSON object"),
    ],
)
def test_other_files_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_rollouts(rewritten(tmp_path / "file", **change))


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is missing: expected a file of rollouts"):
        load_rollouts(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="is a folder: expected a file of rollouts"):
        load_rollouts(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist, create it first"):
        save_rollouts(example(), tmp_path / "nowhere" / "file")
    with pytest.raises(IsADirectoryError, match="is a folder: expected the name of a file to write"):
        save_rollouts(example(), tmp_path)


def test_a_batch_of_the_wrong_structure_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="rewards has shape"):
        save_rollouts(dataclasses.replace(example(), rewards=torch.zeros(2)), tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    save_rollouts(example(), path)

    def fail(tensors, name, metadata):
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_rollouts(example(False), path)
    assert identical(load_rollouts(path), example())
    assert list(tmp_path.iterdir()) == [path]


def test_without_safetensors_its_name_is_said(tmp_path, monkeypatch):
    original = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="safetensors")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for call in (lambda: save_rollouts(example(), tmp_path / "file"), lambda: load_rollouts(tmp_path / "file")):
        with pytest.raises(ImportError, match="need safetensors, which is not installed: pip install safetensors"):
            call()


# Nothing that is read can run code

LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


def unsafe(source):
    """What in a source reads or writes pickles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.split(".")[0] in LOADERS)
        elif isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            owner, _, method = name.rpartition(".")
            loads = method == "load" and owner in ("np", "numpy") and given.get("allow_pickle") != "False"
            others = name in ("torch.load", "torch.save", "pd.read_pickle", "pandas.read_pickle")
            if (
                loads
                or others
                or method in ("to_pickle", "read_pickle")
                or given.get("allow_pickle", "False") != "False"
            ):
                yield name


# Only what this project's own processes send each other, and Megatron's format of checkpoints, which is read with an
# unpickler that knows what belongs there.
PICKLES = {
    "launch/rewards/pool.py",
    "launch/rewards/worker.py",
    "launch/training/checkpoints/background.py",
    "launch/training/checkpoints/megatron_writes.py",
    "launch/training/checkpoints/unpickling.py",
}


def test_no_other_source_reads_or_writes_pickles():
    files = [
        path for folder in ("megatron_rc", "parallel", "launch", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 60
    found = {path.relative_to(ROOT).as_posix() for path in files if list(unsafe(path.read_text(encoding="utf-8")))}
    assert found == PICKLES


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "from cloudpickle.compat import x",
        "import joblib",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "torch.save(a, b)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "read(path, allow_pickle=flag)",
        "pd.read_pickle(path)",
        "frame.to_pickle(path)",
    ],
)
def test_pickles_are_seen(source):
    assert list(unsafe(source))


def test_safe_sources_are_not_accused():
    assert not list(unsafe("np.load(path, allow_pickle=False); json.load(file); import json; model.load(path)"))
