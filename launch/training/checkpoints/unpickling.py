"""Safe reading of pickles: a checkpoint's files run no code.

PyTorch's distributed format keeps its index (``.metadata``) and every entry that is no tensor as pickles, and a pickle
can call any function that it names. The index is read by an unpickler that knows the classes of an index alone, all
other entries by PyTorch's ``weights_only``.
"""

from __future__ import annotations

import enum
import io
import logging
import pickle
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rc.launch.errors import one_line

ENTRY = "an entry of a .distcp file"
_CHECKPOINT = "torch.distributed.checkpoint"
# The classes of PyTorch's index, and of the plans that older versions of Megatron add to it, by their modules.
_ALLOWED = {
    f"{_CHECKPOINT}.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    f"{_CHECKPOINT}.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    f"{_CHECKPOINT}.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "torch": "Size",
}
_KINDS = (torch.dtype, torch.layout, torch.memory_format)
_log = logging.getLogger("megatron_rc")

# Python's own unpickler: each operation of a pickle is a method, which can be replaced. The one in C has no methods.
_PythonUnpickler: Any = pickle._Unpickler


class UnsafeFileError(ValueError):
    """A checkpoint's file that is damaged, or that names code."""


class _IndexUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Unpickler that knows the classes of PyTorch's index and dtypes, and changes no class."""

    dispatch: ClassVar = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if an index can contain it."""
        if name in _ALLOWED.get(module, "").split() or (
            module == "torch" and isinstance(getattr(torch, name, None), _KINDS)
        ):
            return super().find_class(module, name)
        # A path in its own module: PosixPath moved between Python's versions.
        if module.partition(".")[0] == "pathlib" and name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath"):
            return _path
        # Python 3.11.2, which Debian 12 has, writes a member of an enumeration as a call of getattr.
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise UnsafeFileError(f"names {module}.{name}, which has no place in a checkpoint: nothing of it was run")

    def load_build(self) -> None:
        """Set the state of an object; refuse a class or an enumeration's member, which others share."""
        made = self.stack[-2]
        if callable(made) or isinstance(made, enum.Enum):
            raise UnsafeFileError("changes a class, which has no place in a checkpoint: nothing of it was run")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


def _member(enumeration: Any, name: Any) -> enum.Enum:
    """Return a member of an enumeration by its name; refuse any other attribute of any other object."""
    if not isinstance(enumeration, enum.EnumMeta) or name not in enumeration.__members__:
        raise UnsafeFileError("names builtins.getattr, which has no place in a checkpoint: nothing of it was run")
    return enumeration[name]


def read_index(path: Path) -> Metadata:
    """Read PyTorch's index of a checkpoint.

    Raises:
        UnsafeFileError: the file cannot be read, is no index, or names files elsewhere.
    """
    try:
        with path.open("rb") as file:
            return _checked_index(_IndexUnpickler(file).load())
    except FileNotFoundError as error:
        raise UnsafeFileError(f"{path.name} is missing") from error
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{path.name} {error}") from error
    except OSError as error:
        raise UnsafeFileError(f"{path.name} cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle may call allowed classes with arbitrary arguments
        reason = f"{type(error).__name__}: {one_line(error, most=160)}"
        raise UnsafeFileError(f"{path.name} cannot be read ({reason})") from error


def load_plain(file: Path | io.BytesIO, name: str) -> Any:
    """Read tensors and plain values that ``torch.save`` wrote into ``file``, which messages call ``name``.

    Raises:
        OSError: the file cannot be opened.
        UnsafeFileError: the content is damaged, or holds something else.
    """
    try:
        with torch.serialization.safe_globals([io.BytesIO, bytes]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged archives raise errors of many kinds
        raise refusal(name, error) from error


def load_entry(content: io.BytesIO) -> Any:
    """Read an entry that is no tensor, without the states that Transformer Engine's layers would unpickle.

    Such a layer unpickles its state freely. So the layer gets none, and its fp8 scaling starts anew.

    Raises:
        UnsafeFileError: the content is damaged, or has another form than Megatron's.
    """
    value = load_plain(content, ENTRY)
    if isinstance(value, torch.Tensor):
        raise UnsafeFileError(f"{ENTRY} is a tensor in the place of a list, which has no place in a checkpoint")
    return [_without_pickle(one) for one in value] if isinstance(value, list) else value


def refusal(name: str, error: BaseException) -> UnsafeFileError:
    """Return the error of a file that PyTorch refuses, with the name that the file contains, if it contains one."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found:
        return UnsafeFileError(f"{name} names {found[1]}, which has no place in a checkpoint: nothing of it was run")
    return UnsafeFileError(f"{name} cannot be read ({one_line(error, most=160)})")


def _without_pickle(value: Any) -> Any:
    """Return the value, or None for the pickled state of a Transformer Engine layer: bytes, or a tensor of bytes."""
    is_stream = isinstance(value, io.BytesIO) and bool(value.getbuffer())
    if not is_stream and not (isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel()):
        return value
    with suppress(UnsafeFileError):
        if is_stream and load_plain(value, ENTRY) is None:
            return None
    _log.warning("the checkpoint holds fp8 state of Transformer Engine's layers, which is a pickle and is not read")
    return None


def _checked_index(index: Any) -> Metadata:
    """Return the index if its entries have the right form and lie inside the checkpoint's folder."""
    entries, names = getattr(index, "storage_data", None), getattr(index, "state_dict_metadata", None)
    if not isinstance(index, Metadata) or not isinstance(entries, dict) or not isinstance(names, dict):
        raise UnsafeFileError("is no index of a checkpoint")
    if not all(isinstance(name, str) for name in names):
        raise UnsafeFileError("is no index of a checkpoint")
    for entry in entries.values():
        name = getattr(entry, "relative_path", None)
        numbers = getattr(entry, "offset", None), getattr(entry, "length", None)
        if not isinstance(name, str) or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise UnsafeFileError("is no index of a checkpoint")
        if not name.endswith(".distcp") or set(name) & set("/\\\0"):
            raise UnsafeFileError(f"names {name!r}, which is no file of tensors in the checkpoint's own folder")
    return index
