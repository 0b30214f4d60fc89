"""Model and data of ``own_loop.py``: a tiny GPT, and rollouts of digits that count up. Replace them by your own."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron_rc import group_advantages

DIGITS = 8
LENGTH = 16
ROWS = 64
GIVEN = ("rollout_log_probs", "response_mask", "advantages")
PROMPTS = torch.arange(ROWS) // 8
# The engine: the probability that digit j follows digit i. It takes no new weights.
ENGINE = torch.randn(DIGITS, DIGITS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ENGINE = (ENGINE / 2).softmax(1)


def sample(batch: int) -> dict[str, torch.Tensor]:
    """A rollout batch, [ROWS, LENGTH] each, the same on every rank: 8 responses to each of 8 prompts of one digit.

    ``tokens`` are the model's input, and ``labels`` the tokens shifted left by one. The other tensors are about the
    labels: the correction's inputs GIVEN (``response_mask`` is True for sampled labels), and ``right`` for right ones.
    """
    dice = torch.Generator().manual_seed(batch)
    tokens = PROMPTS.unsqueeze(1)
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, torch.multinomial(ENGINE[tokens[:, -1]], 1, generator=dice)], 1)
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:]
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=dice)
    right = mask & (labels == (inputs + 1) % DIGITS)
    advantages = group_advantages(right.sum(1) / mask.sum(1), PROMPTS).float().unsqueeze(1).expand(mask.shape)
    found = {"tokens": inputs, "labels": labels, "response_mask": mask, "right": right, "advantages": advantages}
    return found | {"rollout_log_probs": ENGINE.log()[inputs, labels].float()}


def share_of_right(local: list[dict[str, torch.Tensor]], log_probs: list[torch.Tensor], group: Any) -> float:
    """The mean probability under the policy of the right digits in these micro-batches, over all ranks of the group."""
    chosen = [values[data["right"]].double().exp() for data, values in zip(local, log_probs, strict=True)]
    sums = torch.stack([values.new_tensor([values.sum(), len(values)]) for values in chosen]).sum(0)
    dist.all_reduce(sums, group=group)
    return float(sums[0] / sums[1])


def show(batch: int, metrics: dict[str, float]) -> None:
    """Print a line, on the last rank, which belongs to the last pipeline stage."""
    if dist.get_rank() == dist.get_world_size() - 1:
        names = ("right", "rollout_corr/kl", "rollout_corr/rollout_is_mean", "loss/total", "grad_norm")
        found = [f"{name} {metrics[name]:.4f}" for name in names if name in metrics]
        sys.stdout.write(f"batch {batch}  " + "  ".join(found) + "\n")


def draw(weight: torch.Tensor) -> None:
    """Draw initial weights that depend on the shape alone, so that every layout begins with the same weights."""
    torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(weight.numel()))


def settings(tp: int, pp: int, cp: int) -> TransformerConfig:
    """A config of two layers in float32, split as the arguments say."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=torch.cuda.is_available(),
        use_cpu_initialization=True,
        init_method=draw,
        output_layer_init_method=draw,
    )


def layers(config: TransformerConfig) -> Any:
    """Transformer Engine's layers on a GPU; without one Megatron's, with a norm and an attention that allow CP."""
    if torch.cuda.is_available():
        return get_gpt_layer_with_transformer_engine_spec()
    from megatron_rc.launch.training.models.local_layers import LocalAttention, LocalNorm

    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = LocalNorm
    spec.submodules.self_attention.submodules.core_attention = LocalAttention
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=LocalNorm)


def check(ranks: int, tp: int, pp: int, cp: int) -> None:
    """Exit with one sentence, on every rank alike, if the tiny model or its batch cannot be split so."""
    possible = tp in (1, 2, 4) and pp in (1, 2) and cp in (1, 2, 4, 8)
    if not possible or ranks not in [dp * tp * pp * cp for dp in (1, 2, 4)]:
        sys.exit(
            f"--tp {tp} --pp {pp} --cp {cp} on {ranks} processes of torchrun: tp may be 1, 2 or 4, pp 1 or 2, "
            "cp 1, 2, 4 or 8, and --nproc-per-node their product, twice that or four times"
        )


@contextlib.contextmanager
def megatron(tp: int, pp: int, cp: int) -> Iterator[None]:
    """Megatron's process groups over torchrun's processes; on CPUs without a GPU."""
    check(int(os.environ.get("WORLD_SIZE", 0)), tp, pp, cp)
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            from megatron_rc.launch.training.models.cpu import cpu_backend

            stack.enter_context(cpu_backend())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
        dist.destroy_process_group()
