"""Read tensors by name from safetensors, PyTorch and NumPy files of other programs, without running code in them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.records.storage import read_safetensors

TORCH_SUFFIXES = (".pt", ".pth")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES, ".npz")
MOST_BYTES = 1 << 34  # largest unpacked size of a compressed file: a small file could unpack to more than the memory


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, by name, to the host; the file's suffix is one of ``SUFFIXES``.

    A ``.pt`` or ``.pth`` file holds a dict of tensors, some of them perhaps in a dict under its key ``batch``. An array
    of strings in an ``.npz`` file, such as verl's ``uid``, becomes an array of integers: equal strings, equal integers.

    Raises:
        ImportError: the library for this kind of file is not installed.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, holds objects, or unpacks to over ``MOST_BYTES``.
    """
    _check_size(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    if path.suffix == ".safetensors":
        tensors, _ = read_safetensors(path)
        return tensors
    content = read_torch_file(path)
    if isinstance(content.get("batch"), Mapping):
        content = {**content, **content["batch"]}
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _check_size(path: Path) -> None:
    """Raise ValueError if the file is a zip archive that unpacks to over ``MOST_BYTES``.

    ``.npz`` files and new ``.pt`` files are zip archives.
    """
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
        raise ValueError(f"{path} is cut off or damaged ({problem}): write it again") from None
    if size > MOST_BYTES:
        raise ValueError(f"{path} unpacks to {size} bytes, above the limit of {MOST_BYTES}: write it in several files")


def read_torch_file(path: Path) -> Mapping[str, Any]:
    """Return the dict in a file that ``torch.save`` wrote: tensors, numbers, strings, and lists and dicts of them.

    Raises:
        ValueError: the file is damaged, holds other objects or no dict, or unpacks to over ``MOST_BYTES``.
    """
    _check_size(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # torch's unpickler raises many types, both for other objects and for damage
        reason = str(problem).strip().partition("\n")[0]
        # PyTorch's message about other objects tells the user to switch weights_only off, which would run their code.
        if "weights_only" in str(problem):
            reason = "it holds other objects"
        raise ValueError(
            f"{path} is no dict of tensors ({reason[:200]}): objects could run code and are not read; write the "
            'file as torch.save({"rollout_log_probs": tensor, …}, path)'
        ) from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}: expected a dict of tensors by name")
    return content


def _read_npz(path: Path) -> dict[str, Tensor]:
    """Return the arrays of an ``.npz`` file as tensors, by name."""
    try:
        import numpy as np
    except ModuleNotFoundError:
        raise ImportError(f"{path} needs numpy, which is not installed: pip install numpy") from None

    def to_tensor(array: Any) -> Tensor:
        is_text = array.dtype.kind in "US"
        if is_text:
            # Each string becomes its index in the sorted list of the array's distinct strings.
            _, array = np.unique(array, return_inverse=True)
        return torch.from_numpy(array)

    try:
        # np.load(path) would leave a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: to_tensor(archive[name]) for name in archive.files}
    except OSError:
        raise
    except Exception as problem:  # zipfile, zlib and numpy raise many types for damage; numpy also for other objects
        raise ValueError(
            f"{path} is no .npz file of numbers ({problem}): objects could run code and are not read; save plain arrays"
        ) from None
