"""Checkpoints on the ranks of the pool: what is written, what damage is found, and that reading one runs nothing."""

import contextlib
import enum
import errno
import importlib
import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path, PurePosixPath
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import dict_utils
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_rc.launch.checkpoint_folders import TRACKER, iteration_folder
from megatron_rc.launch.training.checkpoints import manifest
from megatron_rc.launch.training.checkpoints.contents import POLICY, trained_state
from megatron_rc.launch.training.checkpoints.find import checked_checkpoint, find_checkpoint
from megatron_rc.launch.training.checkpoints.manifest import MANIFEST
from megatron_rc.launch.training.checkpoints.reader import CheckpointReader
from megatron_rc.launch.training.checkpoints.saved_settings import SETTINGS, checkpoint_settings
from megatron_rc.launch.training.checkpoints.unpickling import UnsafeFileError, read_index
from megatron_rc.launch.training.reporting.sources import newest_checkpoint
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, recorded_batch, refusal, run_config, save_initial
from tests.support.refusals import refused
from tests.support.training_runs import agreed, logged

SMALL = ["--num-layers=2", "--lr=1e-3", "--grpo-kl-beta=0"]
TWO = Layout(tp=2)


def save_two_steps(words):
    """Save after each of two steps."""
    trainer = make_trainer(words)
    for index in range(2):
        trainer.update(trainer.prepare(recorded_batch(index)), 0)
        trainer.save()


def reached(words):
    """The step that a trainer begins at."""
    return make_trainer(words).iteration


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with the checkpoints of two steps of a small model on two ranks, and the flags that wrote it."""
    folder = tmp_path_factory.mktemp("saved")
    words = flags(folder, *SMALL, *TWO.flags())
    ranks.run(save_two_steps, TWO, [*words, f"--save={folder}/save"])
    return folder / "save", words


@pytest.fixture
def copy(saved, tmp_path):
    """The same to be spoilt."""
    return shutil.copytree(saved[0], tmp_path / "copy")


# Damage


def flip(path):
    """One bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def find_each(words, folders):
    """What is said of each folder."""
    config, found = run_config(words, torch.distributed.get_world_size()), []
    for folder in folders:
        try:
            found.append(str(find_checkpoint(str(folder), config)))
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("spoil", [flip, cut, os.remove], ids=lambda spoil: spoil.__name__)
def test_damage_in_any_file_is_found_and_named(ranks, saved, tmp_path, spoil):
    folder, words = saved
    names = sorted(path.name for path in iteration_folder(folder, 2).iterdir())
    if spoil is flip:
        names.remove(MANIFEST)  # it has no checksum of its own
    assert {".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp", SETTINGS} <= set(names)
    for name in names:
        shutil.copytree(folder, tmp_path / name.strip("._"))
        spoil(iteration_folder(tmp_path / name.strip("._"), 2) / name)
    folders = [tmp_path / name.strip("._") for name in names]
    first, second = ranks.run(find_each, TWO, words, folders)
    assert first == second
    for name, said in zip(names, first, strict=True):
        assert "--load-last-valid goes on from checkpoint 1, which is whole" in said or spoil is os.remove
        assert f"checkpoint 2 is damaged: {name}" in said or (name == "metadata.json" and "is not complete" in said)
    valid = ranks.run(find_each, TWO, [*words, f"--load={folder}", "--load-last-valid"], folders)
    assert valid == [["1"] * len(names)] * 2
    if spoil is flip:
        # PyTorch's format has no checksums: without ours a flipped bit is trained on.
        place = next(place for name, place in zip(names, folders, strict=True) if name == "__0_0.distcp")
        words = [*words, f"--load={place}"]
        said = agreed(ranks.run(refusal, TWO, words))
        assert "checkpoint 2 is damaged: __0_0.distcp is not what was written: its checksum differs" in said
        for more, step in ("--no-verify-integrity", 2), ("--load-last-valid", 1):
            assert ranks.run(reached, TWO, [*words, more]) == [step] * 2


def go_back(words):
    """Make the second step once more, from the first one's checkpoint, and save it; return both steps' numbers."""
    trainer = make_trainer(words)
    begun = trainer.iteration
    trainer.update(trainer.prepare(recorded_batch(1)), 0)
    trainer.save()
    return begun, trainer.iteration


