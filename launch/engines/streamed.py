"""Servers that get weights from the trainer's ranks directly; see ``--rollout-weight-transfer``."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any, NoReturn

import torch

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.sglang_server import SglangServerEngine
from megatron_rc.launch.engines.vllm_server import START, VllmServerEngine, development_mode
from megatron_rc.launch.engines.weight_stream import BACKEND
from megatron_rc.launch.engines.weight_versions import RestartedError

INCOMPLETE = "incomplete"  # version of a server's weights during an update
STREAMED_START = f"""{START} --load-format dummy --weight-transfer-config '{{"backend": "{BACKEND}"}}'"""


class StreamedEngine(ServerEngine):
    """A server to which every sender sends its part between ``begin_update`` and ``end_update``.

    If a sender fails, the server names its weights incomplete, so that nobody trains on a mixture. The next
    :meth:`begin_update`, perhaps of another trainer, replaces them. ``dtype``: the dtype of the weights that are sent.
    """

    def __init__(self, *args: Any, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.dtype = dtype

    def begin_update(self, version: int) -> None:
        """Let the server expect weights; the first time, write their config and wait for the server.

        Raises EngineError if it is absent or unfit, or was started again: it would not know the senders.
        """
        if not self._is_checked:
            self.directory.write_config(self.dtype)
            self._wait_for_server()
        if self.version >= 0:
            try:
                self._check_version(self.version)
            except RestartedError as loss:
                self._give_again(loss, self.restarts)
        self._given = version
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Name the server's weights incomplete, and let it take new ones."""

    @abstractmethod
    def end_update(self) -> None:
        """Let the server sample from the new weights; EngineError if it does not."""

    def _give_again(self, loss: RestartedError, restarts: int) -> NoReturn:
        raise EngineError(
            f"{loss}: start the run again (torchrun's --max-restarts does), or give --rollout-weight-transfer files, "
            "from which a server that was started again gets its weights again"
        ) from loss


class VllmStreamedEngine(StreamedEngine, VllmServerEngine):
    """Samples as :class:`VllmServerEngine`; gets weights as :class:`StreamedEngine`; stays paused after a failure."""

    def __init__(self, *args: Any, once: HttpClient, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.once = once  # client of the same server, which repeats no request that the server answered with an error
        self._keeps = False

    def _begin(self) -> None:
        with development_mode():
            self._keeps = self._pause()
            if self.version < 0 and self._held_version() == INCOMPLETE:
                # End the update of another trainer; the server refuses, if the update has failed in the server too.
                with contextlib.suppress(EngineError):
                    self.once.call("POST", "/finish_weight_update")
            self._name_version(INCOMPLETE)
            self.once.call("POST", "/start_weight_update")

    def end_update(self) -> None:
        """Let the server sample from the new weights; EngineError if not all of its layers took weights."""
        self.once.call("POST", "/finish_weight_update")
        with development_mode():
            self._resume(self._given, self._keeps)
        self.version = self._given

    def _check_version(self, asked: int) -> None:
        held = self._held_version()
        if held != INCOMPLETE:  # by an update that has begun since the batch ended
            self._held(asked).read(held, self.client.url)

    def _check_settings(self, settings: Any) -> None:
        super()._check_settings(settings)
        found = settings.get("weight_transfer_config") or {}
        if found.get("backend") != BACKEND:
            raise EngineError(
                f"{self.client.url} takes no weights from --rollout-weight-transfer: install megatron_rc beside vLLM, "
                f"and start it as {STREAMED_START}"
            )


class SglangStreamedEngine(StreamedEngine, SglangServerEngine):
    """Samples as :class:`SglangServerEngine`; gets weights as :class:`StreamedEngine`.

    SGLang takes weights at any time, so an update begins and ends with the name of their version. Start it with
    ``python -m sglang.launch_server --model-path <directory> --host 127.0.0.1 --load-format dummy
    --enable-deterministic-inference``.
    """

    def _begin(self) -> None:
        self._name_version(INCOMPLETE)

    def end_update(self) -> None:
        """Clear the cache of prefixes, and name the version; EngineError if requests are under way."""
        self.client.call("POST", "/flush_cache")  # answers 400 if it could not
        self._name_version(str(self._given))
        self.version, self._keeps_version = self._given, True

    def _name_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        self.client.call("POST", "/update_weight_version", body)

    def _check_server(self) -> None:
        super()._check_server()
        stages = self._field(self.client.json("GET", "/get_server_info"), "pp_size")
        if stages != 1:
            raise EngineError(
                f"{self.client.url} has {stages} pipeline stages, which SGLang's groups for weights do not number: "
                "start it without --pp-size, or give --rollout-weight-transfer files"
            )

    def _check_version(self, asked: int) -> None:
        held = self._field(self.client.json("GET", "/get_model_info"), "weight_version")
        self._held(asked).read(held, self.client.url)
