"""The rollouts, objectives and runs of the matrix, and their work on the ranks of the pool."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import yaml

from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.records.rollout import RolloutBatch
from tests.support import correction_oracle as oracle
from tests.support import training_oracle
from tests.support.made_rollouts import made_batch, on_device
from tests.support.on_rank import recorded, tensor_parallel_group
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags, make_trainer
from tests.support.training_oracle import Data, Objective

SEQUENCES = 32
LENGTH = 16
MINI_BATCHES = 2
PER_MINI_BATCH = SEQUENCES // MINI_BATCHES
BATCH = (f"--grpo-prompts-per-step={SEQUENCES // 4}", f"--global-batch-size={PER_MINI_BATCH}")
# The least distance of every decision from its bound: float32 errs by at most 1e-5 here.
NEAREST = 1e-3
EMPTY_ROWS = range(24, 32)
REJECTED_ROWS = range(4)

LAYOUTS = (
    Layout(),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(pp=2, vpp=True),
    Layout(cp=4),
    Layout(dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, cp=2),
    Layout(cp=2, dp=2),
    Layout(pp=2, cp=2),
    Layout(tp=2, pp=2, cp=2),
)

_CLIP = ("--grpo-clamp-eps-lower=0.1", "--grpo-clamp-eps-upper=0.15")
_REJECT = ("--rollout-rs=token_k1,seq_mean_k3", "--rollout-rs-threshold=0.65_1.6,0.12")
_CRITERIA = (("token_k1", oracle.log(0.65), oracle.log(1.6)), ("seq_mean_k3", -oracle.math.inf, 0.12))
# Several for each mode; a run's place in the matrix chooses one.
_OBJECTIVES = """
decoupled:
- {words: --rollout-is=token --rollout-is-threshold=1.4 --rollout-is-batch-normalize
  --rollout-is-batch-normalize-scope=accepted --loss-aggregation=seq-mean-token-mean --ppo-dual-clip=1.2
  --grpo-entropy-term-weight=0.02 --grpo-kl-beta=0.05, settings: {level: token, upper: 1.4, batch_normalize: true,
  scope: accepted}, dual: 1.2, aggregation: seq-mean-token-mean, kl: 0.05, entropy: 0.02}
- {words: --policy-loss=gspo --rollout-is=sequence --rollout-is-threshold=1.5 --grpo-kl-beta=0
  --rejection-denominator=original --loss-aggregation=seq-mean-token-sum --grpo-clamp-eps-lower=0.02
  --grpo-clamp-eps-upper=0.01, settings: {level: sequence, upper: 1.5, denominator: original}, algorithm: gspo, low:
  0.02, high: 0.01, aggregation: seq-mean-token-sum}
- {words: --policy-loss=cispo --rollout-is=geometric --rollout-is-threshold=0.8_1.2 --grpo-kl-beta=0.05
  --kl-estimator=k2 --loss-aggregation=seq-mean-token-sum-norm --loss-scale-factor=9, settings: {level: geometric,
  mode: mask, lower: 0.8, upper: 1.2}, algorithm: cispo, aggregation: seq-mean-token-sum-norm, scale: 9.0, kl: 0.05,
  estimator: k2}
bypass ppo_clip:
- {words: --bypass-mode --rollout-is=none --grpo-kl-beta=0.05 --grpo-entropy-term-weight=0.02, bypass: true, kl: 0.05,
  entropy: 0.02}
- {words: --bypass-mode --rollout-is=none --grpo-kl-beta=0 --ppo-dual-clip=1.2 --loss-aggregation=seq-mean-token-mean
  --rollout-token-veto-threshold=0.35, settings: {veto: 0.35}, bypass: true, dual: 1.2, aggregation:
  seq-mean-token-mean}
bypass reinforce:
- {words: --bypass-mode --loss-type=reinforce --rollout-is=token --rollout-is-threshold=1.4
  --rollout-is-batch-normalize --grpo-kl-beta=0 --loss-aggregation=seq-mean-token-sum, settings: {level: token, upper:
  1.4, batch_normalize: true}, bypass: true, algorithm: reinforce, aggregation: seq-mean-token-sum}
- {words: --bypass-mode --loss-type=reinforce --rollout-is=sequence --rollout-is-threshold=1.5 --grpo-kl-beta=0.05
  --loss-aggregation=token-sum --loss-scale-factor=40, settings: {level: sequence, upper: 1.5}, bypass: true,
  algorithm: reinforce, aggregation: token-sum, scale: 40.0, kl: 0.05}
