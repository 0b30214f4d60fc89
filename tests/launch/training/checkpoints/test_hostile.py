"""Nothing in a checkpoint runs: each pickle is looked through before Megatron reads it."""

import enum
import io
import json
import os
import pickle
import shutil
from pathlib import PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_rc.launch.checkpoint_folders import iteration_folder
from megatron_rc.launch.training.checkpoints.checksums import checksums_of_rank, write_manifest
from megatron_rc.launch.training.checkpoints.state import load_model
from megatron_rc.launch.training.checkpoints.unpickling import UnsafeFileError, check_pickles, read_index
from tests.launch.training.checkpoints.test_saving import SMALL
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, refusal, save_initial

TWO = Layout(tp=2)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with a checkpoint of two ranks, and the flags that wrote it."""
    folder = tmp_path_factory.mktemp("saved")
    arguments = flags(folder, *SMALL, "--grpo-kl-beta=0", *TWO.flags())
    ranks.run(save_initial, TWO, [*arguments, f"--save={folder}/save"])
    return folder / "save", arguments


@pytest.fixture
def folder(saved, tmp_path):
    """The folder of a checkpoint that may be changed."""
    return iteration_folder(shutil.copytree(saved[0], tmp_path / "copy"), 0)


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def in_index(folder, hostile):
    (folder / ".metadata").write_bytes(pickle.dumps(hostile))


def in_common(folder, hostile):
    """Put it into what all ranks share: a file of its own, since megatron-core 0.19 an entry among the others."""
    if (folder / "common.pt").exists():
        common = torch.load(folder / "common.pt", weights_only=False)
        torch.save(common | {"more": hostile}, folder / "common.pt")
    else:
        put_entry(folder, "common_state/", [{"more": hostile}])


def in_entry(folder, hostile):
    """Put it in the place of what is no tensor."""
    put_entry(folder, "_extra_state", [hostile])


def in_legacy_entry(folder, hostile):
    """Put it there in the format that torch.save had before 1.6, which torch.load still reads."""
    put_entry(folder, "_extra_state", [hostile], is_zip=False)


def put_entry(folder, part_of_name, content, *, is_zip=True):
    """Write an entry to a file of its own, and its new place to the index."""
    index = read_index(folder / ".metadata")
    entry = next(entry for key, entry in index.storage_data.items() if part_of_name in key.fqn)
    written = io.BytesIO()
    torch.save(content, written, _use_new_zipfile_serialization=is_zip)
    entry.offset = 0
    entry.length = written.tell()
    entry.relative_path = "hostile.distcp"
    (folder / "hostile.distcp").write_bytes(written.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def in_tensor(folder, hostile):
    """Let the index say that a tensor is an object, which PyTorch would unpickle."""
    index = read_index(folder / ".metadata")
    key = next(key for key in index.storage_data if "linear_fc1.weight" in key.fqn)
    layer = next(value for name, value in index.state_dict_metadata.items() if "_extra_state" in name)
    index.state_dict_metadata[key.fqn] = layer
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    put_entry(folder, key.fqn, hostile)


PLACES = [in_index, in_common, in_entry, in_legacy_entry, in_tensor]


@pytest.mark.parametrize("place", PLACES, ids=[place.__name__ for place in PLACES])
def test_a_hostile_file_runs_nothing(ranks, saved, folder, tmp_path, place):
    """Its checksums fit: who writes the file writes them too."""
    mark = tmp_path / "was here"
    place(folder, Hostile(mark))
    everything = {path.name for path in folder.iterdir()}
    write_manifest(folder, [checksums_of_rank(folder, rank, lambda: None) for rank in range(2)])
    assert everything == {path.name for path in folder.iterdir()}
    errors = ranks.run(refusal, TWO, [*saved[1], f"--load={folder.parent}"])
    for error in errors:
        assert error.startswith(f"--load {folder.parent}: checkpoint 0: ")
        assert "mkdir, which has no place in a checkpoint: nothing of it was run" in error
    assert not mark.exists()


class Layer(torch.nn.Module):
    """A layer that unpickles its state, as Transformer Engine's do."""

    def set_extra_state(self, state):
        self.state = state if state is None else pickle.loads(state.getvalue())

    def get_extra_state(self):
        return io.BytesIO()


def test_a_layer_gets_no_pickle(tmp_path):
    mark = tmp_path / "was here"
    layer = Layer()
    pickled = pickle.dumps(Hostile(mark))
    load_model([layer], {"model0": {"_extra_state": io.BytesIO(pickled)}})
    assert layer.state is None
    assert not mark.exists()
    with pytest.raises(FileExistsError):
        [pickle.loads(pickled) for _ in range(2)]


def test_a_checkpoint_of_this_program_passes(saved):
    folder = iteration_folder(saved[0], 0)
    index = check_pickles(folder)
    assert any("linear_fc1.weight" in name for name in index.state_dict_metadata)
    assert json.loads((folder / "progress.json").read_text())["iteration"] == 0


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "a\\b", "\0", 3, None])
def test_an_index_stays_inside_its_folder(folder, name):
    index = read_index(folder / ".metadata")
    next(iter(index.storage_data.values())).relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"\.metadata (names .* no file of|is no index)"):
        read_index(folder / ".metadata")


def test_an_index_changes_no_class(tmp_path):
    """Pickle's BUILD on a class sets attributes of the class."""
    for named in ("pathlib\nPosixPath", "torch.distributed.checkpoint.metadata\nMetadata", "collections\nOrderedDict"):
        content = b"\x80\x02c" + named.encode() + b"\n(N}X\x04\x00\x00\x00nameK\x03stb."
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match="changes a class, which has no place"):
            read_index(tmp_path / ".metadata")
    assert not hasattr(Metadata, "name")
    assert isinstance(PurePosixPath.name, property)


def test_an_index_that_the_python_of_debian_12_wrote_is_read(folder, monkeypatch):
    """Python 3.11.2 writes a member of an enumeration as a call of getattr."""
    file = folder / ".metadata"
    index = read_index(file)
    with monkeypatch.context() as patch:
        patch.setattr(enum.Enum, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name)))
        written = pickle.dumps(index)
    assert b"getattr" in written
    file.write_bytes(written)
    assert read_index(file) == index


@pytest.mark.parametrize(
    ("owner", "name"),
    [(WriteItemType, "__init__"), (Metadata, "__init__"), (torch.float32, "itemsize")],
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


NO_INDEX = (b"\x80\x04.", b"garbage", pickle.dumps({"a": 1}), pickle.dumps([1]), b"\x80\x04\x8c\xff", b"(" * 100_000)


@pytest.mark.parametrize("content", NO_INDEX, ids=range(len(NO_INDEX)))
def test_what_is_no_index_is_one_error(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UnsafeFileError, match=r"\.metadata (cannot be read|is no index)"):
        read_index(tmp_path / ".metadata")
