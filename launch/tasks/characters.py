"""Tokenizers with one token a character, for models that are trained from nothing."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer must have.

    Raises:
        ValueError: it lacks the token.
    """
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the task's tokenizer has no token {token}")
    return found


def character_tokenizer(characters: str) -> Tokenizer:
    """A tokenizer whose vocabulary is ``<pad>``, ``<eos>``, ``<unk>`` and then the characters in their order."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *dict.fromkeys(characters)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer
