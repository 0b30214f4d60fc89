"""What rollout servers have in common: weights through a directory, samples through concurrent requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_asks
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.records.rollout import SamplingParams

Item = TypeVar("Item")
Result = TypeVar("Result")


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
        self.version = -1
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
        self._swap(path, version)
        self.version = version

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """One response for each prompt, in their order; see :class:`RolloutEngine`.

        Raises:
            ValueError: prompts or parameters that no engine takes.
            EngineError: the server failed, or an answer cannot be trained on.
        """
        if self.version < 0:
            raise EngineError(f"{self.client.url} holds no weights of this trainer: call load_weights first")
        asks = make_asks(prompts, params, max_new_tokens, seed, self.eos)
        self._check_params(asks)
        samples = run_all(self._sample_one, asks, self.concurrency)
        self._check_version()
        return samples

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
    def _check_version(self) -> None:
        """Refuse samples of a server that does not hold the weights of ``version`` any more."""

    @abstractmethod
    def _sample_one(self, ask: Ask) -> Sample:
        """Ask the server for one response, and check it."""

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


def run_all(function: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    """``function`` of every item, in their order, on at most so many threads; the first error ends it."""
    if not items:
        return []
    with ThreadPoolExecutor(min(workers, len(items))) as pool:
        futures = [pool.submit(function, item) for item in items]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in futures:
            if future in done:
                future.result()
        return [future.result() for future in futures]
