"""Builds the vocabulary of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slm_core.checkpoints import Checkpoint, vocabulary_of
from slm_core.errors import InvalidModelFile
from slm_core.foreign import reported
from slm_core.tokenization.charsmap import CharsMap
from slm_core.tokenization.directory import NO_TOKENIZER, directory_vocab
from slm_core.tokenization.missing import MissingVocab
from slm_core.tokenization.sentencepiece import SentencePieceNormalizer
from slm_core.tokenization.spec import MODEL_KEY, NO_VOCAB, VocabSpec, read_spec
from slm_core.tokenization.special import SpecialTokens, read_strips
from slm_core.tokenization.vocab import Encoder, GgufVocab

if TYPE_CHECKING:
    from slm_core.gguf import GgufFile
    from slm_core.protocols import Vocab

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"


def has_vocab(source: GgufFile | Checkpoint) -> bool:
    """Whether an open model has a vocabulary.

    Raises:
        InvalidModelFile: a GGUF file lacks ``tokenizer.ggml.model``.
    """
    if isinstance(source, Checkpoint):
        return vocabulary_of(source.path).is_file()
    return source.require(MODEL_KEY, str) not in NO_VOCAB


def model_vocab(source: GgufFile | Checkpoint, n_vocab: int) -> Vocab:
    """The vocabulary of an open model; ``MissingVocab`` if it has none.

    Args:
        source: the model; it is not needed afterwards.
        n_vocab: the number of its logits V.

    Raises:
        UnsupportedModel: the kind of its vocabulary is unknown.
        InvalidModelFile: the vocabulary contradicts itself, or has more tokens than the model.
    """
    if not has_vocab(source):
        reason = (NO_TOKENIZER,) if isinstance(source, Checkpoint) else ()
        return MissingVocab(str(source.path), n_vocab, *reason)
    if isinstance(source, Checkpoint):
        return directory_vocab(source.path, n_vocab, source.ends)
    return build_vocab(source)


def build_vocab(gguf: GgufFile) -> GgufVocab:
    """Build the vocabulary that a file's ``tokenizer.ggml.*`` metadata describes.

    Nothing is cached on disk: the ``tokenizers`` library builds a model from the file's tokens and merges faster than
    it loads a saved one.

    Args:
        gguf: an open file; it is not needed afterwards.

    Raises:
        UnsupportedModel: the file has no vocabulary, or one of an unknown kind.
        InvalidModelFile: the vocabulary contradicts itself.
    """
    spec = read_spec(gguf)
    with reported(InvalidModelFile, f"{spec.source}: no vocabulary can be made of its tokens"):
        encoder = _encoder(gguf, spec)
    return GgufVocab(spec, encoder, SpecialTokens(spec, read_strips(gguf, spec)))


def _encoder(gguf: GgufFile, spec: VocabSpec) -> Encoder:
    if spec.pre is not None:
        from slm_core.tokenization.bpe import BytePairs

        return BytePairs(spec, gguf, spec.pre)
    if spec.model == "llama":
        from slm_core.tokenization.spm import SentencePieceBpe

        return SentencePieceBpe(spec, _normalizer(gguf, spec))
    if spec.model == "rwkv":
        from slm_core.tokenization.rwkv import LongestBytes

        return LongestBytes(spec)
    if "unknown" not in spec.special:
        raise InvalidModelFile(f"{spec.source}: tokenizer.ggml.unknown_token_id is missing")
    if spec.model == "bert":
        from slm_core.tokenization.wordpiece import WordPiece

        return WordPiece(spec, gguf, spec.special["unknown"])
    from slm_core.tokenization.unigram import Unigram

    return Unigram(spec, _normalizer(gguf, spec), spec.special["unknown"])


def _normalizer(gguf: GgufFile, spec: VocabSpec) -> SentencePieceNormalizer:
    blob = gguf.get(_CHARSMAP, np.ndarray, np.zeros(0, np.uint8))
    if blob.dtype.itemsize != 1:
        raise InvalidModelFile(f"{spec.source}: {_CHARSMAP} is an array of {blob.dtype}, not of bytes")
    return SentencePieceNormalizer(
        CharsMap(blob.tobytes(), spec.source),
        add_space_prefix=spec.add_space_prefix,
        remove_extra_whitespaces=spec.remove_extra_whitespaces,
    )
