"""A look through all pickles of a checkpoint before Megatron reads them: its files run no code.

PyTorch's distributed format keeps its index (``.metadata``) and every entry that is no tensor as pickles, and a pickle
can call any function that it names. Tensors themselves are read by PyTorch's ``weights_only``.
"""

from __future__ import annotations

import enum
import io
import pickle
import re
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_rc.launch.errors import one_line

COMMON_FILE = "common.pt"  # values that all ranks share; since Megatron 0.19 an entry of a .distcp file
_CHECKPOINT = "torch.distributed.checkpoint"
# The classes of PyTorch's index, and of the plans that older versions of Megatron add to it, by their modules.
_OF_INDEX = {
    f"{_CHECKPOINT}.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    f"{_CHECKPOINT}.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    f"{_CHECKPOINT}.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "torch": "Size",
}
# The names of tensors and plain values in the files of ``torch.save``; storages are no names there.
_OF_ENTRIES = {
    "torch._utils": "_rebuild_tensor_v2",
    "torch": "Size device",
    "collections": "OrderedDict",
    "_io": "BytesIO",
    "_codecs": "encode",
    "builtins": "bytearray set",
    "__builtin__": "bytearray set",
}
_KINDS = (torch.dtype, torch.layout, torch.memory_format)

# Python's own unpickler: each operation of a pickle is a method, which can be replaced. The one in C has no methods.
_PythonUnpickler: Any = pickle._Unpickler


class UnsafeFileError(ValueError):
    """A checkpoint's file that is damaged, or that names code."""


def check_pickles(folder: Path) -> Metadata:
    """Look through every pickle of a checkpoint's folder, and return PyTorch's index.

    Each pickle is read twice: by an unpickler that also sees changes of classes, and by the parser in C that Megatron's
    reading uses, which might understand other bytes. Both know the classes of a checkpoint alone.

    Raises:
        UnsafeFileError: a pickle names code or a file elsewhere, or cannot be read.
    """
    index = read_index(folder / ".metadata")
    if (folder / COMMON_FILE).is_file():
        _check_saved((folder / COMMON_FILE).read_bytes(), COMMON_FILE)
    for key, stored in index.storage_data.items():
        # PyTorch reads an entry as a pickle if the index calls it bytes, and else by ``weights_only``.
        if not isinstance(index.state_dict_metadata.get(key.fqn), BytesStorageMetadata):
            continue
        try:
            with (folder / stored.relative_path).open("rb") as file:
                file.seek(stored.offset)
                content = file.read(stored.length)
        except OSError as error:
            raise UnsafeFileError(f"{stored.relative_path} cannot be read ({error.strerror})") from error
        _check_saved(content, f"{stored.relative_path} ({key.fqn})")
    return index


def read_index(path: Path) -> Metadata:
    """Read PyTorch's index of a checkpoint.

    Raises:
        UnsafeFileError: the file cannot be read, is no index, or names files elsewhere.
    """
    try:
        content = path.read_bytes()
        index: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
        _IndexUnpicklerInC(io.BytesIO(content)).load()
        _check_index(index)
    except FileNotFoundError as error:
        raise UnsafeFileError(f"{path.name} is missing") from error
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{path.name} {error}") from error
    except Exception as error:  # a damaged pickle may call allowed classes with arbitrary arguments
        reason = f"{type(error).__name__}: {one_line(error, most=160)}"
        raise UnsafeFileError(f"{path.name} cannot be read ({reason})") from error
    return index


class _IndexUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Unpickler that knows the classes of PyTorch's index and dtypes, and changes no class."""

    dispatch: ClassVar = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if an index can contain it."""
        return _class_of_index(module, name)

    def load_build(self) -> None:
        """Set the state of an object; refuse a class or an enumeration's member, which others share."""
        target = self.stack[-2]
        if callable(target) or isinstance(target, enum.Enum):
            raise UnsafeFileError("changes a class, which has no place in a checkpoint: nothing of it was run")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


class _IndexUnpicklerInC(pickle.Unpickler):
    """Megatron's unpickler of an index, with the classes of an index alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if an index can contain it."""
        return _class_of_index(module, name)


class _EntryUnpicklerInC(pickle.Unpickler):
    """Megatron's unpickler of an entry, with the names of tensors and plain values alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the function or class if an entry can contain it."""
        if name in _OF_ENTRIES.get(module, "").split() or _is_torch_kind(module, name):
            return super().find_class(module, name)
        raise UnsafeFileError(_names(f"{module}.{name}"))


def _class_of_index(module: str, name: str) -> Any:
    if name in _OF_INDEX.get(module, "").split() or _is_torch_kind(module, name):
        return pickle.Unpickler(io.BytesIO()).find_class(module, name)
    # A path in its own module: PosixPath moved between Python's versions.
    if module.partition(".")[0] == "pathlib" and name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath"):
        return _path
    # Python 3.11.2, which Debian 12 has, writes a member of an enumeration as a call of getattr.
    if (module, name) == ("builtins", "getattr"):
        return _member
    raise UnsafeFileError(_names(f"{module}.{name}"))


def _is_torch_kind(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), _KINDS)


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


def _member(enumeration: Any, name: Any) -> enum.Enum:
    """Return a member of an enumeration by its name; refuse any other attribute of any other object."""
    if not isinstance(enumeration, enum.EnumMeta) or name not in enumeration.__members__:
        raise UnsafeFileError(_names("builtins.getattr"))
    return enumeration[name]


def _names(name: str) -> str:
    return f"names {name}, which has no place in a checkpoint: nothing of it was run"


def _check_saved(content: bytes, name: str) -> None:
    """Refuse the content of a file or entry of ``torch.save`` that holds more than tensors and plain values.

    Raises:
        UnsafeFileError: ``name`` is damaged, or holds something else.
    """
    unpickler_in_c = SimpleNamespace(Unpickler=_EntryUnpicklerInC, load=_load_in_c, __name__="pickle")
    try:
        with torch.serialization.safe_globals([io.BytesIO, bytes]):
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=False, pickle_module=unpickler_in_c)
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{name} {error}") from error
    except Exception as error:  # damaged archives raise errors of many kinds
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = _names(named[1]) if named else f"cannot be read ({one_line(error, most=160)})"
        raise UnsafeFileError(f"{name} {reason}") from error


def _load_in_c(file: BinaryIO, **options: Any) -> Any:
    return _EntryUnpicklerInC(file, **options).load()


def _check_index(index: Any) -> None:
    """Refuse an index whose entries have another form, or lie outside the checkpoint's folder."""
    entries = getattr(index, "storage_data", None)
    names = getattr(index, "state_dict_metadata", None)
    if not isinstance(index, Metadata) or not isinstance(entries, dict) or not isinstance(names, dict):
        raise UnsafeFileError("is no index of a checkpoint")
    if not all(isinstance(name, str) for name in [*names, *(getattr(key, "fqn", None) for key in entries)]):
        raise UnsafeFileError("is no index of a checkpoint")
    for entry in entries.values():
        name = getattr(entry, "relative_path", None)
        numbers = getattr(entry, "offset", None), getattr(entry, "length", None)
        if not isinstance(name, str) or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise UnsafeFileError("is no index of a checkpoint")
        if not name.endswith(".distcp") or set(name) & set("/\\\0"):
            raise UnsafeFileError(f"names {name!r}, which is no file of tensors in the checkpoint's own folder")
        if getattr(entry, "transform_descriptors", None):
            raise UnsafeFileError(f"has a transformed entry in {name!r}, which cannot be looked through")
