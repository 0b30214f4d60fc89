"""Megatron-LM's RL code gathers the logits of the whole vocabulary to read one log-prob a token; this project does not.

    torchrun --nproc-per-node 4 examples/upstream/selected_log_probs.py --tp 2 --cp 2
    torchrun --nproc-per-node 4 examples/upstream/selected_log_probs.py --tp 2 --pp 2

Megatron-LM issue 6700 proposes log-probs of sharded logits for layouts without context and pipeline parallelism. The
largest tensor is counted on the rank that prints, in numbers.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import next_digit

from megatron_rc.launch.training.models.output import processed
from megatron_rc.parallel import ParallelGroups, SequenceLayout, log_prob_processor

VOCABULARY = 4096
LENGTH = 16
ROWS = 8


class Largest(TorchDispatchMode):
    """Counts the numbers of the largest tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at its result."""
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.numbers = max(self.numbers, tensor.numel())
        return result


def gathered(model: GPTModel, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Log-probs from logits of the whole vocabulary on every tensor-parallel rank; other stages: hidden states."""
    output = model(tokens, positions, None, runtime_gather_output=True)
    if not model.post_process:
        return output
    return output.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def sharded(model: GPTModel, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Log-probs from hidden states and the local rows of the output layer."""
    processor = log_prob_processor(ParallelGroups.from_megatron().tp, chunk_size=8)
    mask = torch.ones_like(labels, dtype=torch.bool)
    output = processed(model, processor, tokens, positions, None, labels=labels, loss_mask=mask)
    return output[0] if model.post_process else output


def compare(tp: int, pp: int, cp: int) -> dict[str, float] | None:
    """The largest tensor of both ways and the largest difference of their log-probs; None on other stages."""
    config = next_digit.settings(tp, pp, cp)
    ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    layers = next_digit.layers(config)
    model = GPTModel(config, layers, VOCABULARY, LENGTH, *ends, position_embedding_type="rope").eval()
    layout = SequenceLayout.padded(ROWS, LENGTH // cp, cp_rank=parallel_state.get_context_parallel_rank(), cp_size=cp)
    whole = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens = layout.cut(whole[:, :-1])
    labels = layout.cut(whole[:, 1:])
    numbers = {}
    found = []
    for name, way in (("gathered", gathered), ("sharded", sharded)):

        def forward_step(_: Any, chunk: Any, way: Any = way) -> tuple[torch.Tensor, Any]:
            return way(chunk, tokens, labels, layout.positions()), lambda values, non_loss_data: values

        with Largest() as largest, torch.no_grad():
            found += get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=[model],
                num_microbatches=1,
                seq_length=LENGTH,
                micro_batch_size=ROWS,
                forward_only=True,
                collect_non_loss_data=True,
            )
        numbers[name] = float(largest.numbers)
    return numbers | {"difference": float((found[0] - found[1]).abs().max())} if found else None


def main() -> None:
    """Print the numbers, on the last rank."""
    parser = argparse.ArgumentParser()
    for name in ("tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    args = parser.parse_args()
    with next_digit.megatron(args.tp, args.pp, args.cp):
        found = compare(args.tp, args.pp, args.cp)
        if found and dist.get_rank() == dist.get_world_size() - 1:
            for name in ("gathered", "sharded"):
                sys.stdout.write(f"{name:9} largest tensor: {found[name]:9,.0f} numbers\n")
            sys.stdout.write(f"largest difference of the log-probs: {found['difference']:.1e}\n")


if __name__ == "__main__":
    main()
