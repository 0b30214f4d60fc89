"""Tokenizers and ends of families as their publishers ship them, over bytes alone.

Special tokens and the entries that name them are the publishers' own. The vocabularies are the 256 bytes and the
special tokens; templates are shortened to their turns. Kimi-K2's own tokenizer is code: it has the ``tokenizer.json``
that the documents ask for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.published_configs import PUBLISHED

BYTES = 256
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Special tokens of a model, by what names them.

    ``of_config`` and ``of_generation`` are the end tokens of these files; one of them as a number, several as a list.
    """

    config: str  # the model's name in ``PUBLISHED``
    tokenizer_class: str
    special: tuple[str, ...]  # in the order of their ids
    names: dict[str, str]  # entries of ``tokenizer_config.json``
    of_config: tuple[str, ...]
    of_generation: tuple[str, ...]
    padding: str | None  # ``pad_token_id`` of both configs
    template: str
    prompt: str  # what the template writes for the user's text "12" and the next turn
    is_own_file: bool = False  # whether the template is in ``chat_template.jinja``
    generation: dict[str, Any] = field(default_factory=dict)  # further entries of ``generation_config.json``

    def id_of(self, token: str) -> int:
        return BYTES + self.special.index(token)

    def entry(self, tokens: tuple[str, ...]) -> int | list[int]:
        ids = [self.id_of(token) for token in tokens]
        return ids[0] if len(ids) == 1 else ids


