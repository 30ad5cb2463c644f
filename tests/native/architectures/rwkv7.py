"""RWKV-7 with the tensor names of its reference implementation (the ``rwkv`` package) and of two kinds of directories.

The package also computes the expected logits. ``write_directory`` writes the directories of flash-linear-attention:
``directory_tensors`` converts as its converter does; its class runs only on GPUs. ``write_plain_directory`` writes
RWKV's own directories, which keep the names of the reference with a prefix.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import rwkv
import torch
from safetensors.torch import save_file

from native.architectures.engines import Rows
from slm_core.gguf import GgufFile
from slm_core.quant import dequantize
from world_json import world_tokenizer

VOCABULARY = Path(rwkv.__file__).parent / "rwkv_vocab_v20230424.txt"
Tensors = Mapping[str, torch.Tensor]
_SHARES = "rwkvag"
_OUTSIDE = {"token_embd": "emb", "token_embd_norm": "blocks.0.ln0", "output_norm": "ln_out", "output": "head"}
_INSIDE = {
    "attn_norm": "ln1",
    "attn_norm_2": "ln2",
    "time_mix_ln": "att.ln_x",
    **{f"time_mix_{name}": f"att.{name}" for name in ("receptance", "key", "value", "output")},
    **{f"channel_mix_{name}": f"ffn.{name}" for name in ("key", "value")},
}
_BARE = {"channel_mix_lerp_k": "ffn.x_k", **{f"time_mix_{name}": f"att.{name}" for name in ("k_k", "k_a", "r_k")}}
_OF_DIRECTORIES = {
    r"^emb\.": "model.embeddings.",
    r"^head\.": "lm_head.",
    r"^ln_out\.": "model.norm.",
    r"^blocks\.": "model.layers.",
    r"\.ln0\.": ".pre_norm.",
    r"\.ln1\.": ".attn_norm.",
    r"\.ln2\.": ".ffn_norm.",
    r"\.att\.": ".attn.",
    r"\.attn\.ln_x\.": ".attn.g_norm.",
    r"\.attn\.([rkvo])(eceptance|ey|alue|utput)\.": r".attn.\1_proj.",
    r"\.([wavg])0$": r".\1_lora.lora.2.bias",
    r"\.([wavg])1$": r".\1_lora.lora.0.weight",
    r"\.([wavg])2$": r".\1_lora.lora.2.weight",
}


def reference_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a GGUF file with the names of the reference implementation."""
    converted: dict[str, torch.Tensor] = {}
    with GgufFile.open(path) as file:
        for name, about in file.tensors.items():
            values = torch.from_numpy(dequantize(file.tensor_data(name), about.ggml_type, about.shape).copy())
            converted |= _reference_names(name, values, file.require("rwkv7.wkv.head_size", int))
    return converted


def _reference_names(name: str, values: torch.Tensor, head_dim: int) -> dict[str, torch.Tensor]:
    stem, _, kind = name.rpartition(".")
    block = re.match(r"blk\.(\d+)\.(.*)", stem)
    if block is None:
        return {f"{_OUTSIDE[stem]}.{kind}": values}
    prefix, inside = f"blocks.{block[1]}.", block[2]
    if inside in _INSIDE:
        return {f"{prefix}{_INSIDE[inside]}.{kind}": values}
    if inside == "time_mix_lerp_fused":
        return {f"{prefix}att.x_{letter}": values[i] for i, letter in enumerate(_SHARES)}
    if inside in _BARE:
        return {prefix + _BARE[inside]: values.reshape(-1, head_dim) if inside.endswith("r_k") else values}
    rank = inside.removeprefix("time_mix_")  # w0, w1, w2, ...
    return {f"{prefix}att.{rank}": values if rank.endswith("0") else values.T.contiguous()}


