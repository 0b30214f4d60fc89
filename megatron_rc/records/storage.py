"""Tensors and a JSON header in one safetensors file, which cannot run code."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_KEY = "megatron_rc"  # the header's key in a safetensors file's metadata


def write_file(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a header to a file, which appears under its name when it is complete.

    Args:
        path: an existing file is replaced, or left as it is if writing fails.
        tensors: by name, on any device.
        header: values that JSON can hold.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be written, as in a folder that does not exist.
    """
    need_safetensors()
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Copies: safetensors refuses two tensors that share memory.
    copies = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }
    with replacing(path) as temporary:
        try:
            save_file(copies, temporary, metadata={_KEY: json.dumps(header)})
        except SafetensorError as problem:
            # Such as a full disk: callers expect OSError.
            raise OSError(f"cannot write {path}: {problem}") from problem


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path``, which replaces it if the block succeeds, and is removed otherwise.

    If ``path`` is a link, the file that it leads to is replaced. OSError if it is a folder, a device or a pipe, or its
    folder does not exist.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: expected the name of a file to write")
    if path.exists() and not path.is_file():  # root could replace /dev/null by a file
        raise OSError(f"{path} is a device or a pipe: expected the name of a file to write")
    path = Path(os.path.realpath(path))  # not resolve(), which raises RuntimeError for a circle of links
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist, create it first")
    # In the same folder, because a file can only be renamed inside one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        # All bytes must be on the disk before the name leads to them, or a crash could leave an empty file.
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors, to the host, and the header of a file that :func:`write_file` wrote.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no such file.
        ValueError: the file is cut off, damaged, or not one that :func:`write_file` wrote.
    """
    tensors, metadata = read_safetensors(path)
    if _KEY not in metadata:
        raise ValueError(f"{path} has tensors but no header of megatron_rc: expected a file that save_rollouts wrote")
    try:
        header = json.loads(metadata[_KEY])
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"the header of {path} is no JSON ({problem}): the file is damaged, write it again") from None
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path} is a {type(header).__name__}: expected a JSON object")
    return tensors, header


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors, to the host, and the metadata of any safetensors file; errors as in :func:`read_file`."""
    need_safetensors()
    from safetensors import SafetensorError, safe_open

    path = existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            # Clones: safetensors' own tensors map the file, which another process may cut off.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"{path} is cut off, damaged or no safetensors file ({problem}): write it again") from problem


def existing(path: str | os.PathLike[str]) -> Path:
    """Return the path if it is a file; else raise FileNotFoundError."""
    path = Path(path)
    if not path.is_file():
        problem = "a folder" if path.is_dir() else "missing"
        raise FileNotFoundError(f"{path} is {problem}: expected a file of rollouts")
    return path


def need_safetensors() -> None:
    """Raise ImportError, with the remedy, if safetensors or a package that it needs is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ModuleNotFoundError as problem:
        raise ImportError(
            f"files of rollouts need {problem.name}, which is not installed: pip install safetensors"
        ) from problem
