"""Flags, with Megatron-LM's names and meanings, and the launch files that hold the same names.

Every flag is declared once, here. A launch file (``--config FILE``) is YAML: one ``name: value`` a line, the name of a
flag without its dashes; it is the base, flags override it. What a combination of flags may be is in ``validation.py``.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_rc.launch.engines.factory import ENGINES
from megatron_rc.launch.engines.rounding import DTYPES
from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.tasks.text import TOKENIZERS
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.loss.aggregation import AGGREGATIONS
from megatron_rc.loss.policy import ALGORITHMS, KL_ESTIMATORS
from megatron_rc.settings.flags import add_rollout_correction_args

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are raised instead of printed."""

    def __init__(self) -> None:
        super().__init__(
            prog="python -m megatron_rc.launch",
            description="PPO with Rollout Correction on Megatron-Core. Flags are Megatron-LM's where it has them.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message[0].lower()}{message[1:]}; --help lists the flags")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Flags and the launch file they name, as one namespace. Values are typed; combinations are not checked here.

    Raises:
        ConfigurationError: an unknown flag or key, a value of the wrong type, or a launch file that cannot be read.
    """
    parser = build_parser()
    known, _ = _config_parser().parse_known_args(argv)
    base = _config_argv(parser, known.config) if known.config else []
    known, _ = _config_parser().parse_known_args([*base, *argv])
    architecture = _architecture_argv(parser, known.load_hf) if known.load_hf else []
    args, unknown = parser.parse_known_args([*architecture, *base, *argv])
    if unknown:
        raise ConfigurationError(_unknown("flag", unknown[0].split("=")[0], parser))
    # The correction's flags override those of the launch file by rules of their own.
    args.launch_file, args.command_line = parser.parse_args(base), parser.parse_args(argv)
    _check_architecture(parser, args, architecture)
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser of every flag of the launcher."""
    parser = _Parser()
    for add in (
        _add_launch_args,
        _add_parallel_args,
        _add_model_args,
        _add_expert_args,
        _add_training_args,
        _add_optimizer_args,
        _add_checkpoint_args,
        _add_logging_args,
        _add_task_args,
        _add_rollout_args,
        _add_loss_args,
        add_rollout_correction_args,
    ):
        add(parser)
    return parser


def find_config(name: str) -> Path:
    """A launch file by path, or by the name of one that the package brings (``count_up``).

    Raises:
        ConfigurationError: there is no such file.
    """
    for path in (Path(name), CONFIGS / "launch" / f"{name}.yaml"):
        if path.is_file():
            return path
    brought = ", ".join(sorted(path.stem for path in (CONFIGS / "launch").glob("*.yaml")))
    raise ConfigurationError(f"--config {name}: no such file; give a path, or one of the names {brought}")


def _config_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=None)
    parser.add_argument("--load-hf", default=None)
    parser.error = _Parser.error.__get__(parser)  # type: ignore[method-assign]
    return parser


def _config_argv(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """The launch file as the flags it stands for."""
    path = find_config(name)
    options = {text[2:]: action for action in parser._actions for text in action.option_strings}
    argv: list[str] = []
    for key, value in _read_mapping(path).items():
        if key not in options or key in ("config", "help"):
            raise ConfigurationError(f"{path}: {_unknown('key', key, parser)}")
        argv += _as_flag(path, key, value, options[key])
    return argv


def _architecture_argv(parser: argparse.ArgumentParser, folder: str) -> list[str]:
    """The model of a Hugging Face directory as the flags it stands for."""
    options = {text[2:]: action for action in parser._actions for text in action.option_strings}
    path = Path(folder) / "config.json"
    return [
        word for name, value in read_architecture(folder).items() for word in _as_flag(path, name, value, options[name])
    ]


def _check_architecture(parser: argparse.ArgumentParser, args: argparse.Namespace, argv: list[str]) -> None:
    """Refuse flags that say something else of the model than its directory."""
    if not argv:
        return
    wanted = vars(parser.parse_args(argv))
    described = [word[2:].split("=")[0].removeprefix("no-").replace("-", "_") for word in argv]
    # A directory that says nothing of experts has none.
    for name in [*described, "num_experts"]:
        if getattr(args, name) != wanted[name]:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {getattr(args, name)} contradicts --load-hf {args.load_hf}, whose model "
                f"has {wanted[name]}: drop the flag"
            )


