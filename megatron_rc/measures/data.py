"""Checks of the data: counts of impossible values on every rank, and the errors that they raise on the host.

An unusable log-prob is found without looking at the host, and named alike on every rank. A token's key is
id · 2³² + 8 · position + 4 · policy + kind; policy is 0 for π_train and 1 for π_rollout, and the kind is NaN, infinite
or positive. With ids below 2²¹ and positions below 2²⁹ a key is exact in float64; the smallest one of all ranks wins.
Without sequence ids, the id is the local index, and the rank that holds the sequence takes the place of its upper bits.

Rollout log-probs may be shifted by one position against the training ones.
Neighbouring pairs of valid tokens are compared straight and crosswise: with d(a, b) = min(|a - b|, 2) nats, a rollout
tensor that is one position late has a small d(train_t, rollout_{t+1}) and a large d(train_t, rollout_t). A lag is
reported if the crosswise distance is less than half of the straight one. Honest batches stay near or above 1: among
3,000 batches of 512 pairs, from unrelated policies that are certain of 98 % of their tokens, the smallest quotient was
0.70. Pairs that look alike count once: a hash puts each into one of 256 cells, and the means of the cells are averaged.
A rank with more than 16,384 tokens compares 64 pairs in each of 256 stretches of its tokens, so that the cost does not
grow with them. ``docs/design.md``, "Errors in the data", says which shifts that misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rc.correction.decisions import SequenceSums
from megatron_rc.correction.inputs import PER_SEQUENCE, Part, Shards
from megatron_rc.measures.header import DataSums
from megatron_rc.measures.histogram import NUM_CODES, codes_of
from megatron_rc.numerics import MAX_ZERO_LOG_PROBS, NUM_SEQUENCE_IDS, is_log_prob
from megatron_rc.settings.config import RolloutCorrectionConfig

_STRIDE = 2**32
_KINDS = ("NaN", "infinite", "positive")
_LOCAL_IDS = 2**11  # sequences that a rank can tell apart if none has an id
# In the order of PER_SEQUENCE.
_RANGES = (
    "lie in [0, 2²¹)",
    "lie in [0, num_mini_batches)",
    "lie in [0, num_groups)",
    "be at most current_version",
    "be finite",
    "be finite",
)
MIN_PAIRS = 512
CELLS, MIN_CELLS = 256, 192
SHIFT_RATIO = 0.5
CLIP = 2.0
ROWS = 5  # numbers of a cell: its pairs, and the sums of their four distances
_UNITS = 2.0**20  # of a nat
_FACTOR = 2654435761  # 2^32 / golden ratio, as Fibonacci hashing has it
_WINDOWS = 256  # of one rank, over all of its micro-batches, which have one each at least
_PAIRS = 64  # neighbouring pairs that a window holds
_LOOKS = 256  # places of a stretch, at most, where its first trained token is looked for


def data_sums(shards: Shards, sums: SequenceSums, config: RolloutCorrectionConfig) -> DataSums[Tensor]:
    """The counts of this rank."""
    first = shards.counts_here
    out_of_range = (shards.out_of_range & (sums.response > 0) & first).sum(1, dtype=torch.float64)
    for part in shards.parts:
        if part.advantages is not None:
            out_of_range[PER_SEQUENCE.index("advantages")] += (part.mask & ~part.advantages.isfinite()).sum()
        if part.versions is not None:
            newer = part.versions > (shards.counts.current_version or 0)
            out_of_range[PER_SEQUENCE.index("policy_versions")] += (part.mask & newer).sum()
    bad, number = sums.response - sums.valid, sums.valid.new_full((), config.fingerprint)
    # Log-probs are at most 0: except for rounding above it, which may cancel, all are 0 if their sum is.
    zeros = (sums.rollout == 0) & (sums.valid > MAX_ZERO_LOG_PROBS)
    return DataSums(
        out_of_range=out_of_range,
        bad_tokens=(bad * first).sum(),
        ranks_without_ids=sums.valid.new_full((), shards.has_default_ids),
        zero_log_probs=(zeros & first).sum(dtype=torch.float64),
        shift=shift_sums(shards.parts),
        config_max=number,
        config_min=number,
        first_bad_key=first_bad_key(shards, bad),
    )


def check_data(data: DataSums[float], config: RolloutCorrectionConfig, *, allow_zero_log_probs: bool) -> None:
    """Raise ValueError for the first count that cannot be right; the counts are equal on every rank."""
    if not data.config_min == data.config_max == config.fingerprint:
        raise ValueError("config: the RolloutCorrectionConfig differs between ranks: give every rank the same fields")
    for name, remedy, count in zip(PER_SEQUENCE, _RANGES, data.out_of_range, strict=True):
        if count:
            raise ValueError(f"{name}: {count:.0f} values of the batch are out of range, all must {remedy}")
    if config.bad_log_probs == "error" and data.bad_tokens:
        raise ValueError(describe_bad_token(data.first_bad_key, data.bad_tokens, bool(data.ranks_without_ids)))
    if data.zero_log_probs and not allow_zero_log_probs:
        raise ValueError(
            f"rollout_log_probs: their sum is exactly 0 at the trained tokens of {data.zero_log_probs:.0f} sequences "
            f"of more than {MAX_ZERO_LOG_PROBS} such tokens, as if the engine returned none and all are 0: ask it for "
            "log-probs; if they are right (greedy sampling), pass allow_zero_log_probs=True"
        )
    lag = find_lag(data.shift)
    if lag:
        shifted = f"the rollout log-probs are shifted by {lag:+d} position against the training log-probs"
        remedy = "align both to the label tokens (labels = tokens shifted left by one, before any sharding)"
        raise ValueError(f"{shifted}: {remedy}")


def first_bad_key(shards: Shards, bad: Tensor) -> Tensor:
    """The smallest key of an unusable token on this rank, 0-D float64; +inf without one.

    All ranks of ``cp`` know ``bad``, [n] unusable tokens of whole sequences, so they look into the same sequence.
    """
    ids = shards.sequence_ids
    if shards.has_default_ids:
        last = _LOCAL_IDS - 1 if shards.rank * _LOCAL_IDS < NUM_SEQUENCE_IDS else 0
        ids = ids.clamp(max=last) + min(shards.rank * _LOCAL_IDS, NUM_SEQUENCE_IDS - 1)
    keys = torch.where(bad > 0, ids.double() * _STRIDE, torch.inf)
    found = [keys.new_full((1,), torch.inf)]
    for part in shards.parts:
        if part.layout.num_sequences and part.mask.numel():
            key, sequence = keys[part.sequences].min(0, keepdim=True)
            found.append(key + _first_in(part, sequence, shards.dtype))
    return torch.cat(found).amin()


def _first_in(part: Part, sequence: Tensor, dtype: torch.dtype) -> Tensor:
    """0-D float64: the key, without the id, of the first unusable local token of a sequence; +inf without one."""
    mask, train, rollout = _tokens_of(part, sequence)
    values = torch.stack([train, rollout], dim=1).to(dtype)
    places = torch.arange(len(mask), device=mask.device)
    policies = 4 * torch.arange(2, device=mask.device) + 2 * values.isfinite() + values.isinf()
    keys = 8 * part.layout.position_of(sequence, places).unsqueeze(1) + policies
    return torch.where(mask.unsqueeze(1) & ~is_log_prob(values), keys.double(), torch.inf).amin()


def _tokens_of(part: Part, sequence: Tensor) -> list[Tensor]:
    """[t] each: mask and log-probs of the local tokens of one sequence; packed, masked ones may follow its end."""
    tensors = (part.mask, part.train, part.rollout)
    if part.mask.dim() == 2:
        return [tensor.index_select(0, sequence).view(-1) for tensor in tensors]
    lengths = part.layout.local_lengths.to(part.mask.device, non_blocking=True)
    offsets = torch.arange(max(part.layout.full_lengths) // part.layout.cp_size, device=part.mask.device)
    index = ((lengths.cumsum(0) - lengths)[sequence] + offsets).clamp(max=len(part.mask) - 1)
    mask, train, rollout = (tensor[index] for tensor in tensors)
    return [mask & (offsets < lengths[sequence]), train, rollout]


def describe_bad_token(key: float, count: float, default_ids: bool) -> str:
    """One sentence for the error: the token and the remedy."""
    sample, rest = divmod(int(key), _STRIDE)
    position, rest = divmod(rest, 8)
    policy, kind = divmod(rest, 4)
    where = f"sample {sample}"
    if default_ids:
        rank, index = divmod(sample, _LOCAL_IDS)
        where = f"sample {index} of data-parallel rank {rank} (no sequence_ids given)"
        # Sequences beyond the last key of a rank, and ranks beyond the last of all, share that last key.
        if sample == NUM_SEQUENCE_IDS - 1:
            where = f"a sample of data-parallel rank {rank} or a later one (give sequence_ids to know which)"
        elif index == _LOCAL_IDS - 1:
            where = f"sample {index} or a later one of data-parallel rank {rank} (give sequence_ids to know which)"
    return (
        f"the {('training', 'rollout')[policy]} log-prob of {where}, position {position} is {_KINDS[kind]} "
        f"(tokens of the batch with NaN, infinite or positive log-probs: {count:.0f}): repair the log-probs, mask "
        "these tokens, or set bad_log_probs=reject_token, which rejects and counts them"
    )


@dataclass(frozen=True)
class Shift:
    """The position of the two policies' tokens against each other."""

    share: float  # the smaller crosswise distance, as a share of the straight one; 1 if both are 0
    lag: int  # the positions by which the rollout log-probs would then be late, +1 or -1
    is_enough: bool  # there are enough pairs, and different ones, to judge


