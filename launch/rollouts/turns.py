"""Conversations: responses of one turn or more, with the task's observations between the turns.

Tokens are appended and never made from text again: what the engine sampled is what is trained, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.engines.answers import derive_seed
from megatron_rc.launch.rewards.outcome import Outcome

# Added to the number of a later turn, so that no other request has its seed.
_TURNS_FROM = 1 << 34


@dataclass(frozen=True)
class Conversation:
    """A prompt and its response. Fields of tokens have one entry for each sampled token, none for observations."""

    prompt: list[int]  # token ids
    turns: tuple[Sample, ...] = ()  # as the engine sampled them, with their versions
    # Token ids after each turn but the last, and after the last one if another turn follows.
    observations: tuple[list[int], ...] = ()
    rewards: tuple[float, ...] = ()  # reward that came with the reply to each turn that got one
    failed: Outcome | None = None  # reply that failed and so ended the conversation
    is_cut: bool = False  # an observation left no room for another turn

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the response: turns and observations; none if it was dropped."""
        return [token for ids, _ in self._parts for token in ids]

    @property
    def sampled(self) -> list[bool]:
        """For each token of the response, whether the engine sampled it."""
        return [is_sampled for ids, is_sampled in self._parts for _ in ids]

    @property
    def log_probs(self) -> list[float]:
        """Log-prob of each sampled token, in nats."""
        return [value for turn in self.turns for value in turn.log_probs]

    @property
    def versions(self) -> list[int]:
        """Version of the weights that sampled each token."""
        return [version for turn in self.turns for version in turn.versions or ()]

    @property
    def reward(self) -> float:
        """Sum of the rewards that came with replies."""
        return sum(self.rewards)

    @property
    def turn_rewards(self) -> list[float]:
        """For each sampled token the reward of its turn, if it ends an earlier turn and no reply failed, else 0."""
        found: list[float] = []
        for number, turn in enumerate(self.turns):
            is_early = number + 1 < len(self.turns) and self.failed is None
            found += [0.0] * (len(turn.token_ids) - 1) + [self.rewards[number] if is_early else 0.0]
        return found

    @property
    def support(self) -> tuple[Tensor, Tensor] | None:
        """(ids, counts) of the kept tokens, see :class:`Sample`; None if a turn has none."""
        known = [turn.support for turn in self.turns if turn.support is not None]
        if not known or len(known) < len(self.turns):
            return None
        ids, counts = zip(*known, strict=True)
        return torch.cat(ids), torch.cat(counts)

    @property
    def routed_experts(self) -> Tensor | None:
        """[tokens of prompt and response − 1, layers, top_k] experts, see :class:`Sample`; None if a turn has none.

        Each turn reads the whole text before it again. A token that was read while its turn was sampled keeps these
        experts, because they made the log-probs; later readings add the tokens that came after.
        """
        found: Tensor | None = None
        for turn in self.turns:
            if turn.routed_experts is None:
                return None
            new = turn.routed_experts
            found = new if found is None else torch.cat([found, new[len(found) :]])
        return found

    @property
    def finish_reason(self) -> str:
        """The last turn's, and ``length`` if an observation left no room for another turn."""
        return "length" if self.is_cut else self.turns[-1].finish_reason

    @property
    def goes_on(self) -> bool:
        """Whether another turn follows."""
        return len(self.observations) == len(self.turns)

    def texts(
        self, of_turn: Callable[[Sequence[int]], str], of_observation: Callable[[Sequence[int]], str]
    ) -> tuple[list[tuple[str, str]], str]:
        """Texts of the earlier turns, each with the observation after it, and of the newest turn.

        ``of_turn`` and ``of_observation`` make a text of token ids.
        """
        *earlier, newest = (of_turn(turn.token_ids) for turn in self.turns)
        return list(zip(earlier, map(of_observation, self.observations), strict=True)), newest

    def with_turn(self, sample: Sample) -> Conversation:
        """The conversation after another turn; a dropped turn, without tokens, drops the whole response."""
        if not sample.token_ids:
            return Conversation(self.prompt, (sample,))
        return replace(self, turns=(*self.turns, sample))

    def with_reply(self, outcome: Outcome, room: int | None) -> Conversation:
        """The conversation after a reply to its newest turn.

        ``room`` is the number of tokens that an observation and all before it may have; None: no turn may follow.
        """
        if outcome.failure is not None:
            return replace(self, failed=outcome)
        rewarded, given = replace(self, rewards=(*self.rewards, outcome.reward)), outcome.observation
        if room is None or given is None:
            return rewarded
        if isinstance(given, str):
            raise TypeError(f"the observation {given!r:.40} is a text: give its token ids")
        if len(self.prompt) + len(self.token_ids) + len(given) > room:
            return replace(rewarded, is_cut=True)
        return replace(rewarded, observations=(*self.observations, given))

    @property
    def _parts(self) -> list[tuple[list[int], bool]]:
        """Token ids of turns and observations in their order, and whether they were sampled."""
        after = [*self.observations, []][: len(self.turns)]
        both = zip(self.turns, after, strict=True)
        return [part for turn, ids in both for part in ((turn.token_ids, True), (ids, False))]


def converse(
    prompts: Sequence[Sequence[int]],
    ask: Callable[[list[list[int]], int], list[Sample]],
    seed: int,
    *,
    reply: Callable[[list[int], list[Conversation]], list[Outcome]] | None = None,
    most: int = 1,
    room: int = 0,
) -> list[Conversation]:
    """Converse until every conversation is over; all that go on are asked together, and replied to together.

    Args:
        prompts: token ids.
        ask: samples a turn after each of some texts, with a seed.
        seed: seed of the first turns; later ones have others, which follow from it.
        reply: replies to conversations, whose places among the prompts come first; None: of one turn each.
        most: most turns of a conversation.
        room: tokens that a text may have before a turn.
    """
    found = [Conversation(list(prompt)) for prompt in prompts]
    going = list(range(len(found)))
    for number in range(most):
        texts = [found[place].prompt + found[place].token_ids for place in going]
        samples = ask(texts, derive_seed(seed, _TURNS_FROM + number) if number else seed)
        for place, sample in zip(going, samples, strict=True):
            found[place] = found[place].with_turn(sample)
        going = [place for place in going if found[place].finish_reason == "stop"]
        if reply is None or not going:
            break
        outcomes = reply(going, [found[place] for place in going])
        for place, outcome in zip(going, outcomes, strict=True):
            found[place] = found[place].with_reply(outcome, room if number + 1 < most else None)
        going = [place for place in going if found[place].goes_on]
        if not going:
            break
    return found
