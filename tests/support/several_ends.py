"""A tiny GLM-4.5 as its publishers ship it: the tokenizer names one end token, the model's files name three."""

import string

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.published_models import GLM, save_random
from tests.support.recorded_training import COMMON

MARKERS = ["<|endoftext|>", "<|system|>", "<|assistant|>", "<|user|>", "<|observation|>"]
END, SYSTEM, ASSISTANT, USER, OBSERVATION = range(5)
ENDS = [END, USER, OBSERVATION]
CHARACTERS = f"{string.digits}{string.ascii_lowercase}+-*/=?. \n"
TOKENS = [*MARKERS, *CHARACTERS]
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"


def glm_folder(folder, seed=0):
    """Write the model, its generation config and its tokenizer."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=MARKERS[END]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(MARKERS)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=MARKERS[END], pad_token=MARKERS[END])
    fast.chat_template = TEMPLATE
    sizes = GLM | {"vocab_size": len(TOKENS)}
    save_random(transformers.Glm4MoeConfig(**sizes, eos_token_id=ENDS, pad_token_id=END), folder, seed)
    fast.save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=ENDS, pad_token_id=END).save_pretrained(folder)
    return folder


def words_of(folder, *more):
    """Flags of a run on one process that starts from the model."""
    return [*COMMON, f"--load-hf={folder}", f"--runs-dir={folder}/runs", "--rollout-dtype=fp32", *more]
