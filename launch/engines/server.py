"""A rollout server as the engine: samples through concurrent requests, and weights by a publisher."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_rc.launch.engines import EngineError, Progress, Sample
from megatron_rc.launch.engines.answers import Ask, make_asks
from megatron_rc.launch.engines.http_client import Slot
from megatron_rc.launch.engines.open_addresses import warning_of_open_addresses
from megatron_rc.launch.engines.publishers import Publisher
from megatron_rc.launch.engines.requests import RequestLimit
from megatron_rc.launch.engines.server_client import INCOMPLETE, ServerClient
from megatron_rc.launch.engines.weight_versions import RestartedError, VersionRange
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams

TRIES = 3  # attempts of a batch, or of an update of weights, if a server is restarted meanwhile
_log = logging.getLogger("megatron_rc")


class OpenSamples:
    """Number of versions of weights that a response under way may have; ``sampling`` is entered on any thread."""

    def __init__(self) -> None:
        self._updates = 0
        self._drained = 0  # number of updates until the last one that waited for all responses
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


class ServerEngine:
    """A :class:`RolloutEngine` behind HTTP: a client that knows the server's words, and a publisher of weights.

    An update has the same steps for all: prepare, pause, publish, resume. After a failure the server stays paused and
    the engine samples nothing until a later update succeeds, because the server may hold a mixture.

    Args:
        ends: what ends a response.
        concurrency: largest number of requests at a time, of all rollout batches together.
        start_timeout: seconds to wait for the server's first answer.
        partial_rollouts: whether :meth:`sample` may be under way, on another thread, during an update: then responses
            wait for the new weights, which read their tokens again.
        max_versions: largest number of versions of weights within a response: an update that would exceed it waits for
            the responses under way; None: no bound.

    Attributes:
        version: version of the server's weights; -1: it has none of this trainer.
        restarts: number of times that the server lost its weights, or was away during an update of weights.
    """

    is_elsewhere = True

    def __init__(
        self,
        client: ServerClient,
        publisher: Publisher,
        ends: ResponseEnds,
        concurrency: int = 64,
        start_timeout: float = 600.0,
        *,
        partial_rollouts: bool = False,
        max_versions: int | None = None,
    ) -> None:
        self.client = client
        self.publisher = publisher
        self.ends = ends
        self.concurrency = concurrency
        self.start_timeout = start_timeout
        self.partial_rollouts = partial_rollouts
        self.max_versions = max_versions
        self.open_samples = OpenSamples()
        self.version = -1
        self.restarts = 0
        self._limit_of_rollouts = RequestLimit(concurrency)
        self._is_checked = False
        self._given = -1  # version of the newest update, also of one that is under way
        self._is_incomplete = False  # the trainer's ranks are sending weights
        self._keeps_responses = False  # in the update under way
        self._updating = threading.Lock()  # held by an update: after a restart the sampling thread makes one too

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give the server weights from files; ValueError or EngineError if that fails."""
        with self._updating:
            try:
                self.publisher.prepare(weights)
                self._wait_for_server()
                self._update(version)
            except BaseException:  # an interrupt too
                self.version = -1
                raise

    def begin_update(self, version: int) -> None:
        """Let the server expect weights of the trainer's ranks.

        Raises EngineError if it is absent or unfit, or was started again: it would not know the senders.
        """
        self.publisher.prepare(())
        self._wait_for_server()
        if self.version >= 0:
            try:
                self._check_version(self.version)
            except RestartedError as loss:
                self._give_again(loss, self.restarts)
        self._is_incomplete = True
        self._begin(version)

    def end_update(self) -> None:
        """Let the server sample from the new weights; EngineError if it does not."""
        self._end()
        self._is_incomplete = False

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
        has_long_answers = self.client.experts_shape is not None or self.client.reports_support
        kilobytes = 16 if has_long_answers else 1
        asks = make_asks(prompts, params, max_new_tokens, seed, self.ends)
        asks = [replace(ask, kilobytes=kilobytes, version=version) for ask in asks]
        for _ in range(TRIES - 1):
            restarts = self.restarts
            try:
                return self._sample_once(asks, version, progress)
            except RestartedError as error:
                self._give_again(error, restarts)
        return self._sample_once(asks, version, progress)

    def _sample_once(self, asks: Sequence[Ask], version: int, progress: Progress | None) -> list[Sample]:
        """Responses to all requests, made when the server held ``version``; RestartedError if it lost its weights."""
        absences = self.client.http.absences
        limit = RequestLimit(self.concurrency) if progress is None else self._limit_of_rollouts
        order = 0 if progress is None else progress.batch
        samples = {} if progress is None else progress.samples
        missing = [ask for ask in asks if ask.index not in samples]

        def read(place: int, answer: Any) -> None:
            ask = missing[place]
            samples[ask.index] = self.client.read(ask, answer, VersionRange(ask.version, self._given))

        requests = [self.client.request(ask) for ask in missing]
        self.client.http.read_all(requests, read, self.concurrency, self._slot(limit, order))
        if not self.client.versions_in_answers:
            self._check_version(version)
        if self.client.http.absences > absences and not self.client.keeps_version:
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

    def _wait_for_server(self) -> None:
        """The first time, wait for the server and check it; warn if other machines may reach it."""
        if self._is_checked:
            return
        self.client.http.wait_until_ready("/health", self.start_timeout)
        self.client.health()
        warning = warning_of_open_addresses(self.client.url)
        if warning is not None:
            _log.warning(warning)
        self._is_checked = True

    def _check_version(self, oldest: int) -> None:
        """Check the version of a server that held ``oldest`` some time ago; RestartedError if it lost its weights."""
        version = self.client.version()
        if not (self._is_incomplete and version == INCOMPLETE):
            VersionRange(oldest, self._given).read(version, self.client.url)

    def _update(self, version: int) -> None:
        """Make a whole update; again from the beginning if the server was away meanwhile."""
        for _ in range(TRIES):
            absences = self.client.http.absences
            self._begin(version)
            self._end()
            if self.client.http.absences == absences:
                return
            self.restarts += 1
        raise EngineError(f"{self.client.url} went away in each of {TRIES} updates of its weights: see its log")

    def _begin(self, version: int) -> None:
        self._given = version
        has_room = self.max_versions is None or self.open_samples.versions < self.max_versions
        self._keeps_responses = self.partial_rollouts and has_room
        self.client.pause(keeps_responses=self._keeps_responses)
        self.publisher.begin(self.client, version, is_first=self.version < 0)

    def _end(self) -> None:
        self.publisher.end(self.client)
        self.client.resume(self._given, keeps_responses=self._keeps_responses)
        self.open_samples.updated(went_on=self._keeps_responses)
        self.version = self._given

    def _give_again(self, loss: RestartedError, restarts: int) -> None:
        """Give a restarted server its weights, unless another thread has, since there were ``restarts``.

        Raises ``loss`` if an update by the trainer has failed meanwhile; EngineError if only the trainer's ranks have
        the weights.
        """
        if not self.publisher.can_repeat:
            raise EngineError(
                f"{loss}: start the run again (torchrun's --max-restarts does), or give --rollout-weight-transfer "
                "files, from which a server that was started again gets its weights again"
            ) from loss
        with self._updating:
            if self.version < 0:
                raise loss
            if self.restarts > restarts:
                return
            _log.warning("%s: it gets them again, and the missing responses are sampled again", loss)
            self.client.health()
            self._update(self.version)
            self.restarts += 1
