"""Files of records: the values that they keep, and other files that are refused."""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rc.records.rollout import load_rollouts, save_rollouts
from tests.support.records import batches, changed, example, identical


@settings(max_examples=25, deadline=None)
@given(batch=batches(), bits=st.integers(1, 2**20))
def test_files_keep_every_bit(tmp_path_factory, batch, bits):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    integers = torch.full(batch.tokens.shape, 0x7FC00000 | bits, dtype=torch.int32)
    log_probs = torch.where(batch.response_mask, batch.rollout_log_probs, integers.view(torch.float32))
    batch = dataclasses.replace(batch, rollout_log_probs=log_probs)
    save_rollouts(batch, path)
    loaded = load_rollouts(path)
    assert identical(loaded, batch)
    assert torch.equal(loaded.rollout_log_probs.view(torch.int32), log_probs.view(torch.int32))


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


def test_a_file_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path):
    path = tmp_path / "file"
    save_rollouts(example(), path)
    whole = path.read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"file is cut off, damaged or no safetensors file .*: write it again"):
            load_rollouts(path)


def rewritten(path, tensors=None, header=None, metadata=None):
    """The example's file with other contents."""
    from safetensors.torch import save_file

    batch = example()
    tensors = batch.tensors() | (tensors or {})
    tensors = {name: value for name, value in tensors.items() if value is not None}
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    new_header = {"schema_version": 1, "sampling": dataclasses.asdict(batch.sampling), "shapes": shapes}
    new_header |= header or {}
    new_header = {name: value for name, value in new_header.items() if value is not None}
    save_file(tensors, path, metadata={"megatron_rc": json.dumps(new_header)} if metadata is None else metadata)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": {"schema_version": 2}}, "file: schema_version is 2: this release reads version 1"),
        ({"header": {"notes": 1}}, "the header has notes, sampling, .*: expected schema_version, sampling, shapes"),
        ({"header": {"shapes": {"tokens": [3, 8]}}}, "shapes .* header.* the file is damaged"),
        ({"header": {"sampling": {"temperature": 1}}}, "sampling parameters: .*top_k.* unknown or missing"),
        ({"tensors": {"rewards": None}}, "tensors unknown or missing: rewards"),
        ({"tensors": {"rollout_log_probs": torch.zeros(3, 8).half()}}, "rollout_log_probs is torch.float16: expected"),
        ({"metadata": {}}, "no header .* expected a file that save_rollouts wrote"),
        ({"metadata": {"megatron_rc": "[]"}}, "the header of .* is a list: expected a JSON object"),
    ],
)
def test_other_files_are_refused(tmp_path, change, message):
    assert identical(load_rollouts(rewritten(tmp_path / "file")), example())
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


def test_a_pipe_stays_and_a_link_leads_to_what_is_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a device or a pipe: expected the name of a file to write"):
        save_rollouts(example(), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    save_rollouts(example(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert identical(load_rollouts(tmp_path / "file"), example())
    (tmp_path / "round").symlink_to(tmp_path / "round")
    save_rollouts(example(), tmp_path / "round")
    assert identical(load_rollouts(tmp_path / "round"), example())


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with pytest.raises(ValueError, match="rewards has shape"):
        save_rollouts(dataclasses.replace(example(), rewards=torch.zeros(2)), path)
    assert not list(tmp_path.iterdir())
    save_rollouts(example(), path)

    def fail(tensors, name, metadata):
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_rollouts(example(False), path)
    assert identical(load_rollouts(path), example())
    assert list(tmp_path.iterdir()) == [path]


def test_without_safetensors_its_name_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)  # its import raises ModuleNotFoundError
    (tmp_path / "old").touch()
    for call in (lambda: save_rollouts(example(), tmp_path / "file"), lambda: load_rollouts(tmp_path / "old")):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()
