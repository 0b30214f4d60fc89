"""Checkpoints are read without running what is in them.

PyTorch's distributed format keeps its index (``.metadata``) and every entry that is no tensor as pickles, and a pickle
can call any function that it names. While a checkpoint is read, only the few classes that belong there can be named.
"""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar
from unittest import mock

import torch
from torch.distributed.checkpoint.metadata import Metadata

_CHECKPOINT = "torch.distributed.checkpoint"
# What PyTorch's index is made of, and Megatron's of older versions: a plan of what each rank wrote.
_ALLOWED = {
    **dict.fromkeys(
        (
            "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
            "TensorStorageMetadata _MEM_FORMAT_ENCODING"
        ).split(),
        f"{_CHECKPOINT}.metadata",
    ),
    **dict.fromkeys("SavePlan TensorWriteData WriteItem WriteItemType".split(), f"{_CHECKPOINT}.planner"),
    "_StorageInfo": f"{_CHECKPOINT}.filesystem",
    "_get_layout": "torch.serialization",
    "OrderedDict": "collections",
    "Size": "torch",
}


# Python's own, in which each operation of a pickle is a method; the one in C has none to replace.
_PythonUnpickler: Any = pickle._Unpickler


class UnsafeFileError(ValueError):
    """A file of a checkpoint names what has no place in one, or is none."""


class _IndexUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Knows the classes of PyTorch's index, and dtypes.

    Python's own unpickler and not the one in C, since a class must not be changed, which is one of its operations.
    """

    dispatch: ClassVar = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it belongs there."""
        if _ALLOWED.get(name) == module or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        # A path in its own module: PosixPath moved between Python's versions.
        if module.partition(".")[0] == "pathlib" and name in ("Path", "PosixPath", "WindowsPath"):
            return _path
        raise UnsafeFileError(f"names {module}.{name}, which has no place in a checkpoint: nothing of it was run")

    def load_build(self) -> None:
        """Give an object its state, if it is one that unpickling has made, and none that others share."""
        made = self.stack[-2]
        if callable(made) or isinstance(made, enum.Enum):
            raise UnsafeFileError("changes a class, which has no place in a checkpoint: nothing of it was run")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format)


def read_index(path: Path) -> Metadata:
    """PyTorch's index of a checkpoint.

    Raises:
        ValueError: it cannot be read, or is none, or names files elsewhere.
    """
    try:
        with path.open("rb") as file:
            return _load_index(file)
    except FileNotFoundError as error:
        raise UnsafeFileError(f"{path.name} is missing") from error
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{path.name} {error}") from error
    except OSError as error:
        raise UnsafeFileError(f"{path.name} cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def safe_loading() -> Iterator[None]:
    """Inside, ``pickle.load`` and ``torch.load`` run nothing that a file names.

    Both are replaced as a whole and not where some version of PyTorch or Megatron calls them. What ranks send each
    other is pickled too; it goes through classes that were bound before and is as trustworthy as the ranks.
    """
    with mock.patch("pickle.load", _load_index), mock.patch("torch.load", _safe_torch_load(torch.load)):
        yield


def _load_index(file: IO[bytes], **_: Any) -> Metadata:
    try:
        index = _IndexUnpickler(file).load()
    except UnsafeFileError:
        raise
    # A damaged pickle may call what is allowed with whatever it likes.
    except Exception as error:
        raise UnsafeFileError(f"cannot be read ({type(error).__name__}: {_one_line(error)})") from error
    return _checked_index(index)


def _checked_index(index: Any) -> Metadata:
    """The index, unless its entries are no such, or lie outside the checkpoint's folder."""
    entries, names = (getattr(index, name, None) for name in ("storage_data", "state_dict_metadata"))
    if not isinstance(index, Metadata) or not isinstance(entries, dict) or not _is_mapping(names):
        raise UnsafeFileError("is no index of a checkpoint")
    for entry in entries.values():
        name = getattr(entry, "relative_path", None)
        numbers = getattr(entry, "offset", None), getattr(entry, "length", None)
        if not isinstance(name, str) or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise UnsafeFileError("is no index of a checkpoint")
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise UnsafeFileError(f"names {name!r}, which is no file of the checkpoint's own folder")
        if getattr(entry, "transform_descriptors", None):
            raise UnsafeFileError("asks for transforms of its files, which are not known")
    return index


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _safe_torch_load(load: Any) -> Any:
    """``torch.load`` of tensors and plain values alone, whatever its caller asks for."""

    def safe(file: Any, map_location: Any = None, *_: Any, weights_only: bool | None = None, **__: Any) -> Any:
        name = Path(file).name if isinstance(file, (str, Path)) else "an entry of a .distcp file"
        try:
            with torch.serialization.safe_globals([io.BytesIO, bytes]):
                value = load(file, map_location=map_location, weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:
            found = re.search(r"GLOBAL ([\w.]+)", str(error))
            why = f"names {found[1]}, which has no place in a checkpoint: nothing of it was run" if found else ""
            raise UnsafeFileError(f"{name} {why or f'cannot be read ({_one_line(error)})'}") from error
        if weights_only is False:
            _refuse_pickle_inside(value, load)
        return value

    return safe


def _refuse_pickle_inside(value: Any, load: Any) -> None:
    """Extra state of Transformer Engine's layers: unpickled by the layer itself, freely, so it must hold nothing."""
    is_empty = not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.numel() == 0
    if isinstance(value, io.BytesIO) and value.getvalue():
        try:
            is_empty = load(io.BytesIO(value.getvalue()), weights_only=True) is None
        except Exception:  # Whatever it is, it is not nothing.
            is_empty = False
    if not is_empty:
        raise UnsafeFileError(
            "an entry of a .distcp file holds a pickle for a layer of Transformer Engine, which is not read: such "
            "layers' state (fp8) has no place here"
        )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 160 else f"{text[:160]} …"
