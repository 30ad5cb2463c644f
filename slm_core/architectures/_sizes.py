"""The dimensions of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import EMBEDDING
from slm_core.errors import InvalidModelFile, UnsupportedModel

_MAX_LAYERS = 4096  # far beyond any model; bounds what a hostile count costs


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dimensions of a decoder; letters as in ``ModelSpec``."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def n_q(self) -> int:
        """Width of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def n_kv(self) -> int:
        """Width of all key heads."""
        return self.n_kv_heads * self.head_dim


def read_sizes(keys: Keys, n_ff_key: str = "feed_forward_length") -> Sizes:
    """Read the dimensions. As GGUF defines it, K is H and D is E / H where the file does not say."""
    n_embd, n_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    n_kv_heads = keys.size("attention.head_count_kv", n_heads)
    head_dim = _head_dim(keys, n_embd, n_heads)
    if n_heads % n_kv_heads:
        raise InvalidModelFile(
            f"{keys.gguf.path}: {n_heads} query heads cannot share {n_kv_heads} key heads evenly"
            f" (metadata '{keys.architecture}.attention.head_count' and 'head_count_kv')"
        )
    return read_plain_sizes(keys, n_kv_heads, head_dim, n_ff_key)


def read_plain_sizes(keys: Keys, n_kv_heads: int, head_dim: int, n_ff_key: str = "feed_forward_length") -> Sizes:
    """Read the dimensions besides those of keys."""
    return Sizes(
        n_layers=keys.size("block_count", largest=_MAX_LAYERS),
        n_embd=keys.size("embedding_length"),
        n_ff=keys.size(n_ff_key),
        n_vocab=_n_vocab(keys),
        n_heads=keys.size("attention.head_count"),
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
    )


def _head_dim(keys: Keys, n_embd: int, n_heads: int) -> int:
    default = n_embd // n_heads or 1
    head_dim = keys.size("attention.key_length", default)
    value_dim = keys.size("attention.value_length", default)
    if value_dim != head_dim:
        raise UnsupportedModel(
            f"{keys.gguf.path}: metadata '{keys.architecture}.attention.value_length' is {value_dim}, which is"
            f" unknown here (accepted: the key_length, {head_dim})"
        )
    return head_dim


def _n_vocab(keys: Keys) -> int:
    if EMBEDDING not in keys.gguf.tensors:
        what = "it holds no weights, only a vocabulary" if not keys.gguf.tensors else f"tensor {EMBEDDING!r} is missing"
        raise UnsupportedModel(f"{keys.gguf.path}: {what}")
    return keys.gguf.tensors[EMBEDDING].shape[0]
