"""Base of the engines that are rollout servers: weights through a directory, samples through concurrent requests."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_asks
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.requests import Request
from megatron_rc.records.rollout import SamplingParams

TRIES = 3  # attempts of a batch, or of an update of weights, if a server is restarted meanwhile
_log = logging.getLogger("megatron_rc")


class RestartedError(EngineError):
    """A server was restarted and has lost its weights."""


class ServerEngine(ABC):
    """A :class:`RolloutEngine` behind HTTP.

    Weights are written to ``directory``, which belongs to this engine alone, and which the server reads under the same
    path. The first write comes before the wait for the server, so that a user can start the server on the directory.

    Args:
        client: client of the server.
        directory: directory of weights.
        eos_token_id: token that ends a response.
        concurrency: largest number of requests at a time.
        start_timeout: seconds to wait for the server's first answer.
        experts_shape: (layers, top_k) of the model, if samples must have the experts of their tokens.
        reports_support: whether truncated samples must have the tokens that were kept.

    Attributes:
        restarts: number of times that the server lost its weights, or was away during an update of weights.
    """

    is_elsewhere = True

    def __init__(
        self,
        client: HttpClient,
        directory: ModelDirectory,
        eos_token_id: int,
        concurrency: int = 64,
        start_timeout: float = 600.0,
        *,
        experts_shape: tuple[int, int] | None = None,
        reports_support: bool = False,
    ) -> None:
        self.client, self.directory, self.eos = client, directory, eos_token_id
        self.concurrency, self.start_timeout = concurrency, start_timeout
        self.experts_shape, self.reports_support = experts_shape, reports_support
        self.version, self.restarts = -1, 0
        # Whether the server knows the version of its weights, and forgets it at a restart.
        self._keeps_version = False
        self._is_checked = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights, let the server read them, and clear its prefix cache.

        After a failure the engine samples nothing until a later call succeeds, because the server may hold a mixture.

        Raises:
            ValueError: wrong weights; see :meth:`ModelDirectory.write`.
            EngineError: the server is absent, unfit, or did not take the weights.
        """
        self.version = -1
        path = str(self.directory.write(weights))
        if not self._is_checked:
            self.client.wait_until_ready("/health", self.start_timeout)
            self._check_server()
            self._is_checked = True
        self._update(path, version)
        self.version = version

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample one response for each prompt, in their order; see :class:`RolloutEngine`.

        A server that is restarted meanwhile gets its weights again, and samples the whole batch again.

        Raises:
            ValueError: a prompt is empty.
            EngineError: the server failed, or an answer must not be trained on.
        """
        if self.version < 0:
            raise EngineError(f"{self.client.url} holds no weights of this trainer: call load_weights first")
        asks = make_asks(prompts, params, max_new_tokens, seed, self.eos)
        if self.experts_shape or self.reports_support:
            asks = [replace(ask, kilobytes=16) for ask in asks]
        requests = [self._request(ask) for ask in asks]
        self._check_params(asks)
        for left in reversed(range(TRIES)):
            absences = self.client.absences
            try:
                samples = self.client.read_all(
                    requests, lambda index, answer: self._read(asks[index], answer), self.concurrency
                )
                if self._keeps_version:
                    self._check_version()
                elif self.client.absences > absences:
                    self._check_held(None)  # the server may have been restarted
                return samples
            except RestartedError as error:
                if not left:
                    raise
                self.restarts += 1
                _log.warning("%s: it gets them again, and the batch is sampled again", error)
                self._check_server()
                self._update(str(self.directory.path), self.version)
        raise AssertionError("the last try returns or raises")

    def wants_support(self, ask: Ask) -> bool:
        """Whether a response must have its kept tokens; a greedy one, for an evaluation, need not."""
        return self.reports_support and ask.params.is_truncated and ask.params.top_k != 1

    def _update(self, path: str, version: int) -> None:
        """Let the server read the weights; again from the beginning if the server was away meanwhile."""
        for _ in range(TRIES):
            absences = self.client.absences
            self._swap(path, version)
            if self.client.absences == absences:
                return
            self.restarts += 1
        raise EngineError(f"{self.client.url} went away in each of {TRIES} updates of its weights: see its log")

    def _check_held(self, held: Any) -> None:
        """Raise EngineError if the server names another version than its last update's, RestartedError if none."""
        if held == str(self.version):
            return
        if isinstance(held, str) and held.isdecimal():
            raise EngineError(
                f"{self.client.url} holds weights {held}, expected {self.version}: does another program update them?"
            )
        raise RestartedError(f"{self.client.url} lost the weights of step {self.version}, probably in a restart")

    @abstractmethod
    def _check_server(self) -> None:
        """Check that this is the right kind of server, with the right settings."""

    @abstractmethod
    def _swap(self, path: str, version: int) -> None:
        """Let the server read the weights at ``path`` and clear its prefix cache."""

    @abstractmethod
    def _check_params(self, asks: Sequence[Ask]) -> None:
        """Refuse parameters for which the server's log-probs are not those of the sampled distribution."""

    @abstractmethod
    def _check_version(self) -> None:
        """After a batch, check the version of a server that keeps it; see :meth:`_check_held`."""

    @abstractmethod
    def _request(self, ask: Ask) -> Request:
        """HTTP request for one response."""

    @abstractmethod
    def _read(self, ask: Ask, answer: Any) -> Sample:
        """Read and check the response in an answer."""

    def _field(self, answer: Any, *keys: str | int) -> Any:
        """``answer[keys[0]][keys[1]]...``; an absent key is an error."""
        value = answer
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError) as error:
                path = ".".join(map(str, keys))
                raise EngineError(
                    f"{self.client.url} answered without {path}: is this the right server, in a supported version?"
                ) from error
        return value
