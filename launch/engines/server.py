"""Base of the engines that are rollout servers: weights through a directory, samples through concurrent requests."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_rc.launch.engines import EngineError, Progress, Sample
from megatron_rc.launch.engines.answers import Ask, make_asks
from megatron_rc.launch.engines.http_client import HttpClient, Slot
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.open_addresses import warning_of_open_addresses
from megatron_rc.launch.engines.requests import Request, RequestLimit
from megatron_rc.launch.engines.weight_versions import RestartedError, VersionRange
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams

TRIES = 3  # attempts of a batch, or of an update of weights, if a server is restarted meanwhile
_log = logging.getLogger("megatron_rc")


class OpenSamples:
    """Number of versions of weights that a response under way may have; ``sampling`` is entered on any thread."""

    def __init__(self) -> None:
        self._updates = self._drained = 0
        self._begun: list[int] = []  # number of updates before each response under way

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Context of a response under way."""
        begun = self._updates
        self._begun.append(begun)
        try:
            yield
        finally:
            self._begun.remove(begun)

    @property
    def versions(self) -> int:
        """Upper bound of the versions within a response under way; 1 if there is none."""
        begun = min(tuple(self._begun), default=self._updates)
        return 1 + self._updates - max(begun, self._drained)

    def updated(self, *, went_on: bool) -> None:
        """Count an update, after it; ``went_on``: responses under way go on under the new weights."""
        self._updates += 1
        if not went_on:
            self._drained = self._updates


class ServerEngine(ABC):
    """A :class:`RolloutEngine` behind HTTP.

    Weights are written to ``directory``, which belongs to this engine alone, and which the server reads under the same
    path. The first write comes before the wait for the server, so that a user can start the server on the directory.

    Args:
        ends: what ends a response.
        concurrency: largest number of requests at a time, of all rollout batches together.
        start_timeout: seconds to wait for the server's first answer.
        experts_shape: (layers, top_k) of the model, if samples must have the experts of their tokens.
        reports_support: whether truncated samples must have the tokens that were kept.
        partial_rollouts: whether :meth:`sample` may be under way, on another thread, during :meth:`load_weights`.

    Attributes:
        restarts: number of times that the server lost its weights, or was away during an update of weights.
    """

    is_elsewhere = True
    _keeps_version = True  # whether the server names the version of its weights, and forgets it at a restart

    def __init__(
        self,
        client: HttpClient,
        directory: ModelDirectory,
        ends: ResponseEnds,
        concurrency: int = 64,
        start_timeout: float = 600.0,
        *,
        experts_shape: tuple[int, int] | None = None,
        reports_support: bool = False,
        partial_rollouts: bool = False,
    ) -> None:
        self.client, self.directory, self.ends = client, directory, ends
        self.concurrency, self.start_timeout = concurrency, start_timeout
        self._of_rollouts = RequestLimit(concurrency)
        self.experts_shape, self.reports_support = experts_shape, reports_support
        self.partial_rollouts, self.open_samples = partial_rollouts, OpenSamples()
        self.version, self.restarts, self._is_checked = -1, 0, False
        self._given = -1  # version of the newest update, also of one that is under way
        self._updating = threading.Lock()  # held by an update: after a restart the sampling thread makes one too

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights, let the server read them, and clear its prefix cache.

        After a failure, a ValueError of :meth:`ModelDirectory.write` or an EngineError, the engine samples nothing
        until a later call succeeds, because the server may hold a mixture.
        """
        with self._updating:
            try:
                path = str(self.directory.write(weights))
                self._wait_for_server()
                self._given = version
                self._update(path, version)
            except BaseException:  # an interrupt too
                self.version = -1
                raise
            self.version = version

    def _wait_for_server(self) -> None:
        """The first time, wait for the server and check it; warn if other machines may reach it."""
        if not self._is_checked:
            self.client.wait_until_ready("/health", self.start_timeout)
            self._check_server()
            warning = warning_of_open_addresses(self.client.url)
            if warning is not None:
                _log.warning(warning)
            self._is_checked = True

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_new_tokens: int,
        seed: int,
        progress: Progress | None = None,
    ) -> list[Sample]:
        """Sample one response for each prompt, in their order; see :class:`RolloutEngine`.

        A server that is restarted meanwhile gets its weights again, and samples again: with ``progress`` the responses
        that are not there yet, because each of them has its versions, without it all. Calls with ``progress`` share
        ``concurrency``; a call without it, for a check or an evaluation, does not wait for them.
        """
        version = self.version
        if version < 0:
            raise EngineError(f"{self.client.url} holds no weights of this trainer: call load_weights first")
        asks = make_asks(prompts, params, max_new_tokens, seed, self.ends)
        kilobytes = 16 if self.experts_shape or self.reports_support else 1
        asks = [replace(ask, kilobytes=kilobytes, version=version) for ask in asks]
        self._check_params(asks)
        for _ in range(TRIES - 1):
            restarts = self.restarts
            try:
                return self._sample_once(asks, version, progress)
            except RestartedError as error:
                self._give_again(error, restarts)
        return self._sample_once(asks, version, progress)

    def _sample_once(self, asks: Sequence[Ask], version: int, progress: Progress | None) -> list[Sample]:
        """Responses to all requests, made when the server held ``version``; RestartedError if it lost its weights."""
        absences = self.client.absences
        limit = RequestLimit(self.concurrency) if progress is None else self._of_rollouts
        samples = {} if progress is None else progress.samples
        missing = [ask for ask in asks if ask.index not in samples]

        def read(place: int, answer: Any) -> None:
            samples[missing[place].index] = self._read(missing[place], answer)

        slot = self._slot(limit, 0 if progress is None else progress.batch)
        self.client.read_all([self._request(ask) for ask in missing], read, self.concurrency, slot)
        self._check_version(version)
        if self.client.absences > absences and not self._keeps_version:
            raise RestartedError(f"{self.client.url} was away, and may have lost the weights of step {version}")
        return [samples[ask.index] for ask in asks]

    def _slot(self, limit: RequestLimit, order: int) -> Slot:
        """Context of each request: within the limit, and counted as a response under way."""

        @asynccontextmanager
        async def slot() -> AsyncIterator[None]:
            async with limit.slot(order):
                with self.open_samples.sampling():
                    yield

        return slot

    def _give_again(self, loss: RestartedError, restarts: int) -> None:
        """Give a restarted server its weights, unless another thread has, since there were ``restarts``.

        Raises ``loss`` if an update by the trainer has failed meanwhile.
        """
        with self._updating:
            if self.version < 0:
                raise loss
            if self.restarts > restarts:
                return
            _log.warning("%s: it gets them again, and the missing responses are sampled again", loss)
            self._check_server()
            self._update(str(self.directory.path), self.version)
            self.restarts += 1

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

    def _held(self, asked: int) -> VersionRange:
        """Versions that a server can hold that held ``asked`` when it got a request."""
        return VersionRange(asked, self._given)

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
    def _check_version(self, asked: int) -> None:
        """After a batch, check the version of a server that held ``asked`` before the batch."""

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