def _as_flag(path: Path, key: str, value: Any, action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        if value not in ("true", "false"):
            raise ConfigurationError(f"{path}: {key}: {value!r} must be true or false")
        if value == "true":
            return [f"--{key}"]
        return [f"--no-{key}"] if f"--no-{key}" in action.option_strings else []
    if not isinstance(value, str) or value in ("", "null", "true", "false"):
        raise ConfigurationError(f"{path}: {key}: {value!r} must be one number or one string")
    return [f"--{key}={value}"]


def _read_mapping(path: Path) -> dict[str, Any]:
    require("yaml", "--config", "launch")
    import yaml

    class Loader(yaml.BaseLoader):
        """Leaves values as they are written (the flags know their types), and refuses a key that is given twice."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigurationError(f"{path}: the key {key!r} is given twice; keep one")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config {path}: cannot be read as YAML ({reason})") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config {path}: expected lines of `name: value`, got {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _unknown(what: str, name: str, parser: argparse.ArgumentParser) -> str:
    dashes = "--" if what == "flag" else ""
    names = [text[2:] for action in parser._actions for text in action.option_strings if text.startswith("--")]
    close = difflib.get_close_matches(name.lstrip("-").replace("_", "-"), names, n=1)
    hint = f"did you mean {dashes}{close[0]}?" if close else "--help lists them"
    return f"unknown {what} {name!r}: {hint}"


def _switch(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    """A yes/no flag; ``--no-<name>`` takes back what the launch file said."""
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=False, help=text)


def _add_launch_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("launch")
    group.add_argument("--config", metavar="FILE", help="launch file (YAML) that flags override")
    group.add_argument("--run-name", help="name of the folder in runs/; default: the launch file's name, else 'ppo'")
    group.add_argument("--runs-dir", default="runs", metavar="DIR", help="where run folders are written")
    _switch(group, "--cpu", "train on the CPU with gloo even where a CUDA device is found")


def _add_parallel_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, help="TP")
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="PP")
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, help="layers a model chunk (VPP)")
    group.add_argument("--context-parallel-size", type=int, default=1, help="CP")
    group.add_argument("--expert-model-parallel-size", type=int, default=1, help="EP, over the data and CP ranks")
    _switch(group, "--sequence-parallel", "split norms and residuals over the sequence inside the TP group")
    _switch(group, "--use-distributed-optimizer", "split the optimizer state over the data-parallel ranks")
    group.add_argument("--distributed-timeout-minutes", type=int, default=10, help="limit for one collective")


def _add_model_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, required=False, help="transformer layers")
    group.add_argument("--hidden-size", type=int, help="width of the residual stream")
    group.add_argument("--ffn-hidden-size", type=int, help="width of the MLP; default: Megatron-LM's 4·hidden-size")
    group.add_argument("--num-attention-heads", type=int, help="query heads")
    group.add_argument("--kv-channels", type=int, help="width of a head; default: hidden-size / heads")
    _switch(group, "--group-query-attention", "share keys and values between query heads")
    group.add_argument("--num-query-groups", type=int, default=1, help="key/value heads with --group-query-attention")
    group.add_argument("--seq-length", type=int, help="tokens of a sequence: prompt, response and padding")
    group.add_argument("--max-position-embeddings", type=int, help="longest sequence that the model can take")
    group.add_argument(
        "--position-embedding-type", choices=["learned_absolute", "rope"], default="learned_absolute", help="positions"
    )
    group.add_argument("--rotary-base", type=int, default=10000, help="base of the rotary frequencies")
    group.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm", help="kind of norm")
    group.add_argument("--norm-epsilon", type=float, default=1e-5, help="epsilon of the norms")
    _switch(group, "--swiglu", "gated MLP with SiLU instead of GELU")
    _switch(group, "--add-qkv-bias", "a bias in the query, key and value projection alone")
    _switch(group, "--qk-layernorm", "norms on queries and keys")
    _switch(group, "--untie-embeddings-and-output-weights", "an output layer with weights of its own")
    group.add_argument("--disable-bias-linear", action="store_true", help="linear layers without a bias")
    group.add_argument("--init-method-std", type=float, default=0.02, help="std of the initial weights")
    group.add_argument("--attention-dropout", type=float, default=0.0, help="must be 0: the policy would be noisy")
    group.add_argument("--hidden-dropout", type=float, default=0.0, help="must be 0: the policy would be noisy")
    group.add_argument("--vocab-size", type=int, help="tokens of the model; default: the tokenizer's")
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128, help="pads the vocabulary, times TP")
    group.add_argument("--padded-vocab-size", type=int, help="rows of the embedding; default: the padded vocabulary")
    group.add_argument(
        "--transformer-impl",
        choices=["local", "transformer_engine"],
        help="layers; default: transformer_engine on a GPU where it is installed, else local",
    )


def _add_expert_args(parser: argparse.ArgumentParser) -> None:
    # What --num-experts needs is filled in by the checks, which so see what is given without it.
    group = parser.add_argument_group("mixture of experts")
    group.add_argument("--num-experts", type=int, help="experts in the place of each MLP; default: a dense model")
    group.add_argument("--moe-ffn-hidden-size", type=int, help="width of an expert; default: --ffn-hidden-size")
    group.add_argument("--moe-router-topk", type=int, help="experts of each token; default: 2")
    group.add_argument(
        "--moe-router-pre-softmax",
        action=argparse.BooleanOptionalAction,
        help="weigh a token's experts by their softmax over all experts, not over the chosen ones; default: no",
    )
    group.add_argument(
        "--moe-router-load-balancing-type",
        choices=["aux_loss", "none"],
        help="how tokens are spread over the experts; default: aux_loss",
    )
    group.add_argument("--moe-aux-loss-coeff", type=float, help="weight of that loss; default: 0")
    group.add_argument("--moe-z-loss-coeff", type=float, help="weight of the router's z-loss; default: none")
    group.add_argument(
        "--moe-token-dispatcher-type",
        choices=["allgather", "alltoall"],
        help="how tokens reach experts of other ranks; default: allgather",
    )


def _add_training_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, default=1, help="sequences of one forward-backward")
    group.add_argument("--global-batch-size", type=int, help="sequences of one optimizer step, over all ranks")
    group.add_argument("--train-iters", type=int, help="optimizer steps in all, those before a checkpoint included")
    _switch(group, "--bf16", "bfloat16 weights with float32 master weights")
    _switch(group, "--fused-linear-log-probs", "log-probs from hidden states chunk by chunk, without any logits")
    _switch(group, "--calculate-per-token-loss", "let Megatron normalise by tokens; the gradients are the same")
    group.add_argument("--recompute-granularity", choices=["full", "selective"], help="recompute activations")
    group.add_argument("--recompute-method", choices=["uniform", "block"], help="which layers, for 'full'")
    group.add_argument("--recompute-num-layers", type=int, help="layers of a recomputed unit, for 'full'")
    group.add_argument("--seed", type=int, default=1234, help="of weights, prompts and sampling")


def _add_optimizer_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", choices=["adam", "sgd"], default="adam", help="Megatron-Core's optimizer")
    group.add_argument("--lr", type=float, help="highest learning rate")
    group.add_argument("--min-lr", type=float, default=0.0, help="lowest learning rate")
    group.add_argument("--lr-decay-style", choices=["constant", "linear", "cosine"], default="linear", help="schedule")
    group.add_argument("--lr-decay-iters", type=int, help="steps of the decay; default: --train-iters")
    group.add_argument("--lr-warmup-iters", type=int, default=0, help="steps of linear warm-up")
    group.add_argument("--weight-decay", type=float, default=0.01, help="decoupled weight decay")
    group.add_argument("--adam-beta1", type=float, default=0.9, help="decay of the first moment")
    group.add_argument("--adam-beta2", type=float, default=0.999, help="decay of the second moment")
    group.add_argument("--adam-eps", type=float, default=1e-8, help="epsilon of Adam")
    group.add_argument("--sgd-momentum", type=float, default=0.9, help="momentum of SGD")
    group.add_argument("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0 turns clipping off")


def _add_checkpoint_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", metavar="DIR", help="write checkpoints here")
    group.add_argument("--save-interval", type=int, help="optimizer steps between checkpoints; default: at the end")
    group.add_argument("--load", metavar="DIR", help="go on from the newest checkpoint here, if there is one")
    group.add_argument(
        "--load-hf", metavar="DIR", help="start from this Hugging Face directory, which describes the model too"
    )
    group.add_argument(
        "--weights-bridge",
        choices=["mbridge"],
        help="let this library convert weights to and from Hugging Face's; with Transformer Engine's layers",
    )
    group.add_argument("--finetune", action="store_true", help="take the weights of --load alone and start at step 0")
    group.add_argument("--no-save-optim", action="store_true", help="leave the optimizer out of checkpoints")
    group.add_argument("--no-load-optim", action="store_true", help="leave the optimizer of --load alone")


def _add_logging_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument("--log-interval", type=int, default=1, help="steps between two TensorBoard and W&B entries")
    group.add_argument("--tensorboard-dir", metavar="DIR", help="default: tensorboard/ in the run's folder")
    group.add_argument("--wandb-project", help="also log to this Weights & Biases project")
    group.add_argument("--wandb-exp-name", help="the run's name there; default: --run-name")


def _add_task_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("task")
    group.add_argument("--task", default="count_up", help="what is learnt: count_up, sums or reasoning_gym:<data set>")
    group.add_argument(
        "--tokenizer-type",
        choices=TOKENIZERS,
        help="default: HuggingFaceTokenizer with --load-hf or --tokenizer-model, else one token a character",
    )
    group.add_argument("--tokenizer-model", metavar="DIR", help="holds the tokenizer; default: --load-hf")
    _switch(group, "--apply-chat-template", "show problems as turns of a conversation, by the tokenizer's template")
    group.add_argument("--eval-interval", type=int, help="optimizer steps between evaluations; default: none are made")
    group.add_argument("--eval-problems", type=int, help="held-out problems of an evaluation; default: 96")


def _add_rollout_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rollouts")
    group.add_argument("--max-response-length", type=int, help="longest response; default: what the task needs")
    group.add_argument("--grpo-prompts-per-step", type=int, default=32, help="prompts of a rollout batch")
    group.add_argument("--grpo-group-size", type=int, default=2, help="responses sampled for each prompt")
    group.add_argument("--grpo-iterations", type=int, default=2, help="passes over each rollout batch")
    group.add_argument("--rl-default-temperature", type=float, default=1.0, help="of sampling and of log-probs")
    group.add_argument("--rollout-engine", choices=ENGINES, default="transformers", help="what samples responses")
    group.add_argument("--rollout-url", help="of the servers, comma-separated: one a data-parallel replica")
    group.add_argument("--rollout-model", help="name of the served model, where a vLLM server has several")
    group.add_argument(
        "--rollout-weights-dir",
        metavar="DIR",
        help="where servers find new weights; vllm's default: a folder in memory",
    )
    group.add_argument("--rollout-concurrency", type=int, default=64, help="requests that a server gets at once")
    group.add_argument("--rollout-timeout", type=float, default=600.0, help="seconds for one answer, and for the start")
    group.add_argument("--rollout-attempts", type=int, default=6, help="tries of a request before the run ends")
    group.add_argument("--save-rollouts", metavar="DIR", help="write every rollout batch here")
    group.add_argument("--load-rollouts", metavar="DIR", help="train on the rollouts of this folder, without an engine")
    group.add_argument(
        "--rollout-staleness",
        type=int,
        metavar="K",
        help="train on rollouts of weights up to K optimizer steps old (a multiple of the steps that a rollout batch "
        "makes), sampled while training goes on where the engine is another process; with --load-rollouts: older ones "
        "are an error; default: 0, with --load-rollouts no limit",
    )
    _switch(group, "--allow-truncated-sampling", "take rollouts of top_p < 1 or top_k > 0, which are not the policy's")
    _switch(group, "--rl-use-sequence-packing", "train on sequences one after the other, without the padding behind")
    group.add_argument(
        "--rl-sequence-packing-bin-size",
        type=int,
        help="most tokens of a packed micro-batch; default: micro-batch-size · seq-length",
    )
    group.add_argument(
        "--rollout-dtype",
        choices=DTYPES,
        default="bf16",
        help="the rollout engine's weights are rounded to this at every sync (servers: as they were started)",
    )
    group.add_argument(
        "--rollout-check-tolerance",
        type=float,
        metavar="NATS",
        help="mean |difference| of log-probs that ends the run after a weight sync, or fails check_engine; default: by "
        "--rollout-dtype and --bf16",
    )


def _add_loss_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss")
    group.add_argument("--policy-loss", choices=ALGORITHMS, help="objective; default: ppo_clip, or --loss-type")
    group.add_argument("--loss-aggregation", choices=AGGREGATIONS, help="from tokens to one loss; default: token-mean")
    group.add_argument(
        "--loss-scale-factor", type=float, help="what token-sum and seq-mean-token-sum-norm divide by: they need it"
    )
    group.add_argument("--grpo-clamp-eps-lower", type=float, default=0.01, help="PPO clips r below 1 - this")
    group.add_argument("--grpo-clamp-eps-upper", type=float, default=0.01, help="PPO clips r above 1 + this")
    group.add_argument("--ppo-dual-clip", type=float, help="cap of the loss at this · |A| for A < 0; default: none")
    # What is not given is 0 where the correction leaves no room for it: the checks fill these two in.
    group.add_argument("--grpo-kl-beta", type=float, help="weight of the KL to the initial model; default: 0.001")
    group.add_argument("--kl-estimator", choices=KL_ESTIMATORS, help="of that KL; default: k3")
    group.add_argument("--grpo-entropy-term-weight", type=float, help="weight of the entropy bonus; default: 0")