def test_an_older_checkpoint_can_be_gone_on_from(ranks, copy, saved):
    """Its next save takes the place of the newer one, which the tracker names until then."""
    words = [*saved[1], f"--load={copy}"]
    with refused(f"--ckpt-step 3 | --load {copy} | it has 1, 2"):
        run_config([*words, "--ckpt-step=3"], 2)
    unused = run_config([*words, "--ckpt-step=1", "--load-last-valid"], 2).unused
    assert [line.partition(" ")[0] for line in unused] == ["--load-last-valid"]
    back = [*words, "--ckpt-step=1"]
    assert newest_checkpoint(run_config(back, 2)) == iteration_folder(copy, 1)
    assert ranks.run(go_back, TWO, [*back, f"--save={copy}"]) == [(1, 2)] * 2
    assert ranks.run(reached, TWO, words) == [2] * 2
    flip(iteration_folder(copy, 1) / "__0_0.distcp")
    assert "--ckpt-step 1: that checkpoint of --load " in agreed(ranks.run(refusal, TWO, back))


def load_with_a_failure(words, module, name, error, where):
    """Loads where a function fails on one rank alone."""
    module = importlib.import_module(f"megatron_rc.launch.training.checkpoints.{module}")
    failing = mock.patch.object(module, name, side_effect=error)
    with failing if dist.get_rank() == where else contextlib.nullcontext():
        return refusal(words)


STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
FAILURES = {
    "folder": (("find", "iterations", STALE, 0), "cannot be read (Stale file handle)"),
    "index": (("reader", "read_index", UnsafeFileError(".metadata is cut"), 1), "checkpoint 2: .metadata is cut"),
    "weights": (("contents", "load_model", RuntimeError("size mis"), 1), "not fit this model and its flags (size mis"),
}


@pytest.mark.parametrize(("place", "message"), FAILURES.values(), ids=FAILURES)
def test_what_fails_on_one_rank_alone_is_one_error(ranks, saved, copy, place, message):
    if place[0] == "find":
        cut(iteration_folder(copy, 2) / "__0_0.distcp")
    said = agreed(ranks.run(load_with_a_failure, TWO, [*saved[1], f"--load={copy}"], *place))
    assert message in said


def list_backwards(words):
    """Saves where rank 1 sees the files in another order than rank 0."""
    files_of = manifest.files_of
    with mock.patch.object(manifest, "files_of", lambda folder: files_of(folder)[:: 1 - 2 * dist.get_rank()]):
        save_initial(words)


def test_every_file_has_a_checksum_whatever_ranks_see(ranks, saved, tmp_path):
    ranks.run(list_backwards, TWO, [*saved[1], f"--save={tmp_path}/save"])
    assert checked_checkpoint(tmp_path / "save")[0] == 0


def test_where_none_is_whole_the_error_says_so(ranks, saved, copy):
    for number in (1, 2):
        cut(iteration_folder(copy, number) / "__0_0.distcp")
    for more in ([], ["--load-last-valid"]):
        said = agreed(ranks.run(refusal, TWO, [*saved[1], f"--load={copy}", *more]))
        assert "__0_0.distcp has" in said
        assert said.endswith("no older checkpoint there is whole")


def test_a_checkpoint_that_was_being_replaced_is_gone_on_from(ranks, saved, copy):
    """As a run leaves it that is killed before the new one has its name; in its own folder alone."""
    replaced = iteration_folder(copy, 2).with_suffix(".replaced")
    iteration_folder(copy, 2).rename(replaced)
    ((said,), _) = ranks.run(find_each, TWO, saved[1], [copy])
    assert "names checkpoint 2, which is not complete" in said
    assert replaced.is_dir()
    link = copy.with_name("link")
    link.symlink_to(copy)
    own = [*saved[1], f"--load={copy}/../copy/", f"--save={link}"]
    assert ranks.run(find_each, TWO, own, [copy]) == [["2"]] * 2


