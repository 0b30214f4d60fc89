"""Ways in which a server gets the trainer's weights: from files, or from the trainer's ranks directly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.server_client import ServerClient


class Publisher(Protocol):
    """One update of a server's weights, between its pause and its resumption.

    Attributes:
        can_repeat: whether a server that was started again can get the newest weights without the trainer.
    """

    can_repeat: bool

    def prepare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Do the work before the server is paused; the first time also before the wait for the server."""

    def begin(self, client: ServerClient, version: int, *, is_first: bool) -> None:
        """Let the paused server take the weights; see :meth:`ServerClient.begin_update` for ``is_first``."""

    def end(self, client: ServerClient) -> None:
        """Let the server end the update, before it is resumed."""


class FilePublisher:
    """Weights through files, which the server reads under the same path; ``directory`` is this engine's alone.

    The first write comes before the wait for the server, so that a user can start the server on the directory.
    """

    can_repeat = True

    def __init__(self, directory: ModelDirectory) -> None:
        self.directory = directory

    def prepare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write the files; ValueError or EngineError as :meth:`ModelDirectory.write`."""
        self.directory.write(weights)

    def begin(self, client: ServerClient, version: int, *, is_first: bool) -> None:
        """Let the server read the files."""
        client.read_files(str(self.directory.path), version)

    def end(self, client: ServerClient) -> None:
        """Do nothing: the server has answered when it had read the files."""


class StreamPublisher:
    """Weights from the trainer's ranks, each of which sends its part between ``begin`` and ``end``.

    :mod:`weight_sender` sends the parts, through process groups or through memory. If a sender fails, the server names
    its weights incomplete, so that nobody trains on a mixture; the next update, perhaps of another trainer, replaces
    them. ``directory`` gets the model's config with the ``dtype`` of the weights, for a user who starts the server.
    """

    can_repeat = False

    def __init__(self, directory: ModelDirectory, dtype: torch.dtype) -> None:
        self.directory = directory
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
