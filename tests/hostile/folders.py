"""Model directories as files in memory, and damaged directories derived from them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from slm_conformance.oracle.factories import TinyModel, make_tiny_model
from slm_core.gguf import GgufFile
from slm_core.tokenization.export import tokenizer_files
from tests.hostile import json_mutations

Folder: TypeAlias = Mapping[str, bytes]
_N_CTX = 2048
_TEXTS = (
    *("BPE", "WordPiece", "Unigram", "WordLevel", "ByteLevel", "Metaspace", "Sequence", "Replace", "Strip", "Split"),
    *("Digits", "Precompiled", "Lowercase", "NFC", "Prepend", "BertNormalizer", "TemplateProcessing", "Fuse"),
    *(
        "llama",
        "qwen3",
        "gemma3",
        "mamba",
        "bert",
        "float8",
        "F64",
        "BF16",
        "U8",
        "linear",
        "yarn",
        "llama3",
        "dynamic",
    ),
    *("(?i:'s|'t)|[^\\r\\n]+", "(((", "a{100000}", "(a|a)*$", "../../etc/passwd", "/etc/passwd", "k.%d", "%s%s%n"),
    *(
        [0, 10**9],
        {"String": "("},
        {"Regex": "("},
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"},
    ),
)
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{short}": f"self_attn.{short}_proj" for short in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def transformers_folders(folder: Path) -> list[Folder]:
    """Directories of transformers: a llama, a qwen3, and a llama with matrices of GPTQ's integers."""
    llama, qwen3 = (_transformers_folder(folder, make_tiny_model(name)) for name in ("llama", "qwen3"))
    return [llama, qwen3, _with_integers(llama)]


def _with_integers(sound: Folder) -> Folder:
    """A directory whose matrices are random integers of 4 bits in groups of 32."""
    rng, config = np.random.default_rng(11), json.loads(sound["config.json"])
    about = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    tiny = make_tiny_model("llama")
    tensors: dict[str, np.ndarray] = {}
    for name, values in _renamed(tiny):
        n_out, n_in = values.shape if values.ndim == 2 else (0, 0)
        if not name.endswith("_proj.weight") or n_in % 32:
            tensors[name] = values
            continue
        base, n_groups = name.removesuffix(".weight"), n_in // 32
        integers = {"qweight": (n_in // 8, n_out), "qzeros": (n_groups, n_out // 8)}
        for part, shape in integers.items():
            tensors[f"{base}.{part}"] = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
        tensors[f"{base}.scales"] = rng.uniform(0.001, 0.01, (n_groups, n_out)).astype(np.float32)
        tensors[f"{base}.g_idx"] = np.arange(n_in, dtype=np.int32) // 32
    packed = json.dumps({**config, "quantization_config": about}).encode()
    return {**sound, "config.json": packed, "model.safetensors": safetensors(tensors)}


def onnx_folders(folder: Path) -> list[Folder]:
    """Directories of optimum, of onnxruntime-genai and of ``slm convert``."""
    from slm_onnx.convert import convert
    from tests.foreign_onnx import LAYOUTS, write_directory

    tiny = make_tiny_model("qwen2")
    source = tiny.write(folder / "onnx.gguf")
    folders = []
    for layout in LAYOUTS:
        written = write_directory(tiny, folder / layout.replace(" ", "-"), layout, _tokenizer(source))
        folders.append(_read(written))
    convert(source, folder / "converted", lambda share: None)
    return [*folders, _read(folder / "converted")]


def mutated(rng: np.random.Generator, sound: Folder) -> dict[str, bytes]:
    """A damaged directory, which depends only on the state of the generator."""
    files = dict(sound)
    for _ in range(1 + int(rng.integers(2))):
        names = sorted(files)
        texts = [name for name in names if name.endswith(".json")]
        pool = texts if texts and rng.random() < 0.75 else names
        name = pool[rng.integers(len(pool))]
        if rng.random() < 0.04:
            del files[name]
        elif name.endswith(".json") and rng.random() < 0.92:
            files[name] = _damaged_json(rng, files[name])
        elif name.endswith(".safetensors") and rng.random() < 0.8:
            files[name] = _damaged_header(rng, files[name])
        else:
            files[name] = _damaged(rng, files[name])
        if not files:
            break
    return files


def write(files: Folder, folder: Path) -> Path:
    """Write a directory; returns ``folder``."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    folder.mkdir(exist_ok=True)
    return folder


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file of float32 and int32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in tensors.items():
        dtype = "I32" if values.dtype == np.int32 else "F32"
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    return _with_header(header, b"".join(values.tobytes() for values in tensors.values()))


def _read(folder: Path) -> Folder:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _transformers_folder(folder: Path, tiny: TinyModel) -> Folder:
    source = tiny.write(folder / f"{tiny.shape.architecture}.gguf")
    shape, tensors = tiny.shape, dict(_renamed(tiny))
    config = {
        "model_type": shape.architecture,
        "architectures": ["LlamaForCausalLM" if shape.architecture == "llama" else "Qwen3ForCausalLM"],
        "num_hidden_layers": shape.n_layers,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_freq_base,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "vocab_size": len(tiny.tensors["token_embd.weight"].values()),
        "eos_token_id": [258, 259],
        "torch_dtype": "float32",
    }
    texts = {name: text.encode() for name, text in _tokenizer(source).items()}
    generation = {"eos_token_id": 259, "temperature": 0.6}
    return {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(generation).encode(),
        "model.safetensors": safetensors(tensors),
        **texts,
    }


def _tokenizer(source: Path) -> dict[str, str]:
    with GgufFile.open(source) as gguf:
        return tokenizer_files(gguf, _N_CTX)


def _renamed(tiny: TinyModel) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in tiny.tensors.items():
        if name in _NAMES:
            yield _NAMES[name], tensor.values()
        elif name.startswith("blk."):
            _, block, part, _ = name.split(".")
            yield f"model.layers.{block}.{_BLOCK_NAMES[part]}.weight", tensor.values()


def _with_header(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _damaged_header(rng: np.random.Generator, file: bytes) -> bytes:
    try:
        (n,) = struct.unpack_from("<Q", file)
        header = json.loads(file[8 : 8 + n])
    except (struct.error, ValueError):  # an earlier change has damaged it
        return file
    return _with_header(json_mutations.mutated(rng, header, _TEXTS), file[8 + n :])


def _damaged_json(rng: np.random.Generator, file: bytes) -> bytes:
    try:
        stated = json.loads(file)
    except ValueError:
        return file
    return json.dumps(json_mutations.mutated(rng, stated, _TEXTS)).encode()


def _damaged(rng: np.random.Generator, data: bytes) -> bytes:
    raw = bytearray(data)
    reach = len(raw) if rng.random() < 0.5 else min(len(raw), 4096)
    at = int(rng.integers(max(1, reach)))
    match int(rng.integers(4)):
        case 0 if raw:
            raw[at] ^= 1 << int(rng.integers(8))
        case 1:
            del raw[at:]
        case 2:
            raw[at:at] = rng.bytes(int(rng.integers(1, 9)))
        case _:
            del raw[at : at + int(rng.integers(1, 9))]
    return bytes(raw)
