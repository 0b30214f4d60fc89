"""SGLang's server, whose processes get weights from the trainer's ranks directly; see ``--rollout-weight-transfer``.

Start it with ``python -m sglang.launch_server --model-path <directory> --load-format dummy
--enable-deterministic-inference``.
"""

from __future__ import annotations

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.sglang_server import SglangServerEngine
from megatron_rc.launch.engines.streamed import INCOMPLETE, StreamedEngine


class SglangStreamedEngine(StreamedEngine, SglangServerEngine):
    """Samples as :class:`SglangServerEngine`; gets weights as :class:`StreamedEngine`.

    SGLang takes weights at any time, so there is nothing to begin or to end but the name of their version.
    """

    def begin_update(self, version: int) -> None:
        """Name the server's weights incomplete; see :meth:`StreamedEngine.begin_update`."""
        self._make_ready()
        if self.version >= 0:
            self._check_is_same()
        self._given = version
        self._name_version(INCOMPLETE)

    def end_update(self) -> None:
        """Clear the cache of prefixes, and name the version of the new weights.

        Raises:
            EngineError: the server is absent, or requests are under way.
        """
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
