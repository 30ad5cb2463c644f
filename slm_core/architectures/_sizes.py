"""The dimensions of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import EMBEDDING
from slm_core.errors import InvalidModelFile, UnsupportedModel

_MAX_LAYERS = 4096  # far above any model; limits the cost of a hostile count


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
    """Read the dimensions. GGUF's defaults: K = H and D = E / H."""
    return _grouped(keys, keys.size("attention.head_count_kv", keys.size("attention.head_count")), n_ff_key)


def _grouped(keys: Keys, n_kv_heads: int, n_ff_key: str = "feed_forward_length") -> Sizes:
    n_embd, n_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = _head_dim(keys, n_embd, n_heads)
    if n_heads % n_kv_heads:
        raise InvalidModelFile(
            f"{keys.gguf.path}: {n_heads} query heads cannot share {n_kv_heads} key heads evenly"
            f" (metadata '{keys.architecture}.attention.head_count' and 'head_count_kv')"
        )
    return read_plain_sizes(keys, n_kv_heads, head_dim, n_ff_key)


def read_hybrid_sizes(keys: Keys) -> tuple[Sizes, list[bool]]:
    """The dimensions of a model with attention in some blocks, and for each block whether it has attention."""
    n_kv_heads = keys.counts("attention.head_count_kv", read_n_layers(keys))
    head_counts = sorted(set(n_kv_heads) - {0})
    if len(head_counts) != 1:
        raise UnsupportedModel(
            f"{keys.gguf.path}: blocks have {head_counts} key heads (metadata"
            f" '{keys.architecture}.attention.head_count_kv'; accepted: one number, in some blocks)"
        )
    return _grouped(keys, head_counts[0]), [n > 0 for n in n_kv_heads]


def read_sizes_without_attention(keys: Keys) -> Sizes:
    """The dimensions of a model without attention and feed-forward layers, whose keys are 0 or missing."""
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        keys.only(name, 0)
    return Sizes(
        n_layers=read_n_layers(keys),
        n_embd=keys.size("embedding_length"),
        n_vocab=_n_vocab(keys),
        n_ff=0,
        n_heads=0,
        n_kv_heads=0,
        head_dim=0,
    )


def read_n_layers(keys: Keys) -> int:
    """Only the number of blocks."""
    return keys.size("block_count", largest=_MAX_LAYERS)


def read_sizes_by_layer(keys: Keys, slides: Sequence[bool]) -> list[Sizes]:
    """The dimensions of each layer, if key heads and feed-forward widths differ between layers.

    Args:
        keys: read for the dimensions.
        slides: whether each layer has a window. Heads of layers with a window may have another width.
    """
    n_layers, n_heads = len(slides), keys.size("attention.head_count")
    full_width = _equal_lengths(keys, "", None)
    width = _equal_lengths(keys, "_swa", full_width)
    n_kv_heads, n_ff = keys.counts("attention.head_count_kv", n_layers), keys.counts("feed_forward_length", n_layers)
    if not all(n and n_heads % n == 0 for n in n_kv_heads) or not all(n_ff):
        raise InvalidModelFile(
            f"{keys.gguf.path}: blocks have {sorted(set(n_kv_heads))} key heads for {n_heads} query heads, and"
            f" feed-forward widths {sorted(set(n_ff))} (accepted: divisors of {n_heads}; 1 or more)"
        )
    n_embd, n_vocab = keys.size("embedding_length"), _n_vocab(keys)
    return [
        Sizes(n_layers, n_embd, n_ff[i], n_vocab, n_heads, n_kv_heads[i], width if slides[i] else full_width)
        for i in range(n_layers)
    ]


def _equal_lengths(keys: Keys, suffix: str, default: int | None) -> int:
    key_length = keys.size(f"attention.key_length{suffix}", default)
    value_length = keys.size(f"attention.value_length{suffix}", key_length)
    if value_length != key_length:
        raise _unequal(keys, f"value_length{suffix}", value_length, key_length)
    return key_length


def read_plain_sizes(keys: Keys, n_kv_heads: int, head_dim: int, n_ff_key: str = "feed_forward_length") -> Sizes:
    """Read the remaining dimensions."""
    return Sizes(
        n_layers=read_n_layers(keys),
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
        raise _unequal(keys, "value_length", value_dim, head_dim)
    return head_dim


def _unequal(keys: Keys, name: str, value: int, accepted: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"{keys.gguf.path}: metadata '{keys.architecture}.attention.{name}' is {value}, which is unknown here"
        f" (accepted: the {name.replace('value', 'key')}, {accepted})"
    )


def _n_vocab(keys: Keys) -> int:
    if EMBEDDING not in keys.gguf.tensors:
        reason = (
            "it holds no weights, only a vocabulary" if not keys.gguf.tensors else f"tensor {EMBEDDING!r} is missing"
        )
        raise UnsupportedModel(f"{keys.gguf.path}: {reason}")
    return keys.gguf.tensors[EMBEDDING].shape[0]
