"""gemma-embedding: EmbeddingGemma. A bidirectional gemma3 with two dense layers after its last norm."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import DENSE, ModelSpec
from slm_core.architectures._tables import Table, linear
from slm_core.architectures.gemma3 import embedding_spec


def spec(keys: Keys) -> ModelSpec:
    """Read a gemma-embedding."""
    whole, dense = embedding_spec(keys), Table()
    for name in DENSE:
        if f"{name}.weight" in keys.gguf.tensors:
            sizes = keys.size(f"{name}_feat_out"), keys.size(f"{name}_feat_in")
            dense |= linear(name, sizes)
        else:
            keys.neutral(f"{name}_feat_out", f"{name}_feat_in")
    return replace(whole, model_tensors={**whole.model_tensors, **dense})
