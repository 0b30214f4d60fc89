"""Requests that an engine makes of a rollout server; :mod:`vllm_client` and :mod:`sglang_client` have their words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.requests import Request
from megatron_rc.launch.engines.weight_versions import VersionRange

INCOMPLETE = "incomplete"  # version of a server's weights while the trainer's ranks send new ones


class ServerClient(ABC):
    """Health, version, pause, resume and samples of one server, and the ways in which it takes weights.

    Every method raises EngineError if the server does not answer, refuses, or answers what cannot be used.

    Args:
        http: client of the server's address.
        experts_shape: (layers, top_k) of the model, if samples must have the experts of their tokens.
        reports_support: whether truncated samples must have the tokens that were kept.

    Attributes:
        keeps_version: whether the server names the version of its weights, and forgets it at a restart.
        versions_in_answers: whether each answer names the version of the weights, so that no request need ask for it.
    """

    keeps_version = True
    versions_in_answers = False

    def __init__(
        self,
        http: HttpClient,
        *,
        experts_shape: tuple[int, int] | None = None,
        reports_support: bool = False,
    ) -> None:
        self.http = http
        self.url = http.url
        self.experts_shape = experts_shape
        self.reports_support = reports_support

    @abstractmethod
    def health(self) -> None:
        """Check that this is the right kind of server, with the right settings."""

    @abstractmethod
    def version(self) -> Any:
        """Version of the weights, as the server names it."""

    @abstractmethod
    def pause(self, *, keeps_responses: bool) -> None:
        """Let the server sample nothing; responses under way wait for new weights if they are kept, else they end."""

    @abstractmethod
    def resume(self, version: int, *, keeps_responses: bool) -> None:
        """Clear the cache of prefixes, name the version of the new weights, and let the server sample."""

    @abstractmethod
    def request(self, ask: Ask) -> Request:
        """HTTP request for one response; refuses parameters that would give log-probs of another distribution."""

    @abstractmethod
    def read(self, ask: Ask, answer: Any, versions: VersionRange) -> Sample:
        """Read and check the response in an answer, from a server that can hold these versions of weights."""

    @abstractmethod
    def read_files(self, path: str, version: int) -> None:
        """Let the server read the weights in a folder; between :meth:`pause` and :meth:`resume`."""

    @abstractmethod
    def begin_update(self, *, is_first: bool) -> None:
        """Name the weights incomplete, and let the server take new ones from the trainer's ranks.

        ``is_first``: this trainer has not updated the server yet, so that another trainer's update may be open.
        """

    @abstractmethod
    def end_update(self) -> None:
        """End what :meth:`begin_update` began."""

    def wants_support(self, ask: Ask) -> bool:
        """Whether a response must have its kept tokens; a greedy one, for an evaluation, need not."""
        return self.reports_support and ask.params.is_truncated and ask.params.top_k != 1

    def field(self, answer: Any, *keys: str | int) -> Any:
        """``answer[keys[0]][keys[1]]...``; an absent key is an EngineError."""
        value = answer
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError) as error:
                path = ".".join(map(str, keys))
                raise EngineError(
                    f"{self.url} answered without {path}: is this the right server, in a supported version?"
                ) from error
        return value
