"""What rollout servers have in common: weights through a directory, samples through concurrent requests."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_asks
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.requests import Request
from megatron_rc.records.rollout import SamplingParams

TRIES = 3  # of a batch, or of a hand-over of weights, in which a server is restarted
_log = logging.getLogger("megatron_rc")


class RestartedError(EngineError):
    """A server lost the weights that it was given: it was started again."""


class ServerEngine(ABC):
    """A :class:`RolloutEngine` on the other side of HTTP.

    Weights are written to ``directory``, which the server reads under the same path. The first write comes before the
    server is waited for, so that it can be started on that directory.

    Args:
        client: to the server.
        directory: for the weights, on a file system that both see; one engine each.
        eos_token_id: ends a response.
        concurrency: requests under way at once.
        start_timeout: seconds to wait for a server that does not answer yet.

    Attributes:
        restarts: how often it lost its weights, or was away while it got them, and got them again.
    """

    is_elsewhere = True

    def __init__(
        self,
        client: HttpClient,
        directory: ModelDirectory,
        eos_token_id: int,
        concurrency: int = 64,
        start_timeout: float = 600.0,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: expected at least 1")
        self.client, self.directory, self.eos = client, directory, eos_token_id
        self.concurrency, self.start_timeout = concurrency, start_timeout
        self.version, self.restarts = -1, 0
        self._met = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights, let the server read them, and drop what it computed with the old ones.

        After a failure nothing is sampled until another call succeeds: the server may hold a mixture. vLLM then stays
        paused.

        Raises:
            ValueError: wrong weights; see :meth:`ModelDirectory.write`.
            EngineError: the server is not there, cannot be used, or did not take the weights over.
        """
        self.version = -1
        path = str(self.directory.write(weights))
        if not self._met:
            self.client.wait_until_ready("/health", self.start_timeout)
            self._meet()
            self._met = True
        self._hand_over(path, version)
        self.version = version

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """One response for each prompt, in their order; see :class:`RolloutEngine`.

        A server that is restarted meanwhile gets its weights again, and samples all of them anew.

        Raises:
            ValueError: prompts or parameters that no engine takes.
            EngineError: the server failed, or an answer cannot be trained on.
        """
        if self.version < 0:
            raise EngineError(f"{self.client.url} holds no weights of this trainer: call load_weights first")
        asks = make_asks(prompts, params, max_new_tokens, seed, self.eos)
        self._check_params(asks)
        for left in reversed(range(TRIES)):
            absences = self.client.absences
            try:
                samples = self._sample(asks)
                self._check_version(was_away=self.client.absences > absences)
                return samples
            except RestartedError as error:
                if not left:
                    raise
                self.restarts += 1
                _log.warning("%s: it gets them again, and the batch is sampled again", error)
                self._meet()
                self._hand_over(str(self.directory.path), self.version)
        raise AssertionError("the last try returns or raises")

    def _sample(self, asks: Sequence[Ask]) -> list[Sample]:
        requests = [self._request(ask) for ask in asks]
        return self.client.read_all(requests, lambda index, answer: self._read(asks[index], answer), self.concurrency)

    def _hand_over(self, path: str, version: int) -> None:
        """Have the server take the weights over; again from the beginning where it was away meanwhile."""
        for _ in range(TRIES):
            absences = self.client.absences
            self._swap(path, version)
            if self.client.absences == absences:
                return
            self.restarts += 1
        raise EngineError(f"{self.client.url} went away in each of {TRIES} hand-overs of weights: see its log")

    def _check_held(self, held: Any, where: str) -> None:
        """Whether the weights that a server says it holds are those that it was given."""
        if held == str(self.version):
            return
        if isinstance(held, str) and held.isdecimal():
            raise EngineError(f"{where} holds weights {held}, expected {self.version}: who else updates it?")
        raise RestartedError(f"{where} lost the weights of step {self.version}, as a server does that is restarted")

    @abstractmethod
    def _meet(self) -> None:
        """Check once that the server is the right one."""

    @abstractmethod
    def _swap(self, path: str, version: int) -> None:
        """Have the server read the weights at ``path``, and drop its prefix cache."""

    @abstractmethod
    def _check_params(self, asks: Sequence[Ask]) -> None:
        """Refuse what the server cannot sample with the log-probs of the sampled distribution."""

    @abstractmethod
    def _check_version(self, was_away: bool) -> None:
        """Refuse samples of a server that does not hold the weights of ``version`` any more.

        Args:
            was_away: it could not be reached for a moment, while the batch was sampled.

        Raises:
            RestartedError: it was started again.
            EngineError: it holds others.
        """

    @abstractmethod
    def _request(self, ask: Ask) -> Request:
        """What asks the server for one response."""

    @abstractmethod
    def _read(self, ask: Ask, answer: Any) -> Sample:
        """The response in an answer, checked."""

    def _field(self, answer: Any, *keys: str | int) -> Any:
        """``answer[keys[0]][keys[1]]...``, or an error that says which of them is absent."""
        value = answer
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError) as error:
                path = ".".join(map(str, keys))
                raise EngineError(
                    f"{self.client.url} answered without {path}: is this the server, and the version, that was meant?"
                ) from error
        return value
