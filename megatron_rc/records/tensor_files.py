"""Tensors by name from files of other programs: safetensors, PyTorch's and NumPy's. Reading them runs no code."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.records.storage import read_safetensors

SUFFIXES = (".safetensors", ".pt", ".pth", ".npz")
MOST_BYTES = 1 << 34  # limit of the unpacked size of a compressed file: a small file may unpack to fill the memory


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, by name, to the host; the file's suffix is one of ``SUFFIXES``.

    A ``.pt`` or ``.pth`` file holds a dict of tensors, alone or below ``batch``. Texts in an ``.npz`` file, such as
    verl's ``uid``, become numbers: equal texts equal ones.

    Raises:
        ImportError: the library for this kind of file is not installed.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, holds objects, or unpacks to over ``MOST_BYTES``.
    """
    _check_size(path)
    if path.suffix == ".npz":
        return _of_numpy(path)
    if path.suffix == ".safetensors":
        tensors, _ = read_safetensors(path)
        return tensors
    return _of_pytorch(path)


def _check_size(path: Path) -> None:
    """Raise ValueError for a zip archive, which ``.npz`` and ``.pt`` files are, that unpacks to too many bytes."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
        raise ValueError(f"{path} is cut off or damaged ({problem}): write it again") from None
    if size > MOST_BYTES:
        raise ValueError(f"{path} unpacks to {size} bytes, above the limit of {MOST_BYTES}: write it in several files")


def _of_pytorch(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of ``torch.save``; other values of its dict are left out."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # its unpickler raises many types, for code and for damage alike
        reason = str(problem).strip().partition("\n")[0]
        # PyTorch's own sentence about objects proposes to load them without this check.
        if "weights_only" in str(problem):
            reason = "it holds other objects"
        raise ValueError(
            f"{path} is no dict of tensors ({reason[:200]}): objects could run code and are not read, write it as "
            'torch.save({"rollout_log_probs": tensor, …}, path)'
        ) from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}: expected a dict of tensors by name")
    if isinstance(content.get("batch"), Mapping):
        content = {**content, **content["batch"]}
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _of_numpy(path: Path) -> dict[str, Tensor]:
    """The arrays of an ``.npz`` file, as tensors."""
    try:
        import numpy as np
    except ModuleNotFoundError:
        raise ImportError(f"{path} needs numpy, which is not installed: pip install numpy") from None

    def tensor(array: Any) -> Tensor:
        if array.dtype.kind in "US":  # texts: each becomes its index among the distinct ones
            _, array = np.unique(array, return_inverse=True)
        return torch.from_numpy(array)

    try:
        # Opened here: numpy leaves a damaged file open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: tensor(file[name]) for name in file.files}
    except OSError:
        raise
    except Exception as problem:  # errors of zipfile, zlib and numpy for damage, and of numpy for objects
        raise ValueError(
            f"{path} is no .npz file of numbers ({problem}): objects could run code and are not read, write arrays"
        ) from None
