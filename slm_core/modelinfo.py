"""Describes the model in a model file, for every backend that loads GGUF files."""

from __future__ import annotations

from collections import Counter

from slm_core.architectures import ModelSpec, read_spec
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType, WeightSource
from slm_core.types import KvType, ModelInfo, Pooling

_POOLINGS = (
    None,
    Pooling.MEAN,
    Pooling.CLS,
    Pooling.LAST,
    None,
)  # by GGUF's numbers; 4: rerankers
_RANK = 4
_NON_GGML_TYPES = {KvType.F8_E4M3: (1, 1), KvType.Q6_0: (32, 26)}
"""KV types that ggml lacks: numbers and bytes of a block."""
EMBEDDING_TENSOR = "token_embd.weight"


def model_info(
    gguf: WeightSource, *, backend: str, device: str, kv_type: KvType = KvType.F16, swa_full: bool = True
) -> ModelInfo:
    """Describe the model in a file.

    Args:
        gguf: the open file; for a vocabulary-only file, numbers of weights are 0 and the quantization is "".
        backend: the backend that runs it, with its tier or build, as in "native (reference)".
        device: the device that runs it.
        kv_type: the default storage type of keys and values.
        swa_full: whether sliding-window layers store all positions, instead of only their window.

    Returns:
        The description; ``reason`` and ``formatter`` are empty, for the caller to fill in.

    Raises:
        UnsupportedModel: a key that every model has is missing; the message names it.
        InvalidModelFile: a value is of the wrong type or below 1.
    """
    architecture = gguf.require("general.architecture", str)
    per_token, per_sequence = _state_bytes(gguf, kv_type, swa_full=swa_full)
    return ModelInfo(
        path=gguf.path,
        backend=backend,
        architecture=architecture,
        name=gguf.get("general.name", str, ""),
        n_params=sum(tensor.n_elements for tensor in gguf.tensors.values()),
        n_layers=_n_layers(gguf, architecture),
        n_embd=_size(gguf, f"{architecture}.embedding_length"),
        n_vocab=_n_vocab(gguf),
        n_ctx_train=_size(gguf, f"{architecture}.context_length"),
        quantization=main_weight_type(gguf),
        n_bytes=sum(tensor.n_bytes for tensor in gguf.tensors.values()),
        fingerprint=gguf.fingerprint(),
        chat_template=chat_template(gguf),
        device=device,
        chat_templates=further_templates(gguf),
        state_bytes_per_token=per_token,
        state_bytes_per_sequence=per_sequence,
        pooling=pooling(gguf),
        ranks=gguf.get(f"{architecture}.pooling_type", int, 0) == _RANK,
    )


def main_weight_type(gguf: WeightSource) -> str:
    """The weight type with the most bytes in the file ("Q4_K"), or "" without tensors."""
    n_bytes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        n_bytes[tensor.ggml_type.name] += tensor.n_bytes
    return max(n_bytes, key=n_bytes.__getitem__, default="")


def chat_template(gguf: WeightSource) -> str | None:
    """The file's main chat template."""
    return gguf.get("tokenizer.chat_template", str, None)


def further_templates(gguf: WeightSource) -> dict[str, str]:
    """Additional templates of the file, by name."""
    names = gguf.get("tokenizer.chat_templates", list[str], [])
    return {name: gguf.require(f"tokenizer.chat_template.{name}", str) for name in names if name != "default"}


def pooling(gguf: WeightSource) -> Pooling | None:
    """The file's pooling of embeddings; None if the file has none.

    Raises:
        UnsupportedModel: an unknown pooling.
    """
    key = f"{gguf.require('general.architecture', str)}.pooling_type"
    number = gguf.get(key, int, 0)
    if not 0 <= number < len(_POOLINGS):
        raise UnsupportedModel(
            f"{gguf.path}: metadata {key!r} is {number} (accepted: 0 none, 1 mean, 2 cls, 3 last, 4 rank)"
        )
    return _POOLINGS[number]


def _known_spec(gguf: WeightSource) -> ModelSpec | None:
    """The spec of the model's architecture; None if it is unknown or invalid, which engines report."""
    try:
        return read_spec(gguf)
    except (UnsupportedModel, InvalidModelFile):
        return None


def _state_bytes(gguf: WeightSource, kv_type: KvType, *, swa_full: bool) -> tuple[int | None, int | None]:
    """Bytes of a context per token, and additional bytes per sequence."""
    spec = _known_spec(gguf)
    if spec is None:
        return None, None
    in_windows = {} if swa_full else spec.kv_values_in_windows
    per_token = spec.kv_values_per_token - sum(in_windows.values())
    window_bytes = sum(_bytes_of((window - 1) * n, kv_type) for window, n in in_windows.items())
    return _bytes_of(per_token, kv_type), window_bytes + _bytes_of(spec.state_values_per_sequence, KvType.F32)


def _bytes_of(n_values: int, kv_type: KvType) -> int:
    if kv_type in _NON_GGML_TYPES:
        block_size, block_bytes = _NON_GGML_TYPES[kv_type]
    else:
        ggml_type = GgmlType[kv_type.name]
        block_size, block_bytes = ggml_type.block_size, ggml_type.block_bytes
    return n_values // block_size * block_bytes


def _size(gguf: WeightSource, key: str) -> int:
    size = gguf.require(key, int)
    if size < 1:
        raise InvalidModelFile(f"{gguf.path}: metadata {key!r} is {size} (accepted: 1 or more)")
    return size


def _n_layers(gguf: WeightSource, architecture: str) -> int:
    """The number of transformer blocks, without blocks for multi-token prediction."""
    n_blocks = _size(gguf, f"{architecture}.block_count")
    return max(1, n_blocks - max(0, gguf.get(f"{architecture}.nextn_predict_layers", int, 0)))


def _n_vocab(gguf: WeightSource) -> int:
    """The rows of the embedding table, equal to the number of logits; without a table, the length of the token list."""
    if EMBEDDING_TENSOR in gguf.tensors:
        return gguf.tensors[EMBEDDING_TENSOR].shape[0]
    return len(gguf.require("tokenizer.ggml.tokens", list[str]))
