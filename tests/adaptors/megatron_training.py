"""Megatron-LM's section of docs/adaptors.md, as written: ``pretrain`` of 0.19 in this process, on the CPU.

``initialize_megatron``, which needs a GPU, and ``torch.cuda`` are replaced. Flags come from the command line.
"""

import os
import sys
import tempfile

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import training

from megatron_rc.launch.training.models.cpu import cpu_backend
from tests.adaptors.pages import documented

LENGTH = 8
VOCABULARY = 15
FLAGS = f"""--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --train-iters 4
--max-position-embeddings {LENGTH} --micro-batch-size 2 --global-batch-size 4 --lr 0.01 --eval-iters 1 --eval-interval 2
--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 --dataloader-type external
--distributed-backend gloo --transformer-impl local --use-cpu-initialization --rerun-mode disabled --log-interval 1
--no-masked-softmax-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --no-bias-dropout-fusion
--hidden-dropout 0 --attention-dropout 0 --grpo-kl-beta 0""".split()


def initialize(**_):
    """Initialize one process as ``initialize_megatron`` does, without its GPU."""
    from megatron.core import parallel_state, rerun_state_machine, tensor_parallel

    store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def micro_batches():
    """Random tokens; the mask has integers."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, LENGTH)
    while True:
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        old = -2 - torch.rand(shape, generator=generator)
        yield {
            "tokens": tokens,
            "position_ids": torch.arange(LENGTH).expand(shape),
            "labels": tokens.roll(-1, 1),
            "loss_mask": torch.ones(shape, dtype=torch.long),
            "old_log_probs": old,
            "rollout_log_probs": (old + 0.3 * torch.randn(shape, generator=generator)).clamp(max=0),
            "advantages": torch.randn(2, generator=generator),
        }


def data(*_, **__):
    """Batches for training, and for evaluations in between."""
    return micro_batches(), micro_batches(), None


def model_provider(pre_process=True, post_process=True, config=None, **_):
    """A small model."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    config = config or core_transformer_config_from_args(get_args())
    return GPTModel(config, get_gpt_layer_local_spec(), get_args().padded_vocab_size, LENGTH)


def main():
    """Train, and print the correction's counts of the last step."""
    sys.argv = [sys.argv[0], *FLAGS, *sys.argv[1:]]
    data.is_distributed = True
    training.initialize_megatron = initialize
    with cpu_backend():
        names = {"data": data, "model_type": ModelType.encoder_or_decoder, "model_provider": model_provider}
        correction = documented("Megatron-LM", **names)["correction"]
    bypass = correction.correction.config.bypass_mode
    metrics = correction.correction.step.metrics() if bypass else correction.plan.metrics()
    sys.stdout.write(f"weights {metrics['rollout_corr/rollout_is_mean']}\n")


if __name__ == "__main__":
    main()
