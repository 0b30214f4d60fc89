"""Type of a rank's share of a model: the base class of Megatron-Core's GPTModel and HybridModel."""

from megatron.core.models.common.language_module.language_module import LanguageModule as ModelChunk

__all__ = ["ModelChunk"]
