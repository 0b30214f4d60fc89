"""Unpack a GGUF file into a Hugging Face directory, which ``--load-hf`` reads.

    python -m megatron_rc.launch.weights.from_gguf MODEL.gguf DIR

The weights are dequantised to float32; nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.transformers4 import add_earlier_entries, add_earlier_tokenizer_class


def unpack(file: Path, folder: Path) -> None:
    """Write the model, its config and its tokenizer; does nothing if the folder already holds a model."""
    folder = folder.absolute()
    if (folder / "config.json").is_file():
        return
    if not file.is_file():
        raise ConfigurationError(f"{file}: no such file; give a model in the GGUF format")
    for module in ("transformers", "gguf", "accelerate"):
        require(module, "a GGUF file", "gguf")
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    # Without it transformers asks on the terminal whether to run code from the folder.
    source["trust_remote_code"] = False
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model, report = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be unpacked: {' '.join(str(error).split())}") from error
    check_complete(file, report)
    try:
        _write(model, tokenizer, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{folder} cannot be written to: {error}") from error


def check_complete(file: Path, report: Mapping[str, Collection[Any]]) -> None:
    """Refuse a model if transformers filled a part of it with random weights; ``report``: its loading info."""
    for kind, words in (("missing_keys", "lacks"), ("mismatched_keys", "has in another shape")):
        for name in sorted(map(str, report.get(kind, ()))):
            raise ConfigurationError(f"{file} {words} the tensor of {name}: it is damaged, or no model of this kind")


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    # The written weights are not quantised.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    tokenizer.save_pretrained(folder)
    add_earlier_tokenizer_class(folder)
    # config.json comes last: it marks the folder as complete.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        part = Path(name)
        model.save_pretrained(part)
        add_earlier_entries(part)
        for path in sorted(part.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)


def main(argv: Sequence[str] | None = None) -> None:
    """Unpack the file that the command line names."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) != 2:
        sys.exit("usage: python -m megatron_rc.launch.weights.from_gguf MODEL.gguf DIR")
    try:
        unpack(Path(words[0]), Path(words[1]))
    except ConfigurationError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
