"""Vocabularies of GGUF files and directories, with the same ids as the reference tokenizer."""

from slm_core.tokenization.build import build_vocab, has_vocab, model_vocab
from slm_core.tokenization.directory import directory_vocab
from slm_core.tokenization.missing import MissingVocab
from slm_core.tokenization.pretokenizers import composes
from slm_core.tokenization.vocab import GgufVocab

__all__ = ["GgufVocab", "MissingVocab", "build_vocab", "composes", "directory_vocab", "has_vocab", "model_vocab"]