TOKENS = {
    "phi-3": Tokens(
        config="phi-4",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        names={"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        of_config=("<|endoftext|>",),
        of_generation=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        padding="<|endoftext|>",
        template=(
            "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + "
            "'<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
            "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}"
            "{% endif %}"
        ),
        prompt="<|user|>\n12<|end|>\n<|assistant|>\n",
    ),
    "phi-4": Tokens(
        config="phi-4",
        tokenizer_class="GPT2Tokenizer",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|dummy_85|>"),
        names={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|dummy_85|>"},
        of_config=("<|im_end|>",),
        of_generation=("<|im_end|>",),
        padding="<|dummy_85|>",
        template=(
            "{% for message in messages %}{{'<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + "
            "'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
        ),
        prompt="<|im_start|>user<|im_sep|>12<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    "seed-oss": Tokens(
        config="seed-oss",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<seed:bos>", "<seed:pad>", "<seed:eos>", "<seed:think>", "</seed:think>"),
        names={"bos_token": "<seed:bos>", "eos_token": "<seed:eos>", "pad_token": "<seed:pad>"},
        of_config=("<seed:eos>",),
        of_generation=("<seed:eos>",),
        padding="<seed:pad>",
        template=(
            "{% for message in messages %}{{ '<seed:bos>' + message['role'] + '\n' + message['content'] + "
            "'<seed:eos>' }}{% endfor %}{% if add_generation_prompt %}{{ '<seed:bos>assistant\n' }}{% endif %}"
        ),
        prompt="<seed:bos>user\n12<seed:eos><seed:bos>assistant\n",
        is_own_file=True,
        generation={"temperature": 1.1, "top_p": 0.95},
    ),
    "smollm3": Tokens(
        config="smollm3",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|finetune_right_pad_id|>"),
        names={"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        of_config=("<|im_end|>",),
        of_generation=("<|im_end|>",),
        padding="<|finetune_right_pad_id|>",
        template=CHATML,
        prompt="<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n",
        is_own_file=True,
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.95},
    ),
    "olmo-2": Tokens(
        config="olmo-2",
        tokenizer_class="GPT2Tokenizer",
        special=("<|endoftext|>", "<|pad|>"),
        names={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
        of_config=("<|endoftext|>",),
        of_generation=("<|endoftext|>",),
        padding="<|pad|>",
        template=(
            "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + "
            "message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + "
            "'\n' }}{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + eos_token + "
            "'\n' }}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
            "{% endfor %}"
        ),
        prompt="<|endoftext|><|user|>\n12\n<|assistant|>\n",
    ),
    "olmo-3": Tokens(
        config="olmo-3",
        tokenizer_class="GPT2Tokenizer",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"),
        names={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
        of_config=("<|endoftext|>",),
        of_generation=("<|im_end|>", "<|endoftext|>"),
        padding="<|pad|>",
        template=CHATML,
        prompt="<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n",
        is_own_file=True,
        generation={"temperature": 0.6, "top_p": 0.95},
    ),
    "glm-4-0414": Tokens(
        config="glm-4-0414",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        names={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        of_config=("<|endoftext|>", "<|user|>", "<|observation|>"),
        of_generation=("<|endoftext|>", "<|user|>", "<|observation|>"),
        padding="<|endoftext|>",
        template=(
            "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
        prompt="[gMASK]<sop><|user|>\n12<|assistant|>\n",
    ),
    "qwen1.5-moe": Tokens(
        config="qwen1.5-moe",
        tokenizer_class="Qwen2Tokenizer",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        names={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        of_config=("<|im_end|>",),
        of_generation=("<|im_end|>", "<|endoftext|>"),
        padding="<|endoftext|>",
        template=CHATML,
        prompt="<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n",
        generation={"do_sample": True, "repetition_penalty": 1.05, "top_p": 0.8},
    ),
    "kimi-k2": Tokens(
        config="deepseek-v3",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        names={"bos_token": "[BOS]", "eos_token": "[EOS]"},
        of_config=("[EOS]",),
        of_generation=("<|im_end|>",),
        padding=None,
        template=(
            "{% for message in messages %}{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' + "
            "message['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}"
            "{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
        ),
        prompt="<|im_user|>user<|im_middle|>12<|im_end|><|im_assistant|>assistant<|im_middle|>",
        generation={"max_length": 131072},
    ),
    "gpt-oss": Tokens(
        config="gpt-oss",
        tokenizer_class="PreTrainedTokenizerFast",
        special=(
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
            "<|call|>",
        ),
        names={"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        of_config=("<|return|>",),
        of_generation=("<|return|>", "<|endoftext|>", "<|call|>"),
        padding="<|endoftext|>",
        template=(
            "{% for message in messages %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + "
            "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        ),
        prompt="<|start|>user<|message|>12<|end|><|start|>assistant",
        is_own_file=True,
        generation={"do_sample": True},
    ),
}


def write_tokenizer(folder: Path, tokens: Tokens) -> None:
    """Write the tokenizer's files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(tokens.special))
    inner.save(str(folder / "tokenizer.json"))
    details = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    entries: dict[str, Any] = {
        "added_tokens_decoder": {str(tokens.id_of(token)): {"content": token} | details for token in tokens.special},
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": tokens.tokenizer_class,
        **tokens.names,
    }
    if tokens.is_own_file:
        (folder / "chat_template.jinja").write_text(tokens.template)
    else:
        entries["chat_template"] = tokens.template
    (folder / "tokenizer_config.json").write_text(json.dumps(entries, indent=2))
    if tokens.tokenizer_class in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        (folder / "vocab.json").write_text(json.dumps({character: index for index, character in enumerate(alphabet)}))
        (folder / "merges.txt").write_text("#version: 0.2\n")


def write_published(folder: Path, name: str) -> transformers.PretrainedConfig:
    """Write configs and tokenizer of a model as published, and return its config in transformers."""
    tokens = TOKENS[name]
    write_tokenizer(folder, tokens)
    special: dict[str, Any] = {"pad_token_id": None if tokens.padding is None else tokens.id_of(tokens.padding)}
    if "bos_token" in tokens.names:
        special["bos_token_id"] = tokens.id_of(tokens.names["bos_token"])
    entries = PUBLISHED[tokens.config] | {"vocab_size": BYTES + len(tokens.special)} | special
    entries["eos_token_id"] = tokens.entry(tokens.of_config)
    (folder / "config.json").write_text(json.dumps(entries, indent=2))
    generation = {"_from_model_config": True, **special, "eos_token_id": tokens.entry(tokens.of_generation)}
    (folder / "generation_config.json").write_text(json.dumps(generation | tokens.generation, indent=2))
    if name == "kimi-k2":
        (folder / "config.json").write_text(json.dumps(entries | {"model_type": "kimi_k2"}, indent=2))
    return transformers.CONFIG_MAPPING[entries["model_type"]].from_dict(entries)
