"""vLLM's server, whose processes get weights from the trainer's ranks directly; see ``--rollout-weight-transfer``."""

from __future__ import annotations

import contextlib
from typing import Any

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.streamed import INCOMPLETE, StreamedEngine
from megatron_rc.launch.engines.vllm_server import START, VllmServerEngine, development_mode
from megatron_rc.launch.engines.weight_stream import BACKEND

STREAMED_START = f"""{START} --load-format dummy --weight-transfer-config '{{"backend": "{BACKEND}"}}'"""


class VllmStreamedEngine(StreamedEngine, VllmServerEngine):
    """Samples as :class:`VllmServerEngine`; gets weights as :class:`StreamedEngine`, and stays paused after a failure.

    Args:
        once: client of the same server, which repeats no request that the server answered with an error.
    """

    def __init__(self, *args: Any, once: HttpClient, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.once, self._keeps = once, False

    def begin_update(self, version: int) -> None:
        """Pause the server and let it wait for weights; see :meth:`StreamedEngine.begin_update`."""
        self._make_ready()
        with development_mode():
            self._keeps = self._pause()
            if self.version >= 0:
                self._check_is_same()
            elif self._held_version() == INCOMPLETE:
                self._end_unfinished()
            self._given = version
            self._name_version(INCOMPLETE)
            self.once.call("POST", "/start_weight_update")

    def end_update(self) -> None:
        """Let the server sample from the new weights.

        Raises:
            EngineError: the server is absent, or not all of its layers took weights.
        """
        self.once.call("POST", "/finish_weight_update")
        with development_mode():
            self._resume(self._given, self._keeps)
        self.version = self._given

    def _check_version(self, asked: int) -> None:
        held = self._held_version()
        if held != INCOMPLETE:  # by an update that has begun since the batch ended
            self._held(asked).read(held, self.client.url)

    def _held_version(self) -> Any:
        return self._field(self.client.json("GET", "/weight_info"), "weight_version")

    def _end_unfinished(self) -> None:
        """End the update that another trainer began; the server refuses, if the update has failed in the server too."""
        with contextlib.suppress(EngineError):
            self.once.call("POST", "/finish_weight_update")

    def _check_settings(self, settings: Any) -> None:
        super()._check_settings(settings)
        found = settings.get("weight_transfer_config") or {}
        if found.get("backend") != BACKEND:
            raise EngineError(
                f"{self.client.url} takes no weights from --rollout-weight-transfer: install megatron_rc beside vLLM, "
                f"and start it as {STREAMED_START}"
            )
