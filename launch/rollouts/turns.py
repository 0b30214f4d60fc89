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
    # Sampled tokens of each bad response to this prompt that was sampled again or dropped: those of the turns before,
    # and those of the bad turn; 0: the bad turn had none, so that the length is unknown.
    bad_lengths: tuple[int, ...] = ()

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
        of_tokens: list[float] = []
        for number, turn in enumerate(self.turns):
            is_early = number + 1 < len(self.turns) and self.failed is None
            of_tokens += [0.0] * (len(turn.token_ids) - 1)
            of_tokens.append(self.rewards[number] if is_early else 0.0)
        return of_tokens

    @property
    def support(self) -> tuple[Tensor, Tensor] | None:
        """(ids, counts) of the kept tokens, see :class:`Sample`; None if a turn has none."""
        supports = [turn.support for turn in self.turns if turn.support is not None]
        if not supports or len(supports) < len(self.turns):
            return None
        return torch.cat([ids for ids, _ in supports]), torch.cat([counts for _, counts in supports])

    @property
    def routed_experts(self) -> Tensor | None:
        """[tokens of prompt and response − 1, layers, top_k] experts, see :class:`Sample`; None if a turn has none.

        Each turn reads the whole text before it again. A token that was read while its turn was sampled keeps these
        experts, because they made the log-probs; later readings add the tokens that came after.
        """
        experts: Tensor | None = None
        for turn in self.turns:
            if turn.routed_experts is None:
                return None
            if experts is None:
                experts = turn.routed_experts
            else:
                experts = torch.cat([experts, turn.routed_experts[len(experts) :]])
        return experts

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
        num_before = len(self.log_probs)
        of_turn = [num_before + length if length else 0 for length in sample.bad_lengths]
        bad_lengths = (*self.bad_lengths, *of_turn)
        if not sample.token_ids:
            return Conversation(self.prompt, (sample,), bad_lengths=bad_lengths)
        return replace(self, turns=(*self.turns, sample), bad_lengths=bad_lengths)

    def with_reply(self, outcome: Outcome, room: int | None) -> Conversation:
        """The conversation after a reply to its newest turn.

        ``room`` is the number of tokens that an observation and all before it may have; None: no turn may follow.
        """
        if outcome.failure is not None:
            return replace(self, failed=outcome)
        rewarded = replace(self, rewards=(*self.rewards, outcome.reward))
        observation = outcome.observation
        if room is None or observation is None:
            return rewarded
        if isinstance(observation, str):
            raise TypeError(f"the observation {observation!r:.40} is a text: give its token ids")
        if len(self.prompt) + len(self.token_ids) + len(observation) > room:
            return replace(rewarded, is_cut=True)
        return replace(rewarded, observations=(*self.observations, observation))

    @property
    def _parts(self) -> list[tuple[list[int], bool]]:
        """Token ids of turns and observations in their order, and whether they were sampled."""
        parts: list[tuple[list[int], bool]] = []
        for number, turn in enumerate(self.turns):
            parts.append((turn.token_ids, True))
            if number < len(self.observations):
                parts.append((self.observations[number], False))
        return parts


# Replies to conversations, whose indices among the prompts come first.
Reply = Callable[[list[int], list[Conversation]], list[Outcome]]


def converse(
    prompts: Sequence[Sequence[int]],
    ask: Callable[[list[list[int]], int], list[Sample]],
    seed: int,
    *,
    reply: Reply | None = None,
    max_turns: int = 1,
    room: int = 0,
) -> list[Conversation]:
    """Converse until every conversation is over; all that go on are asked together, and replied to together.

    Args:
        prompts: token ids.
        ask: samples a turn after each of some texts, with a seed.
        seed: seed of the first turns; later ones have others, which follow from it.
        reply: None: conversations of one turn each.
        max_turns: most turns of a conversation.
        room: tokens that a text may have before a turn.
    """
    conversations = [Conversation(list(prompt)) for prompt in prompts]
    open_indices = list(range(len(conversations)))
    for number in range(max_turns):
        texts = [conversations[index].prompt + conversations[index].token_ids for index in open_indices]
        seed_of_turn = derive_seed(seed, _TURNS_FROM + number) if number else seed
        samples = ask(texts, seed_of_turn)
        for index, sample in zip(open_indices, samples, strict=True):
            conversations[index] = conversations[index].with_turn(sample)
        # A turn that was cut off or dropped gets no reply.
        open_indices = [index for index in open_indices if conversations[index].finish_reason == "stop"]
        if reply is None or not open_indices:
            break

        outcomes = reply(open_indices, [conversations[index] for index in open_indices])
        is_last = number + 1 == max_turns
        for index, outcome in zip(open_indices, outcomes, strict=True):
            conversations[index] = conversations[index].with_reply(outcome, None if is_last else room)
        open_indices = [index for index in open_indices if conversations[index].goes_on]
        if not open_indices:
            break
    return conversations
