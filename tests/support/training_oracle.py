"""The whole update in float64 on one process: model, correction, objective, gradients. Imports nothing of the library.

The model is a Llama in plain torch, one sequence at a time and without padding; if the weights have experts, each MLP
is a mixture of them. Names and shapes are as in Megatron-Core's unsharded GPTModel. The correction is
``correction_oracle.py``; the objective is ``objectives_oracle.py``, a loop over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from tests.support import advantages_oracle
from tests.support import correction_oracle as oracle
from tests.support.objectives_oracle import Bounds, of_response

LAYERS, HIDDEN, INNER, HEADS, GROUPS, WIDTH = 4, 32, 48, 4, 2, 8
VOCABULARY, PADDED_VOCABULARY = 13, 16
NORM_EPSILON, ROTARY_BASE = 1e-5, 10000.0
EXPERT_INNER, EXPERTS_OF_A_TOKEN = 24, 2

Weights = dict[str, torch.Tensor]


def make_weights(seed: int, std: float = 0.25, experts: int = 0) -> Weights:
    """Float32 weights under Megatron's names; 0 experts: plain MLPs."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def scale() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(HIDDEN, generator=generator)

    weights = {"embedding.word_embeddings.weight": matrix(PADDED_VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        names = f"decoder.layers.{layer}."
        weights |= {
            names + "input_layernorm.weight": scale(),
            names + "self_attention.linear_qkv.weight": matrix((HEADS + 2 * GROUPS) * WIDTH, HIDDEN),
            names + "self_attention.linear_proj.weight": matrix(HIDDEN, HEADS * WIDTH),
            names + "pre_mlp_layernorm.weight": scale(),
        }
        inner = EXPERT_INNER if experts else INNER
        for mlp in [f"mlp.experts.local_experts.{expert}." for expert in range(experts)] or ["mlp."]:
            weights[names + mlp + "linear_fc1.weight"] = matrix(2 * inner, HIDDEN)
            weights[names + mlp + "linear_fc2.weight"] = matrix(HIDDEN, inner)
        if experts:
            weights[names + "mlp.router.weight"] = matrix(experts, HIDDEN)
    return weights | {"decoder.final_layernorm.weight": scale()}


def moved(weights: Weights, seed: int, size: float) -> Weights:
    """The weights after a random step, relative to each weight's size."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + size * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }


def logits(
    weights: Weights,
    tokens: torch.Tensor,
    routers: list[torch.Tensor] | None = None,
    routes: torch.Tensor | None = None,
) -> torch.Tensor:
    """[s, vocabulary] for one sequence [s]; each layer's router logits [s, experts] are added to ``routers``.

    ``routes``, [s, layers, top_k]: experts that are forced on a token; negative: the token's router chooses.
    """
    return last_hidden(weights, tokens, routers, routes) @ weights["embedding.word_embeddings.weight"][:VOCABULARY].T


def last_hidden(
    weights: Weights,
    tokens: torch.Tensor,
    routers: list[torch.Tensor] | None = None,
    routes: torch.Tensor | None = None,
) -> torch.Tensor:
    """[s, hidden], after the last norm."""
    hidden = weights["embedding.word_embeddings.weight"][tokens]
    for layer in range(LAYERS):
        own = {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"decoder.layers.{layer}.")}
        hidden = hidden + attention(own, norm(hidden, own["input_layernorm.weight"]))
        inside = norm(hidden, own["pre_mlp_layernorm.weight"])
        if "mlp.router.weight" not in own:
            hidden = hidden + gated(own, "mlp.", inside)
            continue
        router = inside @ own["mlp.router.weight"].T
        hidden = hidden + mixture(own, inside, router, None if routes is None else routes[:, layer])
        if routers is not None:
            routers.append(router)
    return norm(hidden, weights["decoder.final_layernorm.weight"])


def norm(hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + NORM_EPSILON).sqrt() * scale


def gated(own: Weights, mlp: str, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = (hidden @ own[mlp + "linear_fc1.weight"].T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ own[mlp + "linear_fc2.weight"].T


def mixture(
    own: Weights, hidden: torch.Tensor, router: torch.Tensor, forced: torch.Tensor | None = None
) -> torch.Tensor:
    """The experts with each token's largest router logits, or forced ones, weighted by the softmax over these alone."""
    chosen = router.topk(EXPERTS_OF_A_TOKEN, dim=-1).indices
    for token in () if forced is None else range(len(chosen)):
        if min(forced[token]) >= 0:
            chosen[token] = forced[token]
    shares = router.gather(-1, chosen).softmax(-1)
    total = torch.zeros_like(hidden)
    for expert in range(router.shape[-1]):
        share = torch.where(chosen == expert, shares, 0.0).sum(-1, keepdim=True)
        total = total + share * gated(own, f"mlp.experts.local_experts.{expert}.", hidden)
    return total


def routers_of(weights: Weights, tokens: torch.Tensor, routes: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Each layer's router logits [tokens of all sequences, experts]; ``routes`` as in :func:`score`."""
    rows: list[list[torch.Tensor]] = []
    for number, row in enumerate(tokens):
        rows.append([])
        logits(weights, row, rows[-1], None if routes is None else routes[number])
    return [torch.cat(layer) for layer in zip(*rows, strict=True)]


def balance(router: torch.Tensor) -> torch.Tensor:
    """E Σ_e f_e P_e of one layer and micro-batch (Fedus et al. 2021, "Switch Transformers", Eq. 4 to 6).

    f_e is the share of choices of expert e, P_e the mean of its probability among all experts.
    """
    tokens, experts = router.shape
    chosen = router.topk(EXPERTS_OF_A_TOKEN, dim=-1).indices
    shares = [int((chosen == expert).sum()) / (tokens * EXPERTS_OF_A_TOKEN) for expert in range(experts)]
    return experts * sum(share * router.softmax(-1)[:, expert].mean() for expert, share in enumerate(shares))


def auxiliary_gradients(
    weights: Weights,
    tokens: torch.Tensor,
    micro_batches: list[list[int]],
    balancing: float,
    z: float,
    routes: torch.Tensor | None = None,
) -> Weights:
    """Gradients of the router losses, summed over layers and averaged over micro-batches (lists of rows of ``tokens``).

    ``routes``: forced experts, see :func:`score`; the losses count the routers' own choice all the same. z multiplies
    the mean of (log Σ exp)² of a token's logits (Zoph et al. 2022, "ST-MoE", Eq. 5).
    """
    parameters = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    total = torch.zeros((), dtype=torch.float64)
    for rows in micro_batches:
        forced = None if routes is None else routes[rows]
        for router in routers_of(parameters, tokens[rows], forced):
            total = total + balancing * balance(router) + z * router.logsumexp(-1).square().mean()
    gradients = torch.autograd.grad(
        total / len(micro_batches), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(parameters, gradients, strict=True))


def attention(own: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Attention with Megatron's interleaved groups: query heads, key head, value head of each."""
    each = HEADS // GROUPS
    mixed = (hidden @ own["self_attention.linear_qkv.weight"].T).view(-1, GROUPS, each + 2, WIDTH)
    heads = []
    for group in range(GROUPS):
        key, value = rotate(mixed[:, group, each]), mixed[:, group, each + 1]
        for head in range(each):
            scores = rotate(mixed[:, group, head]) @ key.T / math.sqrt(WIDTH)
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
    return torch.cat(heads, -1) @ own["self_attention.linear_proj.weight"].T


def rotate(heads: torch.Tensor) -> torch.Tensor:
    """[s, width], rotated by position."""
    frequency = ROTARY_BASE ** (-torch.arange(0, WIDTH, 2, dtype=heads.dtype) / WIDTH)
    angle = torch.outer(torch.arange(len(heads), dtype=heads.dtype), frequency)
    one, other = heads.chunk(2, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


def score(
    weights: Weights,
    tokens: torch.Tensor,
    routes: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    entropy_over_kept: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, s] log-probs of the next tokens and entropies, in float64; 0 in the last column, which has no next token.

    ``routes``: [n, s, layers, top_k], see :func:`logits`. ``kept``: [n, s, vocabulary] bool, tokens that the log-probs
    are over; the entropies are over the whole vocabulary, or over these too.
    """
    columns = []
    for number, row in enumerate(tokens):
        forced = None if routes is None else routes[number]
        found = logits(weights, row, routes=forced)[:-1]
        log_p = found.log_softmax(-1)
        among = log_p if kept is None else found.masked_fill(~kept[number, :-1], -math.inf).log_softmax(-1)
        taken = among[torch.arange(len(row) - 1), row[1:]]
        over = among if entropy_over_kept else log_p
        entropy = -(over.exp() * over.masked_fill(over == -math.inf, 0.0)).sum(-1)
        columns.append(torch.stack([taken, entropy]))
    both = torch.nn.functional.pad(torch.stack(columns, 1), (0, 1))
    return both[0], both[1]


@dataclass(frozen=True)
class Objective:
    """One way to train: the flags ``words``, and the same settings for the reference."""

    words: tuple[str, ...]
    settings: oracle.Settings
    bypass: bool = False
    algorithm: str = "ppo_clip"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    aggregation: str = "token-mean"
    scale: float = 1.0
    kl: float = 0.0
    estimator: str = "k3"
    kl_is_weighted: bool = False  # each token's KL has its ratio π_θ/π_rollout, which is differentiated
    entropy: float = 0.0
    interpolation: bool = False
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    @property
    def bounds(self) -> Bounds:
        """The objective of a token, and its numbers."""
        return Bounds(self.algorithm, self.low, self.high, self.dual, self.tau_pos, self.tau_neg)


@dataclass(frozen=True)
class Data:
    """Rollouts as [n, s] tensors; log-probs and mask are aligned to labels."""

    tokens: torch.Tensor
    mask: torch.Tensor
    rollout: torch.Tensor
    rewards: torch.Tensor
    group_ids: torch.Tensor
    mini_batch_ids: torch.Tensor
    ages: torch.Tensor | None = None  # versions between the sampling policy and the old one
    routes: torch.Tensor | None = None  # [n, s, layers, top_k] experts that are forced, see ``logits``
    kept: torch.Tensor | None = None  # [n, s, vocabulary] bool, tokens that the engine kept, see ``score``
    entropy_over_kept: bool = False


@dataclass
class Expected:
    """The reference's results for one objective; results of an optimizer step are lists by mini-batch."""

    weights: list[list[float]] | None
    mask: list[list[bool]]
    lengths: list[int]
    metrics: list[dict[str, float]]
    loss: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    policy: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)


def advantages(data: Data) -> list[float]:
    """GRPO's, from each prompt's responses."""
    rows = len(data.group_ids)
    rewards, ids = data.rewards.tolist(), data.group_ids.tolist()
    return advantages_oracle.group("grpo", rewards, ids, [True] * rows, [1] * rows)


def corrected(objective: Objective, data: Data, train: torch.Tensor) -> list[oracle.Result]:
    """The oracle's results: decoupled for all mini-batches at once, bypass for each mini-batch alone."""
    ids, number = data.mini_batch_ids, int(data.mini_batch_ids.max()) + 1
    common = {"mini_batch_ids": ids.tolist(), "num_mini_batches": number, "advantages": advantages(data)}
    alone = objective.bypass or objective.interpolation
    masks = [data.mask & (ids == index).unsqueeze(1) for index in range(number)] if alone else [data.mask]
    given = train.tolist(), data.rollout.tolist()
    found = [oracle.correct(*given, mask.tolist(), objective.settings, **common) for mask in masks]
    return found if alone else found * number


def proximal(data: Data, log_probs: torch.Tensor) -> torch.Tensor:
    """[n, s]: log π_prox, after as many steps as there are mini-batches before the row's."""
    found = log_probs.clone()
    for row, steps in enumerate(data.mini_batch_ids.tolist()):
        for t, age in enumerate(data.ages[row].tolist()):
            share = age / (age + steps) if steps else 1.0
            found[row, t] = share * log_probs[row, t] + (1 - share) * data.rollout[row, t]
    return found


def update(objective: Objective, data: Data, old: Weights, new: Weights) -> Expected:
    """Losses and gradients of every mini-batch at the weights ``new``; π_old and π_ref are ``old``.

    Forced experts are π_θ's and π_old's; the routers of π_ref choose. All log-probs are over the kept tokens.
    """
    parameters = {name: weight.double().requires_grad_() for name, weight in new.items()}
    log_probs, entropy = score(parameters, data.tokens, data.routes, data.kept, data.entropy_over_kept)
    with torch.no_grad():
        exact = {name: weight.double() for name, weight in old.items()}
        before = score(exact, data.tokens, data.routes, data.kept)[0]
        ref = before if data.routes is None else score(exact, data.tokens, kept=data.kept)[0]
    if objective.interpolation:
        behind = proximal(data, log_probs.detach())
    else:
        behind = data.rollout if objective.bypass else before
    found = corrected(objective, data, log_probs.detach() if objective.bypass else behind)
    pick = [found[index] for index in data.mini_batch_ids.tolist()]
    applied = objective.settings.level is not None and not (objective.bypass and objective.algorithm != "reinforce")
    expected = Expected(
        weights=[one.weights[row] for row, one in enumerate(pick)] if applied else None,
        mask=[one.mask[row] for row, one in enumerate(pick)],
        lengths=[one.sequence_lengths[row] for row, one in enumerate(pick)],
        metrics=[one.metrics for one in found],
    )
    for index, one in enumerate(found):
        rows = [row for row, mini in enumerate(data.mini_batch_ids.tolist()) if mini == index]
        total, size, policy = add_up(objective, data, rows, log_probs, behind, ref, entropy, expected)
        counts = one.denominators[index]
        tokens, sequences = counts[2:] if objective.settings.denominator == "accepted" else counts[:2]
        divisor = divides(objective.aggregation, tokens, sequences, objective.scale)
        loss = total / divisor
        expected.loss.append(loss.item())
        expected.size.append(size / divisor)
        expected.policy.append(policy)
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        expected.gradients.append(dict(zip(parameters, gradients, strict=True)))
    return expected


def divides(aggregation: str, tokens: float, sequences: float, scale: float) -> float:
    """The divisor of the sum of a mini-batch's terms."""
    return {
        "token-mean": tokens,
        "token-sum": scale,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences,
        "seq-mean-token-sum-norm": sequences * scale,
    }[aggregation]


def add_up(
    objective: Objective,
    data: Data,
    rows: list[int],
    log_probs: torch.Tensor,
    behind: torch.Tensor,
    ref: torch.Tensor,
    entropy: torch.Tensor,
    expected: Expected,
) -> tuple[torch.Tensor, float, dict[str, float]]:
    """(loss of some sequences before the division by G, Σ|terms|, metrics)."""
    worth = advantages(data)
    total, size = torch.zeros((), dtype=torch.float64), 0.0
    measured: dict[str, list[float]] = {name: [] for name in ("log_ratio", "low", "high", "dual", "entropy", "kl")}
    for row in rows:
        tokens = [t for t, valid in enumerate(data.mask[row].tolist()) if valid]
        before = behind[row].detach().tolist()
        found = of_response(
            objective.bounds,
            [log_probs[row, t] for t in tokens],
            [before[t] for t in tokens],
            [worth[row]] * len(tokens),
        )
        for t, (loss, clipped) in zip(tokens, found, strict=True):
            penalty = divergence(objective.estimator, log_probs[row, t] - ref[row, t])
            if objective.kl_is_weighted:
                penalty = penalty * (log_probs[row, t] - data.rollout[row, t]).exp()
            measured["log_ratio"].append(log_probs[row, t].item() - before[t])
            measured["entropy"].append(entropy[row, t].item())
            measured["kl"].append(penalty.item())
            for name in ("low", "high", "dual"):
                measured[name].append(float(name == clipped))
            if not expected.mask[row][t]:
                continue
            weight = 1.0 if expected.weights is None else expected.weights[row][t]
            share = expected.lengths[row] if objective.aggregation == "seq-mean-token-mean" else 1
            terms = [weight * loss, objective.kl * penalty, -objective.entropy * entropy[row, t]]
            total = total + sum(terms) / share
            size += sum(abs(term.item()) for term in terms) / share
    values = measured["log_ratio"]
    policy = {name: oracle.mean(measured[name]) for name in measured}
    return total, size, policy | {"highest": max(values, default=0.0), "lowest": min(values, default=0.0)}


def divergence(estimator: str, difference: torch.Tensor) -> torch.Tensor:
    """The KL penalty of one token."""
    if estimator == "k1":
        return difference
    return difference**2 / 2 if estimator == "k2" else (-difference).exp() - 1 + difference


def nearest_bound(objective: Objective, data: Data, row: int, new: torch.Tensor, old: torch.Tensor) -> float:
    """The least distance of any decision in one sequence from flipping, at log π_θ and log π_old [n, s]."""
    train, behind = (new, data.rollout) if objective.bypass else (old, old)
    one = ([tensor[row].tolist()] for tensor in (train, data.rollout, data.mask))
    nearest = oracle.distance_to_bounds(*one, objective.settings, advantages=[advantages(data)[row]])
    if objective.algorithm == "reinforce":
        return nearest
    tokens = data.mask[row]
    log_ratio = (new - behind)[row][tokens]
    if objective.algorithm == "gspo":
        log_ratio = log_ratio.mean(0, keepdim=True)
    bounds = [1 - objective.low, 1 + objective.high, *([objective.dual] if objective.dual else [])]
    found = [abs(float(r) - bound) for r in log_ratio.exp() for bound in bounds]
    return min([nearest, *found])
