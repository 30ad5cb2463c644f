"""Vocabularies of GGUF files and directories, with the same ids as the reference tokenizer."""

from slm_core.tokenization.build import build_vocab, model_vocab
from slm_core.tokenization.directory import directory_vocab
from slm_core.tokenization.pretokenizers import composes
from slm_core.tokenization.vocab import GgufVocab

__all__ = ["GgufVocab", "build_vocab", "composes", "directory_vocab", "model_vocab"]
