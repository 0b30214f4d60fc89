"""Ways in which a server gets the trainer's weights: from files, or from the trainer's ranks directly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.server_client import ServerClient


class Publisher(ABC):
    """The way in which one server gets weights: prepare, then begin and end while the server is paused.

    Args:
        directory: the server's model, which belongs to this engine alone; its config lets a user start the server.

    Attributes:
        can_repeat: whether a server that was started again can get the newest weights without the trainer.
    """

    can_repeat = False

    def __init__(self, directory: ModelDirectory) -> None:
        self.directory = directory

    @abstractmethod
    def prepare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Do the work before the pause, the first time also before the wait for the server; EngineError if it fails."""

    @abstractmethod
    def begin(self, client: ServerClient, version: int, *, is_first: bool) -> None:
        """Let the paused server take the weights; see :meth:`ServerClient.begin_update` for ``is_first``."""

    @abstractmethod
    def end(self, client: ServerClient) -> None:
        """Let the server end the update; EngineError if not all of its layers took weights."""


class FilePublisher(Publisher):
    """Weights through files, which the server reads under the same path."""

    can_repeat = True

    def prepare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write the files; ValueError or EngineError as :meth:`ModelDirectory.write`."""
        self.directory.write(weights)

    def begin(self, client: ServerClient, version: int, *, is_first: bool) -> None:
        """Let the server read the files; it answers when it has."""
        client.read_files(str(self.directory.path), version)

    def end(self, client: ServerClient) -> None:
        """Do nothing: the server has answered that it has read the files."""


class StreamPublisher(Publisher):
    """Weights from the trainer's ranks, each of which sends its part between ``begin`` and ``end``.

    :mod:`weight_sender` sends the parts, through process groups or through memory. If a sender fails, the server names
    its weights incomplete, so that nobody trains on a mixture; the next update, perhaps of another trainer, replaces
    them. ``dtype``: dtype of the weights that are sent, for the model's config.
    """

    def __init__(self, directory: ModelDirectory, dtype: torch.dtype) -> None:
        super().__init__(directory)
        self.dtype = dtype
        self._is_described = False

    def prepare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write the model's config the first time; there are no weights to write."""
        if not self._is_described:
            self.directory.write_config(self.dtype)
            self._is_described = True

    def begin(self, client: ServerClient, version: int, *, is_first: bool) -> None:
        """Let the server expect weights of several senders."""
        client.begin_update(is_first=is_first)

    def end(self, client: ServerClient) -> None:
        """Let the server end the update; EngineError if not all of its layers took weights."""
        client.end_update()