bypass gspo:
- {words: --bypass-mode --loss-type=gspo --rollout-is=none --grpo-kl-beta=0, bypass: true, algorithm: gspo}
"""


def _objective(words: str, settings: dict[str, Any] | None = None, **more: Any) -> Objective:
    correction = oracle.Settings(criteria=_CRITERIA, **settings or {})
    return Objective(tuple(words.split()), correction, **{"low": 0.1, "high": 0.15} | more)


OBJECTIVES = {mode: tuple(_objective(**given) for given in some) for mode, some in yaml.safe_load(_OBJECTIVES).items()}
MODES = ("decoupled", "bypass ppo_clip", "bypass reinforce")


def cut_words(case: Any, *flags_of_case: str) -> list[str]:
    """The flags of a case's layout, micro-batches and setting of the loss, with its own ones between them."""
    arguments = [*case.layout.flags(), f"--micro-batch-size={case.size}", *flags_of_case]
    return (
        arguments + ["--rl-use-sequence-packing"] * case.packed + ["--calculate-per-token-loss"] * case.per_token_loss
    )


def label(case: Any, objective: object) -> str:
    """The name of a case in the list of tests."""
    form = "packed" if case.packed else "padded"
    return f"{case.layout}-{objective}-{form}{case.size}" + "-ptl" * case.per_token_loss


@dataclass(frozen=True)
class Case:
    """One run: a layout, its objective, and the cut of the work."""

    layout: Layout
    mode: str
    variant: int = 0
    packed: bool = False
    per_token_loss: bool = False
    size: int = 8

    @property
    def objective(self) -> Objective:
        return OBJECTIVES[self.mode][self.variant]

    def words(self, folder: Any) -> list[str]:
        """The launcher's flags."""
        clip = () if self.objective.algorithm == "reinforce" else _CLIP
        arguments = cut_words(self, *clip, *_REJECT, *self.objective.words)
        return [
            word for word in flags(folder, *BATCH, *arguments, model=LLAMA) if not word.startswith(_REPLACED)
        ] + arguments

    def __str__(self) -> str:
        return label(self, f"{self.mode.replace(' ', '-')}{self.variant}")


# Prefixes of the scenario's own flags of the correction.
_REPLACED = ("--rollout-", "--grpo-clamp")


