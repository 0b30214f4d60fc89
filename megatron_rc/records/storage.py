"""Tensors and what belongs to them in one file: safetensors, with JSON in its header. Nothing in it can run code."""

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

_KEY = "megatron_rc"  # of the JSON in the metadata of a safetensors file


def write_file(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a file that is either all there or not there at all.

    Args:
        path: of the file; one that is there is replaced. Its folder must exist.
        tensors: anything safetensors has; they are copied to the host.
        header: what goes into the file as JSON.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be written; what stood there before is untouched.
    """
    _need_safetensors()
    from safetensors.torch import save_file

    # Copies: two tensors that share memory are refused by safetensors.
    copies = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }
    with replacing(path) as temporary:
        save_file(copies, temporary, metadata={_KEY: json.dumps(header)})


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path``, which takes its place when the block ends well, and is removed otherwise.

    A link stays: the file that it leads to is the one that is replaced.

    Raises:
        OSError: ``path`` is a folder, a device or a pipe, or stands in a folder that does not exist.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: expected the name of a file to write")
    if path.exists() and not path.is_file():  # root would put a file in the place of /dev/null
        raise OSError(f"{path} is a device or a pipe: expected the name of a file to write")
    path = Path(os.path.realpath(path))  # unlike resolve(), no RuntimeError for links that lead round in a circle
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist, create it first")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, on the host, and the header of a file of :func:`write_file`.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no such file.
        ValueError: it is cut off, damaged, or no file of ours.
    """
    _need_safetensors()
    from safetensors import SafetensorError, safe_open

    path = existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Clones: what safetensors hands out is the file in memory, which another process may cut off.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"{path} is cut off, damaged or no safetensors file ({problem}): write it again") from problem
    if _KEY not in metadata:
        raise ValueError(f"{path} has tensors but no header of ours: expected a file that save_rollouts wrote")
    try:
        header = json.loads(metadata[_KEY])
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"the header of {path} is no JSON ({problem}): the file is damaged, write it again") from None
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path} is a {type(header).__name__}: expected a JSON object")
    return tensors, header


def existing(path: str | os.PathLike[str]) -> Path:
    """The path, if a file is there.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is {'a folder' if path.is_dir() else 'missing'}: expected a file of rollouts")
    return path


def _need_safetensors() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ModuleNotFoundError as problem:
        raise ImportError(
            f"files of rollouts need {problem.name}, which is not installed: pip install safetensors"
        ) from problem