def shift_sums(parts: Sequence[Part]) -> Tensor:
    """[5, cells] float64: pairs, and distances of train_t and train_t+1 to rollout_t and rollout_t+1 in 2^-20 nats."""
    stretch = max(_PAIRS, -(-sum(part.mask.numel() for part in parts) // _WINDOWS))
    windows = zip(*(_windows(part, stretch) for part in parts), strict=True)
    return _distances(*(torch.cat(values) for values in windows))


def _windows(part: Part, stretch: int) -> tuple[Tensor, ...]:
    """Flat train, rollout, mask and "is followed by the next" of the tokens to compare; shapes depend on no data."""
    tokens = tuple(tensor.reshape(-1) for tensor in (part.train, part.rollout, part.mask))
    if stretch == _PAIRS:
        return *tokens, part.layout.followed(torch.arange(part.mask.numel(), device=part.mask.device))
    places = _window_places(tokens[-1], stretch)
    followed = part.layout.followed(places)
    # The last token of a window is only the second of a pair.
    followed[:, -1] = False
    taken = places.view(-1)
    return *(values.index_select(0, taken) for values in tokens), followed.view(-1)


def _window_places(mask: Tensor, stretch: int) -> Tensor:
    """[windows, 65] int64, places in the flat mask, its last place for those beyond; no pair is in two windows."""
    step = -(-stretch // _LOOKS)
    looks_each = -(-stretch // step)
    stretch = looks_each * step
    looks = mask[::step]
    rest = -len(looks) % looks_each
    looks = (pad(looks, (0, rest)) if rest else looks).view(-1, looks_each)
    # Of equal values ``max`` finds the first one.
    starts = looks.max(1).indices.mul_(step).clamp_(max=stretch - _PAIRS)
    starts += torch.arange(0, len(mask), stretch, device=mask.device)
    places = starts.unsqueeze(1) + torch.arange(_PAIRS + 1, device=mask.device)
    return places.clamp_(max=len(mask) - 1)


def _distances(train: Tensor, rollout: Tensor, mask: Tensor, followed: Tensor) -> Tensor:
    """[5, cells] float64, as :func:`shift_sums`, over tokens that may be followed by their neighbour."""
    pairs = (mask[:-1] & mask[1:] & followed[:-1]).double()
    train, rollout = train.float(), rollout.float()
    # The first or second train token of each pair against its first or second rollout token.
    tokens = torch.stack([train[:-1], train[1:], rollout[:-1], rollout[1:]]).nan_to_num_(0.0, 0.0, 0.0)
    apart = (tokens[:2].unsqueeze(1) - tokens[2:]).abs_().clamp_(max=CLIP)
    # In whole numbers, which add up to the same in any order.
    values = torch.cat([pairs.unsqueeze(0), apart.flatten(0, 1).mul_(_UNITS).round_() * pairs])
    return values.new_zeros(ROWS, CELLS).index_add_(1, _cells(tokens[:2]), values)


def _cells(pairs: Tensor) -> Tensor:
    """[t] int64: the cell of each of [2, t] pairs, by bits from the middle of products with odd numbers."""
    first, second = codes_of(pairs).long() * _FACTOR
    return torch.add(second, first, alpha=NUM_CODES).bitwise_right_shift_(24).bitwise_and_(CELLS - 1)


def measure_shift(sums: Sequence[Sequence[float]]) -> Shift:
    """The shift that the sums of the whole batch show: ``[5][cells]`` of :func:`shift_sums`."""
    cells = torch.tensor(sums, dtype=torch.float64)
    cells = cells[:, cells[0] > 0]
    straight, late, early, straight_next = (cells[1:] / cells[0]).sum(1).tolist()
    crosswise, lag = min((late, 1), (early, -1))
    straight = (straight + straight_next) / 2
    is_enough = float(cells[0].sum()) >= MIN_PAIRS and cells.shape[1] >= MIN_CELLS
    return Shift(crosswise / straight if straight else 1.0, lag, is_enough)


def find_lag(sums: Sequence[Sequence[float]]) -> int:
    """The positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    shift = measure_shift(sums)
    return shift.lag if shift.is_enough and shift.share < SHIFT_RATIO else 0
