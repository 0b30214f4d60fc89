"""Hints for an unknown flag or key: first other programs' names, then similar spelling."""

from __future__ import annotations

import argparse
import difflib
import itertools

from megatron_rc.launch.flags.parser import long_options
from megatron_rc.launch.flags.torchrun import torchrun_parser

# Names of other programs (verl, OpenRLHF, slime, NeMo-RL, older Megatron-LM) that are not spelled alike, by the flag of
# the same meaning here.
_MEANT = {
    "load-hf": "hf-checkpoint model-path pretrain model-name model-name-or-path from-pretrained path",
    "tokenizer-model": "vocab-file merge-file tokenizer tokenizer-path tokenizer-name",
    "tensor-model-parallel-size": "tp tp-size",
    "pipeline-model-parallel-size": "pp pp-size",
    "context-parallel-size": "cp cp-size ulysses-sequence-parallel-size ring-attn-size",
    "expert-model-parallel-size": "ep ep-size",
    "train-iters": "total-training-steps total-epochs num-epochs num-rollout num-episodes max-num-steps max-steps",
    "grpo-prompts-per-step": "rollout-batch-size train-batch-size",
    "grpo-group-size": "n-samples-per-prompt num-generations-per-prompt num-generations rollout-n n",
    "grpo-iterations": "ppo-epochs max-epochs num-inner-updates",
    "global-batch-size": "ppo-mini-batch-size",
    "micro-batch-size": "micro-train-batch-size train-micro-batch-size",
    "lr": "actor-lr learning-rate actor-learning-rate",
    "clip-grad": "max-norm max-grad-norm grad-clip",
    "grpo-clamp-eps-lower": "clip-ratio clip-ratio-low eps-clip ratio-clip-min cliprange",
    "grpo-clamp-eps-upper": "clip-ratio-high eps-clip-high ratio-clip-max",
    "ppo-dual-clip": "clip-ratio-c eps-clip-c",
    "grpo-entropy-term-weight": "entropy-coeff entropy-coef entropy-loss-coef",
    "grpo-kl-beta": "kl-loss-coef reference-policy-kl-penalty beta",
    "kl-estimator": "kl-loss-type reference-policy-kl-type",
    "gae-lambda": "lambd lam",
    "critic-lr": "critic-learning-rate",
    "critic-load-hf": "critic-pretrain",
    "num-critic-only-steps": "critic-warmup",
    "value-clip": "cliprange-value",
    "kl-in-reward": "kl-coef init-kl-coef",
    "kl-in-reward-estimator": "kl-penalty",
    "reward-scaling": "normalize-reward use-score-scaling use-score-norm",
    "reward-clip": "score-clip",
    "dynamic-sampling": "filter-groups enable-filter-groups",
    "loss-aggregation": "loss-agg-mode",
    "policy-loss": "loss-mode",
    "seq-length": "max-total-sequence-length max-model-len max-len",
    "overlong-prompts": "max-prompt-length prompt-max-len rollout-max-prompt-len",
    "max-response-length": "max-new-tokens generate-max-len rollout-max-response-len",
    "rl-default-temperature": "temperature",
    "rollout-top-p": "top-p",
    "rollout-top-k": "top-k",
    "rollout-min-p": "min-p",
    "rollout-engine": "rollout-backend generation-backend inference-engine",
    "rollout-correction-preset": "use-tis enable-vllm-is-correction use-importance-sampling-correction",
    "rollout-is-threshold": "tis-clip tis-imp-ratio-cap truncated-importance-sampling-ratio",
    "prompt-data": "train-files train-data train-data-path data-path dataset",
    "eval-data": "val-files eval-prompt-data validation-files",
    "input-key": "prompt-key",
    "chat-template-kwargs": "apply-chat-template-kwargs enable-thinking",
    "tools-key": "tool-key",
    "rollout-stop-token-ids": "stop-token-ids",
    "rollout-stop": "stop",
    "rollout-skip-special-tokens": "skip-special-tokens",
    "reward": "rm-type custom-rm-path custom-reward-function remote-rm-url reward-function reward-manager",
    "save": "output-dir default-local-dir checkpoint-dir ckpt-path save-path save-dir",
    "save-interval": "save-freq save-steps save-period",
    "load": "resume resume-mode resume-from resume-from-path resume-from-checkpoint load-checkpoint",
    "eval-interval": "test-freq eval-steps val-period",
    "eval-problems": "eval-iters",
    "eval-samples": "n-samples-per-eval-prompt num-val-generations-per-prompt val-n",
    "runs-dir": "log-root logging-dir",
    "run-name": "exp-name wandb-run-name",
    "wandb-project": "use-wandb project-name",
    "attention-backend": "use-flash-attn use-flash-attention attn-implementation",
    "recompute-granularity": "recompute-activations enable-gradient-checkpointing gradient-checkpointing",
}
_LAUNCHERS = "give it to `python -m megatron_rc.launch`, or to torchrun before the trainer's file"
# Names without a flag here, by the remedy.
_REMEDIES = {
    "use --nproc-per-node": "n-gpus-per-node num-gpus-per-node actor-num-gpus-per-node",
    "use --nnodes": "actor-num-nodes num-nodes",
    "it is always on here: leave it out": "use-mcore-models use-dist-ckpt",
    "use --position-embedding-type rope": "use-rotary-position-embeddings no-position-embedding",
    "it belongs to Megatron-LM's pretraining data; prompts come from --task or --prompt-data: leave it out": (
        "mock-data data-cache-path num-workers no-mmap-bin-files no-create-attention-mask-in-dataloader "
        "tiktoken-pattern reset-position-ids reset-attention-mask eod-mask-loss dataloader-type"
    ),
    "it belongs to Megatron-LM's own training loop, which is not used here: leave it out": (
        "manual-gc manual-gc-interval empty-unused-memory-level exit-duration-in-mins exit-interval log-throughput "
        "log-params-norm log-num-zeros-in-grad log-validation-ppl-to-tensorboard log-memory-to-tensorboard "
        "logging-level no-load-rng no-save-rng dist-ckpt-strictness auto-detect-ckpt-format enable-experimental "
        "data-parallel-random-init rl-persist-cuda-graphs"
    ),
    "it changes only the computation of multi-latent attention, not its result: leave it out": (
        "cache-mla-latents mla-down-proj-fusion"
    ),
    "GPUs are used where there are any, unless --cpu is given": "distributed-backend device",
    "--eval-data names the prompts that are held out": "split",
    "give the GPUs to the servers of --rollout-url by their own flags": "rollout-num-gpus-per-engine rollout-num-gpus",
    "all keys of a row go to the reward function as its record: leave it out": "metadata-key",
    "use --model hybrid": "is-hybrid-model",
    "Mamba layers are not trained here any more, and layers of attention need no pattern: leave it out": (
        "hybrid-layer-pattern hybrid-override-pattern hybrid-attention-ratio hybrid-mlp-ratio"
    ),
}
# Least likeness of similar spellings, by difflib, and of names of which one has more words than the other.
_CLOSE = 0.8
_VERY_CLOSE = 0.9
# Letters of a short form such as --seq-len.
_FEWEST_LETTERS = 3
_OTHERWISE = {name: remedy for remedy, names in _REMEDIES.items() for name in names.split()}
_SOURCES = {name: flag for flag, names in _MEANT.items() for name in names.split()}