def reference_logits(folder: Path, tensors: Tensors, tokens: Sequence[int]) -> Rows:
    """Logits after each token from the ``rwkv`` package on the CPU in float32; ``folder`` gets its weight file."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the package uses TorchScript
        patch.setenv("RWKV_V7_ON", "1")
        from rwkv.model import RWKV

        torch.save(dict(tensors), folder / "model.pth")
        rows, _ = RWKV(str(folder / "model"), "cpu fp32").forward(list(tokens), None, full_output=True)
    logits: Rows = rows.numpy()
    return logits


def directory_tensors(tensors: Tensors, *, packed: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a flash-linear-attention directory; ``packed``: the old form, one tensor of shares per layer."""
    converted: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        is_unread = re.fullmatch(r"blocks\.0\.att\.v[012]", name)
        if is_unread and not packed:
            continue
        directory_name = name
        for pattern, replacement in _OF_DIRECTORIES.items():
            directory_name = re.sub(pattern, replacement, directory_name)
        transposed = re.search(r"\.[wavg][12]$", name) is not None
        converted[directory_name] = values.T.contiguous() if transposed else values.clone()
    for i in range(3):
        shares = [converted.pop(f"model.layers.{i}.attn.x_{letter}").reshape(1, 1, -1) for letter in _SHARES]
        names = ["x_x"] if packed else [f"x_{letter}" for letter in _SHARES]
        each = [torch.stack(shares)] if packed else shares
        converted |= {f"model.layers.{i}.attn.{name}": share for name, share in zip(names, each, strict=True)}
    return converted


def plain_tensors(tensors: Tensors, *, unread: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of RWKV's own directories; ``unread`` includes the unused tensors of block 0."""
    converted: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        if not unread and re.fullmatch(r"blocks\.0\.att\.v[012]", name):
            continue
        is_vector = re.search(r"\.x_[rwkvag]$|\.[wav]0$|\.k_[ka]$", name) is not None
        directory_name = name if name == "head.weight" else f"rwkv7.{name}"
        converted[directory_name] = values.reshape(1, 1, -1).clone() if is_vector else values.clone()
    return converted


def write_plain_directory(folder: Path, tensors: Tensors, **stated: Any) -> Path:
    """Write RWKV's own directory: weights, a configuration changed by ``stated``, and the vocabulary as JSON."""
    folder.mkdir()
    n_vocab, n_embd = tensors["rwkv7.emb.weight"].shape
    save_file(dict(tensors), folder / "model.safetensors")
    config = {
        "architectures": ["Rwkv7ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_rwkv7.Rwkv7ForCausalLM"},
        "model_type": "rwkv7",
        "vocab_size": n_vocab,
        "hidden_size": n_embd,
        "num_hidden_layers": 3,
        "num_heads": 3,
        "head_dim": 64,
        "intermediate_size": 160,
        "decay_low_rank_dim": 32,
        "a_low_rank_dim": 24,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 40,
        "norm_eps": 1e-05,
        "norm_bias": True,
        "wkv_state_dtype": "float32",
        "wkv_implementation": "chunked",
        "use_cache": True,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | stated))
    world_tokenizer(_pieces(n_vocab), n_vocab).save(str(folder / "tokenizer.json"))
    return folder


def _pieces(n_vocab: int) -> dict[int, bytes]:
    """The first tokens of the vocabulary by id."""
    lines = VOCABULARY.read_text(encoding="utf-8").split("\n")[: n_vocab - 1]
    literals = [ast.literal_eval(line[line.index(" ") + 1 : line.rindex(" ")]) for line in lines]
    pieces = [literal.encode() if isinstance(literal, str) else literal for literal in literals]
    return dict(enumerate(pieces, 1))


def write_directory(folder: Path, tensors: Tensors, **stated: Any) -> Path:
    """Write a flash-linear-attention directory: weights, a configuration changed by ``stated``, and the vocabulary.

    The vocabulary has the tokens of the model except token 0.
    """
    folder.mkdir()
    n_vocab, n_embd = tensors["model.embeddings.weight"].shape
    save_file(dict(tensors), folder / "model.safetensors")
    n_layers = 3
    config = {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "attn": None,
        "attn_mode": "chunk",
        "a_low_rank_dim": 24,
        "decay_low_rank_dim": 32,
        "gate_low_rank_dim": 40,
        "v_low_rank_dim": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "fuse_cross_entropy": True,
        "fuse_norm": False,
        "head_dim": 64,
        "hidden_act": "sqrelu",
        "hidden_ratio": 4.0,
        "hidden_size": n_embd,
        "initializer_range": 0.006,
        "intermediate_size": 160,
        "max_position_embeddings": 2048,
        "norm_bias": True,
        "norm_eps": 1e-05,
        "norm_first": True,
        "num_heads": 3,
        "num_hidden_layers": n_layers,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "value_dim": [n_embd] * n_layers,
        "vocab_size": n_vocab,
    }
    (folder / "config.json").write_text(json.dumps(config | stated))
    lines = VOCABULARY.read_text(encoding="utf-8").split("\n")
    (folder / VOCABULARY.name).write_text("\n".join(lines[: n_vocab - 1]) + "\n", encoding="utf-8")
    return folder
