"""The whole update in float64 on one process: model, correction, objective, gradients. Imports nothing of the library.

The model is a Llama in plain torch, one sequence at a time and without padding; if the weights have experts, each MLP
is a mixture of them. Names and shapes are as in Megatron-Core's unsharded GPTModel. The correction is
``correction_oracle.py``; the objective is ``objectives_oracle.py``, a loop over tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from tests.support import advantages_oracle
from tests.support import correction_oracle as oracle
from tests.support.objectives_oracle import Bounds, of_response

LAYERS = 4
HIDDEN = 32
INNER = 48  # of a plain MLP
HEADS = 4  # of queries
GROUPS = 2  # of query heads; each has one key head and one value head
WIDTH = 8  # of a head
VOCABULARY = 13
PADDED_VOCABULARY = 16
NORM_EPSILON = 1e-5
ROTARY_BASE = 10000.0
EXPERT_INNER = 24
EXPERTS_OF_A_TOKEN = 2

Weights = dict[str, torch.Tensor]


def make_weights(seed: int, std: float = 0.25, experts: int = 0) -> Weights:
    """Float32 weights under Megatron's names; 0 experts: plain MLPs."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def scale() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(HIDDEN, generator=generator)

    if experts:
        inner = EXPERT_INNER
        mlps = [f"mlp.experts.local_experts.{expert}." for expert in range(experts)]
    else:
        inner = INNER
        mlps = ["mlp."]

    weights = {"embedding.word_embeddings.weight": matrix(PADDED_VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = scale()
        weights[prefix + "self_attention.linear_qkv.weight"] = matrix((HEADS + 2 * GROUPS) * WIDTH, HIDDEN)
        weights[prefix + "self_attention.linear_proj.weight"] = matrix(HIDDEN, HEADS * WIDTH)
        weights[prefix + "pre_mlp_layernorm.weight"] = scale()
        for mlp in mlps:
            # Gate and up projection are one matrix.
            weights[prefix + mlp + "linear_fc1.weight"] = matrix(2 * inner, HIDDEN)
            weights[prefix + mlp + "linear_fc2.weight"] = matrix(HIDDEN, inner)
        if experts:
            weights[prefix + "mlp.router.weight"] = matrix(experts, HIDDEN)
    weights["decoder.final_layernorm.weight"] = scale()
    return weights


def moved(weights: Weights, seed: int, size: float) -> Weights:
    """The weights after a random step; ``size`` is relative to each matrix's standard deviation."""
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
    """Logits of the sequences' next tokens, [n, s, vocabulary].

    Args:
        weights: the model.
        tokens: [n, s]; every sequence has s tokens.
        routers: a list to which each layer's router logits, [n, s, experts], are added.
        routes: [n, s, layers, top_k] experts that are forced on a token; negative: the token's router chooses.
    """
    # The embeddings are the output layer too; its padding is cut off.
    output_layer = weights["embedding.word_embeddings.weight"][:VOCABULARY]
    return last_hidden(weights, tokens, routers, routes) @ output_layer.T


def last_hidden(
    weights: Weights,
    tokens: torch.Tensor,
    routers: list[torch.Tensor] | None = None,
    routes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hidden states after the last norm, [n, s, hidden]; the arguments are those of :func:`logits`."""
    hidden = weights["embedding.word_embeddings.weight"][tokens]
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}."
        of_layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        hidden = hidden + attention(of_layer, norm(hidden, of_layer["input_layernorm.weight"]))
        mlp_input = norm(hidden, of_layer["pre_mlp_layernorm.weight"])
        if "mlp.router.weight" not in of_layer:
            hidden = hidden + gated(of_layer, "mlp.", mlp_input)
            continue
        router = mlp_input @ of_layer["mlp.router.weight"].T
        forced = None if routes is None else routes[..., layer, :]
        hidden = hidden + mixture(of_layer, mlp_input, router, forced)
        if routers is not None:
            routers.append(router)
    return norm(hidden, weights["decoder.final_layernorm.weight"])


def norm(hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """RMSNorm of the hidden states."""
    return hidden / (hidden.square().mean(-1, keepdim=True) + NORM_EPSILON).sqrt() * scale


def gated(of_layer: Weights, mlp: str, hidden: torch.Tensor) -> torch.Tensor:
    """Output of the layer's SwiGLU MLP, or expert, whose names begin with ``mlp``."""
    gate, up = (hidden @ of_layer[mlp + "linear_fc1.weight"].T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ of_layer[mlp + "linear_fc2.weight"].T


def mixture(
    of_layer: Weights, hidden: torch.Tensor, router: torch.Tensor, forced: torch.Tensor | None = None
) -> torch.Tensor:
    """Output of the layer's experts, weighted by the softmax over the logits of a token's chosen experts alone.

    A token's experts are those with its largest router logits, or the forced ones, [n, s, top_k], unless negative.
    """
    chosen = router.topk(EXPERTS_OF_A_TOKEN, dim=-1).indices
    if forced is not None:
        is_forced = (forced >= 0).all(-1, keepdim=True)
        chosen = torch.where(is_forced, forced.long(), chosen)
    shares = router.gather(-1, chosen).softmax(-1)

    total = torch.zeros_like(hidden)
    for expert in range(router.shape[-1]):
        share = torch.where(chosen == expert, shares, 0.0).sum(-1, keepdim=True)
        total = total + share * gated(of_layer, f"mlp.experts.local_experts.{expert}.", hidden)
    return total


def routers_of(weights: Weights, tokens: torch.Tensor, routes: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Each layer's router logits [tokens of all sequences, experts]; ``routes`` as in :func:`score`."""
    routers: list[torch.Tensor] = []
    logits(weights, tokens, routers=routers, routes=routes)
    return [of_layer.flatten(0, 1) for of_layer in routers]


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

    # Some weights, as the last norm, have no influence on the routers: their gradients are 0.
    gradients = torch.autograd.grad(
        total / len(micro_batches), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(parameters, gradients, strict=True))


def attention(of_layer: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Causal attention with Megatron's interleaved groups: query heads, key head, value head of each."""
    queries_per_group = HEADS // GROUPS
    projected = hidden @ of_layer["self_attention.linear_qkv.weight"].T
    projected = projected.unflatten(-1, (GROUPS, queries_per_group + 2, WIDTH))
    heads = []
    for group in range(GROUPS):
        key = rotate(projected[..., group, queries_per_group, :])
        value = projected[..., group, queries_per_group + 1, :]
        for head in range(queries_per_group):
            query = rotate(projected[..., group, head, :])
            scores = query @ key.mT / math.sqrt(WIDTH)
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
    return torch.cat(heads, -1) @ of_layer["self_attention.linear_proj.weight"].T


def rotate(heads: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of a head, [n, s, width]."""
    frequency = ROTARY_BASE ** (-torch.arange(0, WIDTH, 2, dtype=heads.dtype) / WIDTH)
    angle = torch.outer(torch.arange(heads.shape[-2], dtype=heads.dtype), frequency)
    first, second = heads.chunk(2, -1)
    rotated_first = first * angle.cos() - second * angle.sin()
    rotated_second = second * angle.cos() + first * angle.sin()
    return torch.cat([rotated_first, rotated_second], -1)


def score(
    weights: Weights,
    tokens: torch.Tensor,
    routes: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    entropy_over_kept: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the next tokens, and entropies, [n, s] each, in float64.

    Both are 0 in the last column, which has no next token.

    Args:
        weights: the model.
        tokens: [n, s].
        routes: [n, s, layers, top_k], see :func:`logits`.
        kept: [n, s, vocabulary] bool, tokens that the log-probs are over. Default: the whole vocabulary.
        entropy_over_kept: the entropies are over the kept tokens, not over the whole vocabulary.
    """
    next_logits = logits(weights, tokens, routes=routes)[:, :-1]
    is_kept = torch.ones_like(next_logits, dtype=torch.bool) if kept is None else kept[:, :-1]
    over_vocabulary = next_logits.log_softmax(-1)
    over_kept = next_logits.masked_fill(~is_kept, -math.inf).log_softmax(-1)
    log_probs = over_kept.gather(-1, tokens[:, 1:, None]).squeeze(-1)

    # A token that is not kept has probability 0, and no part in the entropy.
    distribution = over_kept if entropy_over_kept else over_vocabulary
    finite = distribution.masked_fill(distribution == -math.inf, 0.0)
    entropies = -(distribution.exp() * finite).sum(-1)

    def with_last_column(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, 1))

    return with_last_column(log_probs), with_last_column(entropies)


@dataclass(frozen=True)
class Objective:
    """A way to train, as flags and as settings of the reference."""

    words: tuple[str, ...]  # the flags
    settings: oracle.Settings  # of the correction
    bypass: bool = False
    algorithm: str = "ppo_clip"  # the policy loss
    low: float = 0.2  # ratios are clipped below 1 - low
    high: float = 0.2  # and above 1 + high
    dual: float | None = None  # bound of PPO's dual clipping
    aggregation: str = "token-mean"
    scale: float = 1.0  # divisor of the aggregations that have a constant one
    kl: float = 0.0  # coefficient of the KL penalty
    estimator: str = "k3"  # of the KL penalty
    kl_is_weighted: bool = False  # each token's KL has its ratio π_θ/π_rollout, which is differentiated
    entropy: float = 0.0  # coefficient of the entropy bonus
    interpolation: bool = False  # the proximal policy is interpolated, see ``proximal``
    tau_pos: float = 1.0  # temperatures of SAPO
    tau_neg: float = 1.05
    distillation: float = 0.0  # coefficient of the divergence from a teacher

    @property
    def bounds(self) -> Bounds:
        """The objective of a token with its numbers, for ``objectives_oracle.py``."""
        return Bounds(self.algorithm, self.low, self.high, self.dual, self.tau_pos, self.tau_neg)


@dataclass(frozen=True)
class Data:
    """Rollouts; log-probs and mask are aligned to labels."""

    tokens: torch.Tensor  # [n, s]
    mask: torch.Tensor  # [n, s] bool, sampled tokens
    rollout: torch.Tensor  # [n, s] log π_rollout
    rewards: torch.Tensor  # [n]
    group_ids: torch.Tensor  # [n], the prompt of each sequence
    mini_batch_ids: torch.Tensor  # [n]
    ages: torch.Tensor | None = None  # [n, s] versions between the sampling policy and the old one
    routes: torch.Tensor | None = None  # [n, s, layers, top_k] experts that are forced, see ``logits``
    kept: torch.Tensor | None = None  # [n, s, vocabulary] bool, tokens that the engine kept, see ``score``
    entropy_over_kept: bool = False

    @functools.cached_property
    def advantages(self) -> list[float]:
        """GRPO's advantage of each sequence, from all responses to its prompt."""
        num_sequences = len(self.group_ids)
        in_baseline = [True] * num_sequences
        # GRPO does not look at lengths.
        lengths = [1] * num_sequences
        return advantages_oracle.group("grpo", self.rewards.tolist(), self.group_ids.tolist(), in_baseline, lengths)


@dataclass
class Expected:
    """The reference's results for one objective; results of an optimizer step are lists by mini-batch."""

    weights: list[list[float]] | None  # [n, s]; None: the loss has no weights
    mask: list[list[bool]]  # [n, s], accepted tokens
    lengths: list[int]  # [n], the tokens that divide in means over a sequence
    metrics: list[dict[str, float]]  # of the correction
    loss: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)  # the loss's sum of absolute values, for tolerances
    policy: list[dict[str, float]] = field(default_factory=list)  # means of the loss's parts
    gradients: list[Weights] = field(default_factory=list)


def corrected(objective: Objective, data: Data, train: torch.Tensor) -> list[oracle.Result]:
    """The correction's results by mini-batch, if log π_train is ``train``, [n, s].

    Decoupled mode corrects all mini-batches at once, and they share one result. In bypass mode and with an
    interpolated proximal policy each mini-batch is corrected alone, when its step begins.
    """
    num_mini_batches = int(data.mini_batch_ids.max()) + 1

    def correct(mask: torch.Tensor) -> oracle.Result:
        """Correct the sequences that have tokens in the mask."""
        return oracle.correct(
            train.tolist(),
            data.rollout.tolist(),
            mask.tolist(),
            objective.settings,
            mini_batch_ids=data.mini_batch_ids.tolist(),
            num_mini_batches=num_mini_batches,
            advantages=data.advantages,
        )

    if objective.bypass or objective.interpolation:
        in_mini_batch = [(data.mini_batch_ids == index).unsqueeze(1) for index in range(num_mini_batches)]
        return [correct(data.mask & rows) for rows in in_mini_batch]
    return [correct(data.mask)] * num_mini_batches


def proximal(data: Data, log_probs: torch.Tensor, rows: Iterable[int] | None = None) -> torch.Tensor:
    """Interpolated log π_prox, [n, s], after as many steps as there are mini-batches before the row's.

    Only in these rows, by default in all; the others have ``log_probs``.
    """
    log_prox = log_probs.clone()
    for row in range(len(log_probs)) if rows is None else rows:
        steps = int(data.mini_batch_ids[row])
        for t, age in enumerate(data.ages[row].tolist()):
            # (v_prox - v_rollout) / (v_θ - v_rollout), in versions of the weights; without steps π_prox is π_θ.
            share = age / (age + steps) if steps else 1.0
            log_prox[row, t] = share * log_probs[row, t] + (1 - share) * data.rollout[row, t]
    return log_prox


def update(
    objective: Objective,
    data: Data,
    old: Weights,
    new: Weights,
    divergence_of: Callable[[Weights], torch.Tensor] | None = None,
) -> Expected:
    """Losses and gradients of every mini-batch at the weights ``new``; π_old and π_ref are ``old``.

    Forced experts are π_θ's and π_old's; the routers of π_ref choose. All log-probs are over the kept tokens.
    ``divergence_of`` gives the divergence from a teacher at each token, [n, s], from the weights; None: no teacher.
    """
    # Log-probs of every policy; ``behind`` is the one that the loss's ratio divides by.
    parameters = {name: weight.double().requires_grad_() for name, weight in new.items()}
    log_probs, entropy = score(parameters, data.tokens, data.routes, data.kept, data.entropy_over_kept)
    with torch.no_grad():
        old_parameters = {name: weight.double() for name, weight in old.items()}
        old_log_probs, _ = score(old_parameters, data.tokens, data.routes, data.kept)
        ref = old_log_probs
        if data.routes is not None:
            ref, _ = score(old_parameters, data.tokens, kept=data.kept)
    if objective.interpolation:
        behind = proximal(data, log_probs.detach())
    elif objective.bypass:
        behind = data.rollout
    else:
        behind = old_log_probs

    # Weights and masks. In bypass mode the ratio of the loss corrects already, but for REINFORCE, which has none.
    results = corrected(objective, data, train=log_probs.detach() if objective.bypass else behind)
    has_ratio = objective.algorithm not in ("reinforce", "distill")
    has_weights = objective.settings.level is not None and not (objective.bypass and has_ratio)
    result_of_row = [results[index] for index in data.mini_batch_ids.tolist()]
    expected = Expected(
        weights=[result.weights[row] for row, result in enumerate(result_of_row)] if has_weights else None,
        mask=[result.mask[row] for row, result in enumerate(result_of_row)],
        lengths=[result.sequence_lengths[row] for row, result in enumerate(result_of_row)],
        metrics=[result.metrics for result in results],
    )

    divergences = torch.zeros_like(log_probs) if divergence_of is None else divergence_of(parameters)
    for index, result in enumerate(results):
        rows = [row for row, mini_batch in enumerate(data.mini_batch_ids.tolist()) if mini_batch == index]
        total, size, policy = add_up(objective, data, rows, log_probs, behind, ref, entropy, divergences, expected)
        tokens, sequences, accepted_tokens, accepted_sequences = result.denominators[index]
        if objective.settings.denominator == "accepted":
            divisor = divides(objective.aggregation, accepted_tokens, accepted_sequences, objective.scale)
        else:
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
    divergences: torch.Tensor,
    expected: Expected,
) -> tuple[torch.Tensor, float, dict[str, float]]:
    """Add up the terms of the loss of the mini-batch with these rows.

    Args:
        objective: the settings of the loss.
        data: the rollouts.
        rows: the sequences to add up.
        log_probs: [n, s] log π_θ, with its graph.
        behind: [n, s] log-probs of the policy that the ratio divides by.
        ref: [n, s] log π_ref.
        entropy: [n, s] of π_θ, with its graph.
        divergences: [n, s] of π_θ from a teacher, with its graph.
        expected: weights, mask and lengths of the correction.

    Returns:
        The loss before its division, the sum of the terms' absolute values, and metrics of all sampled tokens.
    """
    advantage_of_row = data.advantages
    total = torch.zeros((), dtype=torch.float64)
    size = 0.0
    names = ("log_ratio", "low", "high", "dual", "entropy", "kl", "divergence")
    measured: dict[str, list[float]] = {name: [] for name in names}
    for row in rows:
        tokens = [t for t, valid in enumerate(data.mask[row].tolist()) if valid]
        log_probs_behind = behind[row].detach().tolist()
        losses_and_clips = of_response(
            objective.bounds,
            [log_probs[row, t] for t in tokens],
            [log_probs_behind[t] for t in tokens],
            [advantage_of_row[row]] * len(tokens),
        )
        for t, (loss, clipped) in zip(tokens, losses_and_clips, strict=True):
            penalty = divergence(objective.estimator, log_probs[row, t] - ref[row, t])
            if objective.kl_is_weighted:
                penalty = penalty * (log_probs[row, t] - data.rollout[row, t]).exp()

            # Metrics count rejected tokens too.
            measured["log_ratio"].append(log_probs[row, t].item() - log_probs_behind[t])
            measured["entropy"].append(entropy[row, t].item())
            measured["kl"].append(penalty.item())
            measured["divergence"].append(divergences[row, t].item())
            for name in ("low", "high", "dual"):
                measured[name].append(float(name == clipped))

            if not expected.mask[row][t]:
                continue
            weight = 1.0 if expected.weights is None else expected.weights[row][t]
            length = expected.lengths[row] if objective.aggregation == "seq-mean-token-mean" else 1
            if objective.algorithm == "distill":
                loss = divergences[row, t]
            loss = loss + objective.distillation * divergences[row, t]
            terms = [weight * loss, objective.kl * penalty, -objective.entropy * entropy[row, t]]
            total = total + sum(terms) / length
            size += sum(abs(term.item()) for term in terms) / length

    policy = {name: oracle.mean(values) for name, values in measured.items()}
    policy["highest"] = max(measured["log_ratio"], default=0.0)
    policy["lowest"] = min(measured["log_ratio"], default=0.0)
    return total, size, policy


def divergence(estimator: str, difference: torch.Tensor) -> torch.Tensor:
    """KL penalty of one token by k1, k2 or k3, from log π_θ - log π_ref."""
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    return (-difference).exp() - 1 + difference


def nearest_bound(objective: Objective, data: Data, row: int, new: torch.Tensor, old: torch.Tensor) -> float:
    """The least distance of any decision in one sequence from flipping, at log π_θ and log π_old [n, s]."""
    # The correction's decisions compare π_train with π_rollout, those of the loss π_θ with the policy behind it.
    train = new if objective.bypass else old
    behind = data.rollout if objective.bypass else old
    if objective.interpolation:
        train = behind = proximal(data, new, [row])
    nearest = oracle.distance_to_bounds(
        [train[row].tolist()],
        [data.rollout[row].tolist()],
        [data.mask[row].tolist()],
        objective.settings,
        advantages=[data.advantages[row]],
    )
    if objective.algorithm in ("reinforce", "distill"):
        return nearest

    tokens = data.mask[row]
    log_ratio = (new - behind)[row][tokens]
    if objective.algorithm == "gspo":
        # GSPO clips the ratio of the whole sequence.
        log_ratio = log_ratio.mean(0, keepdim=True)
    bounds = [1 - objective.low, 1 + objective.high]
    if objective.dual:
        bounds.append(objective.dual)
    distances = [abs(float(ratio) - bound) for ratio in log_ratio.exp() for bound in bounds]
    return min([nearest, *distances])
