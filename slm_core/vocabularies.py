"""Loads vocabularies of files and directories, without the model or in place of the model's."""

from __future__ import annotations

import os
from pathlib import Path

from slm_core.errors import InvalidOption
from slm_core.gguf import GgufFile
from slm_core.paths import local, source_of
from slm_core.protocols import Vocab
from slm_core.tensor_source import TensorSource


def load_vocab(path: str | os.PathLike[str] | bytes | TensorSource) -> Vocab:
    """The vocabulary of a model; a file or an object may contain only a vocabulary.

    Args:
        path: as for ``load``.

    Raises:
        InvalidModelFile, UnsupportedModel: the file is damaged, or the kind of its vocabulary is unknown.
    """
    from slm_core.tokenization import build_vocab, directory_vocab

    source = source_of(path)
    if isinstance(source, Path) and source.is_dir():
        return directory_vocab(source)
    with GgufFile.open(source) as file:
        return build_vocab(file)


def vocab_for(tokenizer: str | os.PathLike[str] | Vocab, n_vocab: int) -> Vocab:
    """The vocabulary in place of a model's.

    Raises:
        InvalidOption: it is neither a path nor a vocabulary, or has another number of tokens than the model.
        InvalidModelFile, UnsupportedModel: see ``load_vocab``.
    """
    from slm_core.tokenization import directory_vocab

    vocab: Vocab
    if isinstance(tokenizer, str | os.PathLike):
        path = local(tokenizer)
        folder = path.parent if path.name == "tokenizer.json" else path
        vocab = directory_vocab(folder, n_vocab) if folder.is_dir() else load_vocab(path)
    else:
        vocab = tokenizer
    try:
        size = vocab.size
    except AttributeError:
        raise InvalidOption(f"tokenizer={tokenizer!r:.80} (accepted: a path, or a vocabulary)") from None
    if size != n_vocab:
        raise InvalidOption(f"tokenizer has {size} tokens (accepted: {n_vocab}, the number of the model's tokens)")
    return vocab
