"""Which of the responses that were started for a rollout batch trained, and where the others ended.

Dropping, replacing and rejecting responses changes which responses train. An importance weight corrects the probability
of the tokens of a response that is there; it cannot bring back a response that is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from megatron_rc.launch.rollouts.excluded import Excluded
from megatron_rc.launch.training.batches.rollout_metrics import SampledResponse

PREFIX = "selection/"


class End(Enum):
    """Where a started response ended."""

    TRAINED = "trained"  # an optimizer step was made with at least one of its tokens
    BAD = "bad"  # it could not be used (``--bad-samples``)
    REPLACED = "replaced"  # another prompt took the place of its prompt (``--dynamic-sampling``)
    OVERLONG = "overlong"  # it was cut off, and ``--overlong mask`` took it out
    REJECTED = "rejected"  # the correction accepted none of its tokens, or gave all of them the weight 0
    SKIPPED = "skipped"  # the optimizer steps of its mini-batch were left out


class Started(NamedTuple):
    """A response that was started, and its end."""

    prompt: tuple[float, int]  # tells prompts apart, see :class:`Excluded`
    num_tokens: float  # number of sampled tokens; 0: unknown
    age: float  # sum of its tokens' ages, see :class:`SampledResponse`
    end: End


class Selection:
    """Account of the responses that were started for one rollout batch; equal on all ranks, if its inputs are.

    Args:
        responses: the responses of the batch, replica after replica.
        excluded: the responses that are not in the batch. None: unknown; a dropped response of the batch then counts as
            one bad response of unknown length.
        num_replicas: number of data-parallel replicas.
        num_mini_batches: number of mini-batches of the rollout batch.
        masks_overlong: whether responses that were cut off do not train (``--overlong mask``).
    """

    def __init__(
        self,
        responses: Sequence[SampledResponse],
        excluded: Sequence[Excluded] | None,
        *,
        num_replicas: int,
        num_mini_batches: int,
        masks_overlong: bool,
    ) -> None:
        self.responses = responses
        self.excluded = excluded
        self.masks_overlong = masks_overlong
        self._num_replicas = num_replicas
        self._num_mini_batches = num_mini_batches
        # For each response: optimizer steps on its mini-batch, and those of them that trained one of its tokens.
        self._num_steps = [0] * len(responses)
        self._num_training_steps = [0] * len(responses)

    def count_step(self, mini_batch: int, accepted: Sequence[bool] | None) -> None:
        """Count an optimizer step on a mini-batch.

        ``accepted`` tells, for each response of the mini-batch, replica after replica, whether one of its tokens
        trained; None: the step was left out.
        """
        if accepted is None:
            return
        indices = self._indices(mini_batch)
        for index, is_accepted in zip(indices, accepted, strict=True):
            self._num_steps[index] += 1
            self._num_training_steps[index] += is_accepted

    def metrics(self, *, knows_versions: bool) -> dict[str, float]:
        """Metrics of the account, after the last step on the batch; ``knows_versions``: the ages are known."""
        started = self.started()
        metrics = {"started": len(started)}
        for end in End:
            metrics[end.value] = sum(response.end is end for response in started)
        metrics["finished"] = len(started) - metrics["bad"]

        of_prompts = defaultdict(list)
        for response in started:
            of_prompts[response.prompt].append(response.end is End.TRAINED)
        rates = [sum(trained) / len(trained) for trained in of_prompts.values()]
        mean_rate = sum(rates) / len(rates)
        shortest, longest = _rates_of_quarters(started)
        shares = {
            "inclusion": metrics["trained"] / len(started),
            "inclusion_shortest": shortest,
            "inclusion_longest": longest,
            "inclusion_prompt_std": (sum((rate - mean_rate) ** 2 for rate in rates) / len(rates)) ** 0.5,
            "prompts_without": rates.count(0.0) / len(rates),
        }
        trained = [response for response in started if response.end is End.TRAINED]
        if knows_versions and trained:
            num_tokens = sum(response.num_tokens for response in trained)
            shares["staleness_mean"] = sum(response.age for response in trained) / num_tokens
        return {f"{PREFIX}{name}": float(value) for name, value in (metrics | shares).items()}

    def started(self) -> list[Started]:
        """All responses that were started, each with its end."""
        started = []
        for index, response in enumerate(self.responses):
            end = self._end(index)
            # The bad responses of a dropped one are among the excluded ones, if these are known.
            if end is not End.BAD or self.excluded is None:
                started.append(Started((response.group_id, 0), response.num_tokens, response.age, end))
        for excluded in self.excluded or ():
            end = End.BAD if excluded.is_bad else End.REPLACED
            started.append(Started(excluded.prompt, excluded.num_tokens, 0.0, end))
        return started

    def _end(self, index: int) -> End:
        """End of a response of the batch."""
        response = self.responses[index]
        if response.is_dropped:
            return End.BAD
        if response.is_cut_off and self.masks_overlong:
            return End.OVERLONG
        if self._num_training_steps[index]:
            return End.TRAINED
        return End.REJECTED if self._num_steps[index] else End.SKIPPED

    def _indices(self, mini_batch: int) -> list[int]:
        """Indices of the responses of a mini-batch, replica after replica: each replica has its share of them."""
        num_rows = len(self.responses) // self._num_replicas
        size = num_rows // self._num_mini_batches
        indices: list[int] = []
        for replica in range(self._num_replicas):
            first = replica * num_rows + mini_batch * size
            indices += range(first, first + size)
        return indices


def _rates_of_quarters(started: Sequence[Started]) -> tuple[float, float]:
    """Inclusion rates of the shortest and of the longest quarter of the responses whose length is known.

    Responses of equal length count alike: if the border of a quarter lies among them, each counts in part.
    """
    trained_of_length: dict[float, list[bool]] = defaultdict(list)
    for response in started:
        if response.num_tokens:
            trained_of_length[response.num_tokens].append(response.end is End.TRAINED)
    quarter = sum(map(len, trained_of_length.values())) / 4
    lengths = sorted(trained_of_length)
    rates = []
    for ordered in (lengths, lengths[::-1]):
        room = quarter
        num_trained = 0.0
        for length in ordered:
            trained = trained_of_length[length]
            num_counted = min(len(trained), room)
            num_trained += num_counted * sum(trained) / len(trained)
            room -= num_counted
        rates.append(num_trained / quarter)
    shortest, longest = rates
    return shortest, longest
