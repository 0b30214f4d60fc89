"""Reads model directories with the transformers that is installed where it runs, and prints what it found as JSON.

    python tests/support/read_exports.py TOKENS.pt DIR...

For each directory: log-probs of the tokens in float32, written to DIR/log_probs-VERSION.pt; settings of the config;
the tokenizer's ids of a text; warnings. It runs in other environments too, so it imports nothing of this project.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers

TEXT = "012345"


class Kept(logging.Handler):
    """Keeps what transformers logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def log_probs_of(model, tokens):
    """Log-probs of each token after the first, [b, s - 1]."""
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):  # 1e-6 in transformers; in Megatron and in engines what the file says
            module.variance_epsilon = model.config.rms_norm_eps
    with torch.no_grad():
        log_probs = model(tokens).logits.float().log_softmax(dim=-1)
    return log_probs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


def plain(value):
    """A setting as JSON has it."""
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def read(folder, tokens, kept):
    """Read one directory."""
    kept.lines.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    stored_dtype = str(model.dtype)
    torch.save(log_probs_of(model.float(), tokens), folder / f"log_probs-{transformers.__version__}.pt")
    ends = {name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "config": {name: plain(value) for name, value in vars(model.config).items() if not name.startswith("_")},
        "dtype": stored_dtype,
        "left_out": sorted(name for names in info.values() for name in map(str, names)),
        "generation": ends,
        "tokenizer": [tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)],
        "said": [str(warning.message) for warning in warned] + list(kept.lines),
    }


def main():
    tokens_file, *folders = sys.argv[1:]
    kept = Kept()
    logging.getLogger("transformers").addHandler(kept)
    tokens = torch.load(tokens_file)
    outcomes = {"version": transformers.__version__}
    for folder in folders:
        try:
            outcomes[folder] = read(Path(folder), tokens, kept)
        except Exception as error:  # each directory by itself
            outcomes[folder] = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
