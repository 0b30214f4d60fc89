"""Base of the servers that get weights from the trainer's ranks directly; see ``--rollout-weight-transfer``."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import torch

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.weight_versions import RestartedError

INCOMPLETE = "incomplete"  # version of a server's weights during an update


class StreamedEngine(ServerEngine):
    """A server to which every sender sends its part between ``begin_update`` and ``end_update``.

    If a sender fails, the server names its weights incomplete, so that nobody trains on a mixture. The next
    :meth:`begin_update`, perhaps of another trainer, replaces them.

    Args:
        dtype: number format of the weights that senders send.
    """

    def __init__(self, *args: Any, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.dtype = dtype

    @abstractmethod
    def begin_update(self, version: int) -> None:
        """Let the server expect weights; the first time, write their config and wait for the server.

        Raises:
            EngineError: the server is absent or unfit.
        """

    @abstractmethod
    def end_update(self) -> None:
        """Let the server sample from the new weights; raises EngineError if it does not."""

    def _make_ready(self) -> None:
        """The first time, write the weights' config, and wait for a fit server."""
        if not self._is_checked:
            self.directory.write_config(self.dtype)
            self.client.wait_until_ready("/health", self.start_timeout)
            self._check_server()
            self._is_checked = True

    def _check_is_same(self) -> None:
        """Check that the server was not started again: it would not know the senders."""
        try:
            self._check_version(self.version)
        except RestartedError as loss:
            self._give_again(loss, self.restarts)

    def _give_again(self, loss: RestartedError, restarts: int) -> NoReturn:
        raise EngineError(
            f"{loss}: start the run again (torchrun's --max-restarts does), or give --rollout-weight-transfer files, "
            "from which a server that was started again gets its weights again"
        ) from loss
