"""Vocabularies built from the metadata of a GGUF file: text to token ids as the model's reference tokenizer does it."""

from slm_core.tokenization.build import build_vocab
from slm_core.tokenization.pretokenizers import composes
from slm_core.tokenization.vocab import GgufVocab

__all__ = ["GgufVocab", "build_vocab", "composes"]
