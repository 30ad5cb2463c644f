"""The subprocess of ``probe``: ``probe_worker.py FOLDER REPACK``. It crashes, or exits with 0.

It needs only llama-cpp-python and the standard library. The model has no vocabulary, and all weights are zero: the
crash does not depend on numbers.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path
from typing import Any

_N_EMBD, _N_FF, _N_VOCAB, _ALIGNMENT = 256, 512, 64, 32
_F32, _Q4_0, _Q8_0, _Q4_K, _Q6_K = 0, 2, 8, 12, 14
_BLOCK = {_F32: (1, 4), _Q4_0: (32, 18), _Q8_0: (32, 34), _Q4_K: (256, 144), _Q6_K: (256, 210)}  # elements, bytes
_TENSORS = (
    ("token_embd.weight", _Q8_0, (_N_EMBD, _N_VOCAB)),
    ("output_norm.weight", _F32, (_N_EMBD,)),
    ("blk.0.attn_norm.weight", _F32, (_N_EMBD,)),
    ("blk.0.attn_q.weight", _Q4_0, (_N_EMBD, _N_EMBD)),
    ("blk.0.attn_k.weight", _Q4_0, (_N_EMBD, _N_EMBD)),
    ("blk.0.attn_v.weight", _Q8_0, (_N_EMBD, _N_EMBD)),
    ("blk.0.attn_output.weight", _Q8_0, (_N_EMBD, _N_EMBD)),
    ("blk.0.ffn_norm.weight", _F32, (_N_EMBD,)),
    ("blk.0.ffn_gate.weight", _Q4_K, (_N_EMBD, _N_FF)),
    ("blk.0.ffn_up.weight", _Q4_K, (_N_EMBD, _N_FF)),
    ("blk.0.ffn_down.weight", _Q6_K, (_N_FF, _N_EMBD)),
)
_NUMBERS = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": _N_EMBD,
    "llama.feed_forward_length": _N_FF,
    "llama.attention.head_count": 4,
    "llama.vocab_size": _N_VOCAB,
}


def write_model(path: Path) -> None:
    """Write a llama model with one layer and zero weights."""
    header, offset = [], 0
    for name, kind, shape in _TENSORS:
        header.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
        elements, size = _BLOCK[kind]
        n_elements = shape[0] * (shape[1] if len(shape) > 1 else 1)
        offset += -(-(n_elements // elements * size) // _ALIGNMENT) * _ALIGNMENT
    metadata = [
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("tokenizer.ggml.model") + struct.pack("<I", 8) + _text("none"),
        _text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5),
        *(_text(key) + struct.pack("<II", 4, number) for key, number in _NUMBERS.items()),
    ]
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(_TENSORS), len(metadata)) + b"".join(metadata + header)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // _ALIGNMENT) * _ALIGNMENT + offset)


def run_model(api: Any, path: Path, repack: bool) -> bool:
    """Load the model and decode a prompt and a single token; whether all of it worked."""
    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers, model_params.use_extra_bufts = 0, repack
    model = api.llama_model_load_from_file(os.fsencode(path), model_params)
    context_params = api.llama_context_default_params()
    context_params.n_ctx, context_params.n_threads, context_params.n_threads_batch = 64, 2, 2
    context = model and api.llama_init_from_model(model, context_params)
    if not context:
        return False
    for n_tokens in (33, 1):
        tokens = (ctypes.c_int32 * n_tokens)(*range(1, n_tokens + 1))
        if api.llama_decode(context, api.llama_batch_get_one(tokens, n_tokens)) != 0:
            return False
    return True


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


if __name__ == "__main__":
    import llama_cpp.llama_cpp

    model_path = Path(sys.argv[1]) / "probe.gguf"
    write_model(model_path)
    ok = run_model(llama_cpp.llama_cpp, model_path, repack=sys.argv[2] == "1")
    sys.stderr.flush()
    os._exit(0 if ok else 1)
