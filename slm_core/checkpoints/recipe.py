"""How a directory's weights become those that GGUF files of its architecture hold: what families declare."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints.changes import Change
from slm_core.gguf import PlainValue


@dataclass(frozen=True, slots=True)
class Part:
    """Where a tensor comes from.

    Attributes:
        name: in the directory. "{x}" in it stands for 0 to ``n_stacked``: their tensors become one, (n_stacked, ...).
        change: of its numbers or their order; None where they are the same.
        n_stacked: how many.
        letters: what "{x}" stands for in place of numbers.
        older: where it comes from in directories that have that.
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
        """The same, whose names are after a prefix."""
        older = None if self.older is None else self.older.below(prefix)
        return replace(self, name=prefix + self.name, older=older)


Parts: TypeAlias = Mapping[str, Part]
"""By the name in GGUF files: in full, or after "blk.N."; names in the directory are in full, or after its prefix."""

FREQUENCIES = r"rotary_emb\.inv_freq$"
"""Expression for tensors of old checkpoints that the configuration stands for."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one directory holds. Every named tensor must exist; other tensors are refused, or declared unused.

    Attributes:
        architecture: as GGUF files name it.
        metadata: below that name, or our own.
        model: the tensors outside the blocks.
        blocks: those of each block [L].
        prefix: of the names of a block's tensors; "{i}" is its index.
        tables: tensors that the directory has in another form.
        plain: metadata that is not below the architecture's name.
        numbers: further such metadata, a number for each block, by the tensor that has it there.
        unused: expression for tensors that belong to the model and change nothing here.
        renamed: expressions for how names begin in some directories, and how they begin here.
        subfolders: folders of the directory that hold further tensors; see ``TensorStore``.
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
    renamed: Mapping[str, str] = field(default_factory=dict)
    subfolders: Sequence[str] = ()

    def parts(self, stored: Container[str]) -> dict[str, Part]:
        """Every tensor by the name in GGUF files, with its full name in a directory that has those ``stored``."""
        parts = dict(self.model)
        for i, block in enumerate(self.blocks):
            prefix = self.prefix.format(i=i)
            parts |= {f"blk.{i}.{name}": part.below(prefix) for name, part in block.items()}
        return {name: _as_stored(part, stored) for name, part in parts.items()}

    def number_names(self) -> dict[str, list[str]]:
        """The tensors of ``numbers``, by the name of the metadata, of each block [L]."""
        prefixes = [self.prefix.format(i=i) for i in range(len(self.blocks))]
        return {key: [prefix + name for prefix in prefixes] for key, name in self.numbers.items()}


def _as_stored(part: Part, stored: Container[str]) -> Part:
    return part if part.older is None or part.older.names()[0] not in stored else part.older


def weights(names: Mapping[str, str], change: Change | None = None) -> dict[str, Part]:
    """Weights, by their name in GGUF files, of what the directory names so; both without ``.weight``."""
    return {f"{name}.weight": Part(f"{theirs}.weight", change) for name, theirs in names.items()}


def biases(parts: Parts, *names: str) -> dict[str, Part]:
    """The biases of the named weights of ``parts``, changed as they are; of all where none is named."""
    chosen = names or [name.removesuffix(".weight") for name in parts if name.endswith(".weight")]
    bias_parts = {}
    for name in chosen:
        part = parts[f"{name}.weight"]
        bias_parts[f"{name}.bias"] = Part(f"{part.name.removesuffix('.weight')}.bias", part.change, part.n_stacked)
    return bias_parts


def changed(parts: Parts, change: Change, *names: str) -> dict[str, Part]:
    """``parts``, the weights that are named changed."""
    changed_parts = dict(parts)
    for name in names:
        part = changed_parts[f"{name}.weight"]
        changed_parts[f"{name}.weight"] = Part(part.name, change, part.n_stacked)
    return changed_parts
