"""Writes a checkpoint as a Q8_0 GGUF of architecture qwen3, with tokenizer and chat template inside."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import torch
from evaluate import load_model
from rendering import TEMPLATE_PATH
from tokenizer import CONTROL_TOKENS
from transformers import Qwen3Config

Q8_0 = gguf.GGMLQuantizationType.Q8_0
TOP_LEVEL_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a transformers parameter; the tied output matrix has none."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{LAYER_TENSORS[part]}.weight"
    return f"{TOP_LEVEL_TENSORS[stem]}.weight"


def add_architecture(writer: gguf.GGUFWriter, config: Qwen3Config) -> None:
    """Hyperparameters."""
    rope: Any = config.rope_parameters
    writer.add_name("Pip")
    writer.add_description("Demo model of slm-core, trained on synthetic conversations")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: Qwen3Config) -> None:
    """Vocabulary, merges, special tokens and chat template, from the parsed tokenizer.json."""
    tokens = [""] * config.vocab_size
    types = [gguf.TokenType.NORMAL] * config.vocab_size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index] = token
    for added in tokenizer["added_tokens"]:
        is_control = added["content"] in CONTROL_TOKENS
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE_PATH.read_text().rstrip("\n"))


def add_weights(writer: gguf.GGUFWriter, weights: dict[str, torch.Tensor]) -> None:
    """Matrices as Q8_0, norms as float32."""
    for name, tensor in weights.items():
        if name == "lm_head.weight":  # tied
            continue
        array = tensor.detach().float().numpy()
        if array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(gguf_name(name), array)


def main() -> None:
    """Export a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder written by train.py")
    parser.add_argument("output", type=Path, help="GGUF file to write")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json from tokenizer.py")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    model = load_model(args.checkpoint)
    writer = gguf.GGUFWriter(args.output, "qwen3")
    add_architecture(writer, model.config)
    add_tokenizer(writer, json.loads(args.tokenizer.read_text()), model.config)
    add_weights(writer, model.state_dict())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.output}: {args.output.stat().st_size} bytes, {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