def test_what_is_no_file_is_not_read(copy):
    """A pipe waits for whoever writes to it, and a device may never end."""
    (iteration_folder(copy, 2) / MANIFEST).unlink()
    os.mkfifo(iteration_folder(copy, 2) / MANIFEST)
    with pytest.raises(ValueError, match=f"checkpoint 2 is damaged: {MANIFEST} is no file"):
        checked_checkpoint(copy, checksums=False)


@pytest.mark.parametrize("name", ["common.pt", "__9_0.distcp"])
def test_what_came_later_and_would_be_read_is_named(copy, name):
    """Other files, like a user's notes, are nobody's business."""
    folder = iteration_folder(copy, 2)
    listed = json.loads((folder / MANIFEST).read_text())
    listed["files"].pop(name, None)
    (folder / MANIFEST).write_text(json.dumps(listed) + "\n")
    for added in (name, "notes.txt"):
        (folder / added).touch()
    message = f"checkpoint 2 is damaged: {name} is not among the files that manifest.json lists: remove it, it came"
    with pytest.raises(ValueError, match=message):
        checked_checkpoint(copy)
    assert checked_checkpoint(copy, checksums=False) == (2, folder)


def test_a_later_checkpoint_than_the_newest_is_another_runs(ranks, saved, copy):
    shutil.copytree(iteration_folder(copy, 2), iteration_folder(copy, 7))
    cut(iteration_folder(copy, 2) / "__0_0.distcp")
    ((found,), _) = ranks.run(find_each, TWO, [*saved[1], f"--load={copy}", "--load-last-valid"], [copy])
    assert found == "1"


def find_with_warnings(words, folder):
    """What is said of a folder, and the warnings of this rank."""
    with logged() as said:
        return find_each(words, [folder]), said


def test_a_newer_whole_checkpoint_than_the_tracker_names_is_named(ranks, saved, copy, caplog):
    """The tracker has nothing but digits: spoilt ones may name an older checkpoint."""
    (copy / TRACKER).write_text("1")
    (first, warned), (second, others) = ranks.run(find_with_warnings, TWO, saved[1], copy)
    assert first == second == ["1"]
    assert not others
    (said,) = warned
    assert f"--load {copy}: {TRACKER} names checkpoint 1, but checkpoint 2 is there and complete" in said
    assert checked_checkpoint(copy)[0] == 1
    assert "checkpoint 2 is there and complete" in caplog.text
    caplog.clear()
    cut(iteration_folder(copy, 2) / "__0_0.distcp")
    assert checked_checkpoint(copy)[0] == 1
    assert checked_checkpoint(copy, 1)[0] == 1
    assert "complete" not in caplog.text


TRACKED = ("", "x", "1" * 500, "²", "-1", "\0")
LISTED = ("[]", "{", '{"files": {"../../x": {"bytes": 1, "sha256": ""}}}', '{"files": {"x": 1}}', "[" * 100_000)
NO_INDEX = (b"\x80\x04.", b"garbage", pickle.dumps({"a": 1}), pickle.dumps([1]), b"\x80\x04\x8c\xff", b"(" * 100_000)
# A file, its content (None: it is missing), and the reason.
UNREADABLE = [
    (SETTINGS, None, "is missing: the checkpoint says nothing of its model"),
    (SETTINGS, b"", r"cannot be read \(Expecting value"),
    *((SETTINGS, text, "expected one object for each section") for text in (b"[]", b'{"model": 3}')),
    *((TRACKER, text.encode(), "expected the number of a checkpoint") for text in TRACKED),
    *((MANIFEST, text.encode(), "is no list of files") for text in LISTED),
    *((".metadata", content, "(cannot be read|is no index)") for content in NO_INDEX),
]


