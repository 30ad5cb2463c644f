"""Whether llama.cpp can generate text with a file, or embed texts, by its header."""

from __future__ import annotations

from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile
from slm_llamacpp.preflight import check_survives

# llama.cpp has no function that lists architectures. These are from llama-arch.cpp of the version that is required.
_NAMES = """
afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chameleon chatglm codeshell
cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 dots1 dots3note
ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4
glm4moe glm5-next gpt-oss gpt2 gptneox granite granite_swa granitehybrid granitemoe graniteswitch grok grovemoe
hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba kimi-k3 kimi-linear laguna lfm2
lfm2moe llama llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3
mistral3 mistral4 mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe olmo olmo2 olmoe openelm orion paddleocr
pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe
qwen3next qwen3vl qwen3vlmoe qwen4exp refact rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3 spark2_5 stablelm
starcoder starcoder2 step35 talkie xverse
"""
_RUNS = frozenset(_NAMES.split())
_MTP_NAMES = """
bailingmoe2 bailingmoe3 cohere2moe deepseek2 deepseek32 deepseek4 dots3note exaone-moe exaone4 gemma4 glm-dsa glm4
glm4moe glm5-next gpt-oss graniteswitch hy_v3 mimo2 nemotron_h nemotron_h_moe qwen35 qwen35moe qwen3next step35
"""
_WITH_MTP = frozenset(_MTP_NAMES.split())
"""Architectures whose files may have layers for multi-token prediction, as of the same version."""
_NO_GENERATION = {
    "an encoder": "eurobert jina-bert-v2 jina-bert-v3 llama-embed neo-bert nomic-bert-moe t5encoder",
    "an encoder with a decoder": "t5",
    "a diffusion model": "dream llada llada-moe rnd1",
    "part of another model": "clip dflash eagle3 gemma4-assistant",
    "a speech model": "pockettts qwen3tts wavtokenizer-dec",
}
_REASONS = {name: reason for reason, names in _NO_GENERATION.items() for name in names.split()}
_COMPUTED_OTHERWISE = {"phimoe": "it reads their layer norms as RMS norms"}
"""Architectures that llama.cpp runs with other logits than those of the model, and why."""
_ENCODERS = frozenset({"bert", "gemma-embedding", "modern-bert", "nomic-bert"})


def is_encoder(gguf: GgufFile) -> bool:
    """Whether it is an encoder whose hidden states this backend returns."""
    return gguf.require("general.architecture", str) in _ENCODERS


def check_source(gguf: GgufFile) -> None:
    """Refuse a file that llama.cpp cannot load or generate with, or that would end the process.

    Raises:
        UnsupportedModel: the file is valid, but this llama.cpp cannot generate text with its model.
        InvalidModelFile: the file contradicts itself, and llama.cpp would end the process.
    """
    path = gguf.path
    if not gguf.tensors:
        raise UnsupportedModel(f"{path}: the file has a vocabulary only, no weights")
    architecture = gguf.require("general.architecture", str)
    if architecture in _REASONS:
        raise UnsupportedModel(f"{path}: architecture {architecture!r} is {_REASONS[architecture]}")
    if architecture in _COMPUTED_OTHERWISE:
        reason = _COMPUTED_OTHERWISE[architecture]
        raise UnsupportedModel(f"{path}: llama.cpp computes other logits for {architecture} models: {reason}")
    if architecture not in _RUNS | _ENCODERS:
        raise UnsupportedModel(f"{path}: architecture {architecture[:80]!r} is not one that llama.cpp runs")
    if architecture not in _ENCODERS and not gguf.get(f"{architecture}.attention.causal", bool, True):
        raise UnsupportedModel(f"{path}: metadata '{architecture}.attention.causal' is false: the model is an encoder")
    if architecture not in _WITH_MTP and any(".nextn." in name for name in gguf.tensors):
        raise UnsupportedModel(
            f"{path}: llama.cpp knows no {architecture} models with layers for multi-token prediction"
        )
    check_survives(gguf)
