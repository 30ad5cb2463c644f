"""Recipes of families: the conversion of a directory's tensors to the tensors of a GGUF file."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints.changes import Change
from slm_core.checkpoints.packed import Packing
from slm_core.gguf import PlainValue


@dataclass(frozen=True, slots=True)
class Part:
    """The source of a tensor.

    Attributes:
        name: its name in the directory. "{x}" stands for 0 to ``n_stacked`` - 1: the tensors are stacked into one.
        change: conversion of its values or their order; None for none.
        n_stacked: number of stacked tensors; 0 for a single tensor.
        letters: replacements for "{x}", instead of numbers.
        older: the source in directories of an older form, used if it exists.
    """

    name: str
    change: Change | None = None
    n_stacked: int = 0
    letters: str = ""
    older: Part | None = None

    def names(self) -> list[str]:
        """The tensors of the directory."""
        each = self.letters or [str(i) for i in range(self.n_stacked)]
        return [self.name.replace("{x}", x) for x in each] if self.n_stacked else [self.name]

    def below(self, prefix: str) -> Part:
        """The same source with a prefix before its names."""
        older = None if self.older is None else self.older.below(prefix)
        return replace(self, name=prefix + self.name, older=older)


Parts: TypeAlias = Mapping[str, Part]
"""Sources by GGUF name. In a block, GGUF names follow "blk.N." and names in the directory follow its prefix."""

FREQUENCIES = r"rotary_emb\.inv_freq$"
"""Expression for tensors of old checkpoints whose values follow from the configuration."""


_MTP = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
_PROJECTION = "nextn.eh_proj.weight"
_SHARED = ("nextn.shared_head_head.weight", "nextn.embed_tokens.weight")
"""Tensors that an MTP block may share with the model."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content of a directory. Every named tensor must exist; other tensors must be declared unused.

    Attributes:
        architecture: its name in GGUF files.
        metadata: keys below the architecture's name, or our additional keys.
        model: the tensors outside the blocks.
        blocks: the tensors of each block [L].
        prefix: prefix of a block's tensor names; "{i}" is the block's index.
        tables: tensors computed from the configuration.
        plain: keys that are not below the architecture's name.
        numbers: keys with one number per block, and the name of the tensor that holds it in each block.
        unused: expression for tensors of the model that have no effect here.
        unread: tensors that have no effect here, but that GGUF files have, by all of their names there.
        renamed: expressions for prefixes of names in some directories, with their replacements.
        subfolders: folders of the directory with additional tensors; see ``TensorStore``.
        packing: how matrices of integers are packed; see ``TensorStore``.
        mtp_blocks: the blocks after the last one, for multi-token prediction, if the directory has them.
        rank_head: the tensors of the head in directories of rerankers; none if the family has no rerankers.
        rank_metadata: additional keys of rerankers.
    """

    architecture: str
    metadata: Mapping[str, PlainValue]
    model: Parts
    blocks: Sequence[Parts]
    prefix: str = "model.layers.{i}."
    tables: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    plain: Mapping[str, PlainValue] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    unused: str = FREQUENCIES
    unread: Parts = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    subfolders: Sequence[str] = ()
    packing: Packing | None = None
    mtp_blocks: Sequence[Parts] = ()
    rank_head: Parts = field(default_factory=dict)
    rank_metadata: Mapping[str, PlainValue] = field(default_factory=dict)

    def as_stored(self, stored: Container[str]) -> Recipe:
        """The recipe of a directory with these ``stored`` tensors: its MTP blocks are among the blocks, or left out.

        Some models are published with MTP blocks, but transformers saves none. Tensors that a block shares with the
        model may be missing.
        """
        n, n_mtp = len(self.blocks), len(self.mtp_blocks)
        prefixes = [self.prefix.format(i=n + i) for i in range(n_mtp)]
        if not n_mtp or prefixes[0] + self.mtp_blocks[0][_PROJECTION].name not in stored:
            return replace(self, mtp_blocks=())
        blocks = [
            {key: part for key, part in block.items() if key not in _SHARED or prefix + part.name in stored}
            for prefix, block in zip(prefixes, self.mtp_blocks, strict=True)
        ]
        counts: dict[str, PlainValue] = {"block_count": n + n_mtp, "nextn_predict_layers": n_mtp}
        return replace(self, blocks=[*self.blocks, *blocks], mtp_blocks=(), metadata={**self.metadata, **counts})

    def parts(self, stored: Container[str]) -> dict[str, Part]:
        """The source of every tensor, by GGUF name, in a directory with these ``stored`` tensors."""
        parts = dict(self.model)
        for i, block in enumerate(self.blocks):
            prefix = self.prefix.format(i=i)
            parts |= {f"blk.{i}.{name}": part.below(prefix) for name, part in block.items()}
        return {name: _as_stored(part, stored) for name, part in parts.items()}

    def number_names(self) -> dict[str, list[str]]:
        """For each key of ``numbers``, the tensor names of all blocks [L]."""
        prefixes = [self.prefix.format(i=i) for i in range(len(self.blocks))]
        return {key: [prefix + name for prefix in prefixes] for key, name in self.numbers.items()}


def mtp(block: Parts) -> dict[str, Part]:
    """An MTP block: a transformer block, and the tensors that make its input and its logits (DeepSeek-V3)."""
    return {**block, **weights(_MTP)}


def _as_stored(part: Part, stored: Container[str]) -> Part:
    return part if part.older is None or part.older.names()[0] not in stored else part.older


def weights(names: Mapping[str, str], change: Change | None = None) -> dict[str, Part]:
    """Sources of weights. ``names`` maps names in GGUF files to names in the directory, both without ``.weight``."""
    return {f"{name}.weight": Part(f"{theirs}.weight", change) for name, theirs in names.items()}


def biases(parts: Parts, *names: str) -> dict[str, Part]:
    """Sources of biases for the named weights of ``parts``, with the weights' conversions; without names, for all."""
    chosen = names or [name.removesuffix(".weight") for name in parts if name.endswith(".weight")]
    bias_parts = {}
    for name in chosen:
        part = parts[f"{name}.weight"]
        bias_parts[f"{name}.bias"] = Part(f"{part.name.removesuffix('.weight')}.bias", part.change, part.n_stacked)
    return bias_parts


def changed(parts: Parts, change: Change, *names: str) -> dict[str, Part]:
    """``parts`` with a conversion of the named weights."""
    changed_parts = dict(parts)
    for name in names:
        part = changed_parts[f"{name}.weight"]
        changed_parts[f"{name}.weight"] = Part(part.name, change, part.n_stacked)
    return changed_parts