@pytest.mark.parametrize(("name", "content", "reason"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_file_that_cannot_be_read_is_one_error(copy, name, content, reason):
    folder = iteration_folder(copy, 2)
    path = copy / name if name == TRACKER else folder / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    read = {SETTINGS: lambda: checkpoint_settings(folder), ".metadata": lambda: read_index(path)}
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*{reason}"):
        read.get(name, lambda: checked_checkpoint(copy, checksums=False))()


# Nothing in a checkpoint runs


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def seal(folder):
    """As the hostile writer would, with a manifest that fits."""
    from megatron_rc.launch.training.checkpoints.manifest import digests_of_share, files_of, write_manifest

    write_manifest(folder, digests_of_share(folder, files_of(folder)))


def in_index(folder, hostile):
    (folder / ".metadata").write_bytes(pickle.dumps(hostile))


def in_common(folder, hostile):
    add_to_common(folder, {"iteration": hostile})


def add_to_common(folder, more):
    """Put these into what all ranks share: a file of its own, since megatron-core 0.19 an entry among the others."""
    if (folder / "common.pt").exists():
        torch.save(torch.load(folder / "common.pt", weights_only=False) | more, folder / "common.pt")
        return
    index = read_index(folder / ".metadata")
    entry = next(e for key, e in index.storage_data.items() if key.fqn.startswith("common_state/"))
    content = (folder / entry.relative_path).read_bytes()[entry.offset : entry.offset + entry.length]
    (common,) = torch.load(io.BytesIO(content), weights_only=False)
    put_entry(folder, "common_state/", [common | more])


def in_entry(folder, hostile):
    """In the place of what is no tensor."""
    return put_entry(folder, "_extra_state", hostile)


def put_entry(folder, part_of_name, content):
    index = read_index(folder / ".metadata")
    name, entry = next((key, e) for key, e in index.storage_data.items() if part_of_name in key.fqn)
    written = io.BytesIO()
    torch.save(content, written)
    entry.offset, entry.length, entry.relative_path = 0, written.tell(), "hostile.distcp"
    (folder / "hostile.distcp").write_bytes(written.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return name


def in_layer(folder, hostile):
    """In what Transformer Engine's layers would unpickle themselves."""
    return in_entry(folder, torch.frombuffer(bytearray(pickle.dumps(hostile)), dtype=torch.uint8))


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_layer_gets_no_pickle(saved, copy, tmp_path, as_bytes):
    """Transformer Engine's layers would unpickle it; they are given none."""
    folder, mark = iteration_folder(copy, 2), tmp_path / "was here"
    pickled = pickle.dumps(Hostile(mark))
    state = io.BytesIO(pickled) if as_bytes else torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    name = put_entry(folder, "_extra_state", [state])
    wanted = ShardedObject.empty_from_unique_key(name.fqn)
    assert CheckpointReader(folder).state({"layer": wanted})["layer"] is None
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists(), "who unpickles it runs it"


@pytest.mark.parametrize("place", [in_index, in_common, in_entry, in_layer], ids=lambda place: place.__name__)
def test_a_hostile_file_runs_nothing(ranks, saved, copy, tmp_path, place):
    folder, mark = iteration_folder(copy, 2), tmp_path / "was here"
    place(folder, Hostile(mark))
    seal(folder)
    for more in ([], ["--no-verify-integrity"], ["--no-load-optim"]):
        assert "has no place" in agreed(ranks.run(refusal, TWO, [*saved[1], f"--load={copy}", *more]))
        assert not mark.exists()


def load_layers_that_unpickle(words):
    """With what Transformer Engine's attention does: it unpickles a state that it never asks a checkpoint for."""
    from megatron_rc.launch.training.models.local_layers import LocalAttention

    def unpickle(self, state):
        pickle.loads(state.numpy().tobytes())

    with (
        mock.patch.object(LocalAttention, "set_extra_state", unpickle),
        mock.patch.object(LocalAttention, "get_extra_state", return_value=None),
        mock.patch.object(LocalAttention, "sharded_state_dict", create=True, return_value={}),
    ):
        return refusal(words)


def test_a_state_that_no_layer_asked_for_is_not_unpickled(ranks, saved, copy, tmp_path):
    folder, mark = iteration_folder(copy, 2), tmp_path / "was here"
    state = torch.frombuffer(bytearray(pickle.dumps(Hostile(mark))), dtype=torch.uint8)
    keys = [f"decoder.layers.{layer}.self_attention.core_attention._extra_state" for layer in range(2)]
    add_to_common(folder, {"model0": dict.fromkeys(keys, state)})
    seal(folder)
    said = agreed(ranks.run(load_layers_that_unpickle, TWO, [*saved[1], f"--load={copy}"]))
    assert not mark.exists()
    assert f"checkpoint 2 holds model0.{keys[0]}, which has no place" in said


PIPELINE = Layout(pp=2)
SHARED = {
    "of-the-last-stage": {"model0": {"decoder.final_layernorm.weight": torch.ones(1)}},
    "list": {"model0": [1]},
    "groups": {"optimizer": {"param_groups": [1, 2]}},
    "schedule": {"opt_param_scheduler": {"max_lr": "x"}},
    "step": {"iteration": "x"},
}


@pytest.mark.parametrize("entry", SHARED.values(), ids=SHARED)
def test_what_all_ranks_share_and_says_otherwise_is_one_error_on_all_stages(ranks, saved, copy, entry):
    """Stages ask for different entries: what one of them finds twice, another one does not know."""
    folder = iteration_folder(copy, 2)
    add_to_common(folder, entry)
    seal(folder)
    words = [word for word in saved[1] if word not in TWO.flags()]
    said = agreed(ranks.run(refusal, PIPELINE, [*words, *PIPELINE.flags(), f"--load={copy}"]))
    assert said.startswith("--load")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "a\\b", "\0", 3, None])
def test_an_index_stays_inside_its_folder(saved, copy, name):
    folder = iteration_folder(copy, 2)
    index = read_index(folder / ".metadata")
    next(iter(index.storage_data.values())).relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"\.metadata (names .* no file of|is no index)"):
        read_index(folder / ".metadata")