def unknown(what: str, name: str, parser: argparse.ArgumentParser) -> str:
    """Sentence about an unknown flag or key, with the one that was probably meant."""
    dashes = "--" if what == "flag" else ""
    return f"unknown {what} {name!r}: {_hint(name.lstrip('-').replace('_', '-').lower(), dashes, parser)}"


def _hint(name: str, dashes: str, parser: argparse.ArgumentParser) -> str:
    remedies = _OTHERWISE | dict.fromkeys(long_options(torchrun_parser()), _LAUNCHERS)
    meant = {known: known for known in long_options(parser) if known} | _SOURCES
    answers = {found: f"did you mean {dashes}{flag}?" for found, flag in meant.items()} | remedies
    # The second part is for nested settings of other programs, such as actor.optim.lr.
    for part in (name, name.rpartition(".")[2]):
        if part in answers:
            return answers[part]
    similar = difflib.get_close_matches(name, answers, n=5, cutoff=_CLOSE)
    close = next((known for known in similar if _is_close(name, known)), None)
    if close is None:
        return "--help-all lists them"
    return f"if --{close} is meant, {answers[close]}" if close in remedies else answers[close]


def _is_close(name: str, known: str) -> bool:
    """Return whether two similar names are alike behind the words that both begin with: --rollout-stop is no -top-p."""
    words = name.split("-")
    known_words = known.split("-")
    pairs = zip(words, known_words, strict=False)
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    rest = "-".join(words[shared:])
    known_rest = "-".join(known_words[shared:])
    if not rest or not known_rest:
        # The beginning of a name, as --tensor-model-parallel; more words usually mean something else.
        return shared > 1 and (not rest or _likeness(name, known) >= _VERY_CLOSE)
    shorter, longer = sorted((rest, known_rest), key=len)
    is_short_form = len(shorter) >= _FEWEST_LETTERS and longer.startswith(shorter)
    return is_short_form or _likeness(rest, known_rest) >= _CLOSE


def _likeness(name: str, known: str) -> float:
    return difflib.SequenceMatcher(None, name, known).ratio()