def make_cases() -> list[Case]:
    """Every layout in decoupled and in one bypass mode; the other values are spread so that all pairs of them occur."""
    cases = []
    for row, layout in enumerate(LAYOUTS):
        for column, mode in enumerate(("decoupled", MODES[1 + row // 4 % 2])):
            cases.append(
                Case(
                    layout,
                    mode,
                    variant=row % len(OBJECTIVES[mode]),
                    packed=(row + column) % 2 == 1,
                    per_token_loss=(row // 2 + column) % 2 == 1,
                    size=(4, 8)[(row // 3 + column) % 2],
                )
            )
    return cases


@functools.cache
def weights(experts: int = 0) -> tuple[training_oracle.Weights, training_oracle.Weights]:
    """The weights of log π_old and log π_ref, and the weights that train."""
    old = training_oracle.make_weights(1, experts=experts)
    return old, training_oracle.moved(old, 2, 0.03)


def make_data(experts: int = 0, replayed: str = "", kept: str = "") -> Data:
    """Ragged lengths, masks with holes, all-rejected micro-batches, an empty rank; no decision near its bound.

    Up to four sequences are rejected together. ``replayed``: see :func:`make_routes`; empty: no replay. ``kept``: the
    log-probs are over some tokens, see :func:`make_kept`; ``entropy``: the entropies too; empty: over all.

    Each kind of data is drawn once.
    """
    return _draw(experts, replayed, kept)


@functools.cache
def _draw(experts: int, replayed: str, kept: str) -> Data:
    # Seed 34: no router decides narrowly.
    generator = torch.Generator().manual_seed(34 if experts else 12)
    shape = (SEQUENCES, LENGTH)
    tokens = torch.randint(0, training_oracle.VOCABULARY, shape, generator=generator)
    exact = [
        {name: weight.double() for name, weight in weights_of_policy.items()} for weights_of_policy in weights(experts)
    ]
    routes = make_routes(replayed, exact[0], tokens, experts) if replayed else None
    among = make_kept(tokens) if kept else None
    old, new = (training_oracle.score(weights_of_policy, tokens, routes, among)[0] for weights_of_policy in exact)
    rewards = torch.rand(SEQUENCES, generator=generator)
    ids = torch.arange(SEQUENCES)
    data = Data(
        tokens,
        torch.zeros(shape, dtype=torch.bool),
        old.clone(),
        rewards,
        ids // 4,
        ids // PER_MINI_BATCH,
        routes=routes,
        kept=among,
        entropy_over_kept=kept == "entropy",
    )
    for row in range(SEQUENCES):
        if row not in EMPTY_ROWS:
            _fill(data, row, old, new, generator)
    return data


def make_routes(replayed: str, old: training_oracle.Weights, tokens: torch.Tensor, experts: int) -> torch.Tensor:
    """[n, s, layers, top_k] int16 experts to replay.

    ``all``: random ones; ``some``: random ones for three of four tokens, −1 for others; ``old``: the old weights' own.
    """
    top_k = training_oracle.EXPERTS_OF_A_TOKEN
    shape = (*tokens.shape, training_oracle.LAYERS)
    if replayed == "old":
        logits = torch.stack(training_oracle.routers_of(old, tokens), dim=1)
        return logits.topk(top_k, dim=-1).indices.view(*shape, top_k).short()
    # Seed 3: no router decides narrowly for the tokens that it chooses for.
    generator = torch.Generator().manual_seed(3)
    routes = torch.rand(*shape, experts, generator=generator).topk(top_k, dim=-1).indices.short()
    unknown = torch.rand(tokens.shape, generator=generator) < (0.25 if replayed == "some" else 0)
    return torch.where(unknown.view(*tokens.shape, 1, 1), -1, routes)


def make_kept(tokens: torch.Tensor) -> torch.Tensor:
    """[n, s, vocabulary] bool: half of all tokens, with the next token; every fourth position has all tokens."""
    generator = torch.Generator().manual_seed(5)
    kept = torch.rand(*tokens.shape, training_oracle.VOCABULARY, generator=generator) < 0.5
    kept.scatter_(2, tokens.roll(-1, dims=1).unsqueeze(2), True)
    return kept | (torch.rand(*tokens.shape, 1, generator=generator) < 0.25)


def _fill(data: Data, row: int, old: torch.Tensor, new: torch.Tensor, generator: torch.Generator) -> None:
    """Draw one sequence until no objective decides narrowly."""
    objectives = [objective for some in OBJECTIVES.values() for objective in some]
    position = torch.arange(LENGTH)
    for _ in range(2000):
        start, length = (int(torch.randint(*span, (1,), generator=generator)) for span in ((0, 4), (3, 12)))
        data.mask[row] = (position >= start) & (position < start + length)
        data.mask[row] &= torch.rand(LENGTH, generator=generator) > 0.15
        offset = 1.2 if row in REJECTED_ROWS else 0.25 * float(torch.randn((), generator=generator))
        noise = offset + 0.3 * torch.randn(LENGTH, generator=generator)
        # Rollouts are float32, in the reference too.
        data.rollout[row] = (old[row] + noise).clamp(max=-0.01).float().double()
        near = (training_oracle.nearest_bound(objective, data, row, new, old) for objective in objectives)
        if data.mask[row].any() and all(distance > NEAREST for distance in near):
            return
    raise AssertionError(f"no draw of sequence {row} is clear")


def expected(objective: Objective, experts: int = 0, replayed: str = "", kept: str = "") -> training_oracle.Expected:
    """The reference's update, which is computed once."""
    return _update(objective, experts, replayed, kept)


@functools.cache
def _update(objective: Objective, experts: int, replayed: str, kept: str) -> training_oracle.Expected:
    return training_oracle.update(objective, make_data(experts, replayed, kept), *weights(experts))


def batch_of(data: Data, replica: int, replicas: int) -> tuple[RolloutBatch, torch.Tensor]:
    """One data-parallel rank's share of each mini-batch, and its rows."""
    rows = torch.arange(SEQUENCES).view(MINI_BATCHES, replicas, -1)[:, replica].flatten()

    def to_tokens(values: torch.Tensor, filler: float) -> torch.Tensor:
        """Shift values from label positions to token positions."""
        first = torch.full_like(values[:, :1], filler)
        return torch.cat([first, values[:, :-1]], 1)[rows]

    mask = to_tokens(data.mask, False)
    ages = data.ages
    return made_batch(
        data.tokens[rows],
        mask,
        to_tokens(data.rollout, 0).float(),
        data.rewards[rows],
        policy_versions=(-to_tokens(ages, 0) if ages is not None else torch.zeros(mask.shape)).int(),
        sample_ids=rows,
        group_ids=data.group_ids[rows],
    ), rows


# On the ranks


@dataclass(frozen=True)
class OfRank:
    """The results of one rank; lists by mini-batch.

    Attributes:
        where: (tp, cp, dp, pp) ranks.
        places: [k, 2] row and position of each local token, on the last stage.
        metrics: metrics of the step, and of the correction if there is one.
        gradients: this rank's part, under the names of the whole model.
        sharded: dimension of each gradient that TP splits.
        step_calls: the library's collectives of each mini-batch.
    """

    where: tuple[int, int, int, int]
    places: torch.Tensor | None
    metrics: list[dict[str, float]]
    gradients: list[training_oracle.Weights]
    sharded: dict[str, int]
    step_calls: list[list[tuple[str, int, int]]]


@dataclass(frozen=True)
class Found(OfRank):
    """The results of one rank.

    Attributes:
        weights: the weight of each local token, None: no weights.
        mask: its mask.
        lengths: n_i of its sequence.
        plan_calls: the library's collectives before the schedule.
        sequences: sequences of each local micro-batch of each mini-batch.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor | None
    lengths: torch.Tensor | None
    plan_calls: list[tuple[str, int, int]]
    sequences: list[list[int]]


def run_steps(groups: Any, chunks: Any, accumulate: Callable[[int], dict[str, float]]) -> dict[str, Any]:
    """The fields of :class:`OfRank` except ``places``, of a function that makes the gradients of a mini-batch."""
    metrics = []
    gradients = []
    step_calls = []
    for index in range(MINI_BATCHES):
        with recorded(of_library=True) as calls:
            metrics.append(accumulate(index))
        step_calls.append(list(calls))
        gradients.append({name: p.main_grad.float().cpu().clone() for name, p in named(chunks)})
    where = tuple(group_rank(group) for group in (groups.tp, groups.cp, groups.dp, groups.pp))
    sharded = {n: p.partition_dim for n, p in named(chunks) if getattr(p, "tensor_model_parallel", False)}
    return dict(where=where, metrics=metrics, gradients=gradients, step_calls=step_calls, sharded=sharded)


def places_of(cut: Any, rows: torch.Tensor) -> torch.Tensor:
    """[k, 2] row and position of each token of a cut batch whose replica has these rows; -1: padding."""
    local_rows = cut.rows.cpu()
    local = cut.local
    row = torch.where(local_rows >= 0, rows[local_rows.clamp(min=0)], -1)
    return torch.stack([local.layout.expand(row).flatten(), local.positions.cpu().flatten()], 1)


def run_case(arguments: list[str], data: Data, old: training_oracle.Weights, new: training_oracle.Weights) -> Found:
    """Plan at the old weights, then compute the gradients of each mini-batch at the new ones."""
    trainer = make_trainer(arguments)
    groups = trainer.groups
    load(trainer.chunks, old)
    if trainer.reference is not None:
        with trainer.reference.in_place_of(trainer.chunks):
            load(trainer.chunks, old)
    batch, rows = batch_of(data, group_rank(groups.dp), group_size(groups.dp))
    batch = with_replayed(trainer, on_device(batch, trainer.device), data)
    with recorded(of_library=True) as plan_calls:
        prepared = trainer.prepare(batch)
    load(trainer.chunks, new)
    kept_tensors = watch(trainer)
    plan = prepared.plan
    steps = run_steps(groups, trainer.chunks, lambda index: trainer.accumulate(prepared, index) | plan.metrics())
    local = prepared.batch.local
    applied = [local.weights, local.mask, local.sequence_lengths] if kept_tensors is None else joined(kept_tensors)
    weights, mask, lengths = (None if value is None else value.cpu() for value in applied)
    last = groups.is_last_stage
    return Found(
        **steps,
        places=places_of(prepared.batch, rows) if last else None,
        weights=None if not last or weights is None else weights.flatten(),
        mask=mask.flatten() if last else None,
        lengths=local.layout.expand(lengths).flatten() if last else None,
        plan_calls=plan_calls,
        sequences=[[cut.layout.num_sequences for cut in cuts] for cuts in prepared.batch.cuts],
    )


def with_replayed(trainer: Any, batch: RolloutBatch, data: Data) -> RolloutBatch:
    """The batch with this rank's part of the experts and of the kept tokens, sent from the replica's first rank."""
    from megatron_rc.launch.rollouts.broadcast import ReplicaBroadcast

    groups = trainer.groups
    config = trainer.config
    if not (config.replays_rollouts or config.rollouts.replays_sampling):
        return batch
    routes_of_rows = None
    if group_rank(groups.tp) == group_rank(groups.cp) == group_rank(groups.pp) == 0:
        rows = batch.sample_ids.cpu()
        routes = data.routes[rows] if config.replays_rollouts else None
        support = {} if data.kept is None else support_fields(data.kept[rows])
        routes_of_rows = dataclasses.replace(batch, routed_experts=routes, **support)
    return ReplicaBroadcast(config, groups).batch(routes_of_rows)


def support_fields(kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """The record's fields of kept tokens [n, s, vocabulary], aligned to labels; all tokens: a position without ids."""
    ids = []
    counts = torch.zeros(kept.shape[:2], dtype=torch.int32)
    for row in range(len(kept)):
        for column in range(1, kept.shape[1]):
            ids_of_token = kept[row, column - 1]
            if not ids_of_token.all():
                ids.append(ids_of_token.nonzero().flatten().int())
                counts[row, column] = len(ids[-1])
    return {"support_ids": torch.cat(ids), "support_counts": counts}


def watch(trainer: Any) -> list[Any] | None:
    """A list that gets the inputs of every later loss, if the correction is made in the loss; else None."""
    correction = trainer.correction
    if not correction.corrects_in_loss:
        return None
    seen = []
    corrected = correction.corrected

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(corrected(*args, **kwargs))
        return seen[-1]

    correction.corrected = watched
    return seen


def joined(tensors_of_passes: list[Any]) -> list[torch.Tensor | None]:
    """The micro-batches of all mini-batches, concatenated."""
    if not tensors_of_passes:
        return [None, None, None]
    return [None if parts[0] is None else torch.cat(parts) for parts in zip(*tensors_of_passes, strict=True)]


# Transformer Engine's layers hold their norm inside the linear layer that uses it.
_LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def named(chunks: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with their names in the whole model."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                layer = chunk.decoder.layers[int(parts[2])]
                parts[2] = str(layer.layer_number - 1)
                if parts[5:6] == ["local_experts"]:
                    parts[6] = str(layer.mlp.local_expert_indices[int(parts[6])])
                parts[3:] = _LOCAL_NAMES.get(".".join(parts[3:]), ".".join(parts[3:])).split(".")
            # HybridModel's last norm; the halves of its layers have the numbers of whole layers.
            yield ".".join(parts).replace("decoder.final_norm.", "decoder.final_layernorm."), parameter


def load(chunks: Any, weights: training_oracle.Weights) -> None:
    """Copy the weights' TP shards into the model."""
    tp = tensor_parallel_group()
    for name, parameter in named(chunks):
        # With tied embeddings the last stage holds a copy; a critic has an output layer of its own.
        whole = weights[name if name in weights else "embedding.word_embeddings.weight"]
        if getattr(parameter, "tensor_model_parallel", False):
            whole = cut_weight(name, whole, parameter.partition_dim, group_size(tp))[group_rank(tp)]
        parameter.data.copy_(whole)


def cut_weight(name: str, whole: torch.Tensor, dimension: int, size: int) -> list[torch.Tensor]:
    """The TP shards; each holds a part of the gate and a part of the other half."""
    if not name.endswith("linear_fc1.weight"):
        return list(whole.chunk(size, dimension))
    halves = [half.chunk(size, 0) for half in whole.chunk(2, 0)]
    return [torch.cat([half[rank] for half in halves]) for rank in range(size)]


def join_weight(name: str, shards: list[torch.Tensor], dimension: int) -> torch.Tensor:
    """The inverse of :func:`cut_weight`."""
    if not name.endswith("linear_fc1.weight"):
        return torch.cat(shards, dimension)
    halves = [shard.chunk(2, 0) for shard in shards]
    return torch.cat([half[index] for index in range(2) for half in halves])