def test_an_index_changes_no_class(tmp_path):
    """Pickle's BUILD on a class sets attributes of the class."""
    classes = ("pathlib\nPosixPath", "torch.distributed.checkpoint.metadata\nMetadata", "collections\nOrderedDict")
    for named in classes:
        content = b"\x80\x02c" + named.encode() + b"\n(N}X\x04\x00\x00\x00nameK\x03stb."
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match="changes a class, which has no place"):
            read_index(tmp_path / ".metadata")
    assert not hasattr(Metadata, "name")
    assert isinstance(PurePosixPath.name, property)


def test_an_index_that_the_python_of_debian_12_wrote_is_read(saved, copy, monkeypatch):
    """Python 3.11.2 writes a member of an enumeration as a call of getattr."""
    file = iteration_folder(copy, 2) / ".metadata"
    index = read_index(file)
    with monkeypatch.context() as patch:
        patch.setattr(enum.Enum, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name)))
        written = pickle.dumps(index)
    assert b"getattr" in written
    file.write_bytes(written)
    assert read_index(file) == index


@pytest.mark.parametrize(
    ("owner", "name"),
    [(WriteItemType, "__init__"), (WriteItemType, "mro"), (Metadata, "__init__"), (torch.float32, "itemsize")],
    ids=str,
)
def test_an_index_gets_no_attribute_but_an_enumerations_member(tmp_path, owner, name):
    class Attribute:
        def __reduce__(self):
            return getattr, (owner, name)

    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(UnsafeFileError, match=r"names builtins\.getattr, which has no place"):
        read_index(file)


def load_as_megatron_does(words, folder):
    """What Megatron's own loading makes of a checkpoint, and what ours does; of this rank."""
    first, second = (trained_state(make_trainer(words), POLICY, with_optimizer=True, is_loading=True) for _ in range(2))
    found, ours = dist_checkpointing.load(first, folder), CheckpointReader(Path(folder)).state(second)
    difference, missing, more = dict_utils.diff(found, ours)
    return len(list(dict_utils.nested_values(found))), difference, missing, more


@pytest.mark.parametrize("more", [[], ["--use-distributed-optimizer"]], ids=["whole", "distributed"])
def test_megatron_reads_what_is_written_here(ranks, tmp_path, more):
    words = flags(tmp_path, *SMALL, *TWO.flags(), *more)
    ranks.run(save_initial, TWO, [*words, f"--save={tmp_path}/save"])
    folder = str(iteration_folder(tmp_path / "save", 0))
    for values, *differences in ranks.run(load_as_megatron_does, TWO, words, folder):
        assert values > 20
        assert differences == [[], [], []]
