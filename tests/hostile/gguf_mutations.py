"""Damaged model files: a valid GGUF file with one to three changes."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from tests.hostile.gguf_form import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    SCALARS,
    STRING,
    UINT32,
    UINT64,
    GgufForm,
    Pair,
    array_value,
    text_value,
)

Rng: TypeAlias = np.random.Generator
Change: TypeAlias = Callable[[Rng, GgufForm], None]

_COUNTS = (*range(10), 15, 16, 17, 31, 33, 63, 64, 65, 127, 255, 256, 511, 512, 513, 1023, 1025, 4096)
_LARGE = (2**15, 2**16, 2**20, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, -1.0, 0.5, 1e-45, 1e-30, 1e10, 1e30, 3e38, float("inf"), -float("inf"), float("nan"))
_COUNT_KEYS = """
attention.causal attention.head_count attention.head_count_kv attention.key_length attention.key_length_mla
attention.key_length_swa attention.kv_lora_rank attention.layer_norm_epsilon attention.layer_norm_rms_epsilon
attention.q_lora_rank attention.shared_kv_layers attention.sliding_window attention.sliding_window_pattern
attention.value_length attention.value_length_mla attention.group_norm_epsilon attention.group_norm_groups
attention.temperature_length attention.block_count attention.relative_buckets_count attention.output_scale
block_count context_length convnext.block_count decoder_block_count decoder_start_token_id embedding_length
embedding_length_out embedding_length_per_layer_input expert_count expert_feed_forward_length expert_gating_func
expert_group_count expert_group_used_count expert_shared_count expert_shared_feed_forward_length expert_used_count
expert_weights_norm expert_weights_scale feed_forward_length full_attention_interval interleave_moe_layer_step
leading_dense_block_count logit_scale moe_every_n_layers n_deepstack_layers nextn_predict_layers pooling_type
rope.dimension_count rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa
rope.scaling.attn_factor rope.scaling.factor rope.scaling.finetuned rope.scaling.original_context_length
rope.scaling.type rope.scaling.yarn_log_multiplier rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
shortconv.l_cache ssm.conv_kernel ssm.dt_b_c_rms ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank
swin_norm time_decay_extra_dim time_mix_extra_dim token_shift_count use_parallel_residual vocab_size
wkv.head_size attn_logit_softcapping final_logit_softcapping attention.clamp_kqv attention.max_alibi_bias
embedding_scale residual_scale attention.scale activation_sparsity_scale altup.active_idx altup.num_inputs
"""
_KEYS = tuple(_COUNT_KEYS.split())
_TOKENIZER_KEYS = (
    *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id", "seperator_token_id"),
    *("padding_token_id", "cls_token_id", "mask_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id"),
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("token_type_count", "scores", "token_type", "merges", "precompiled_charsmap", "pre", "model", "tokens"),
)
_WORDS = (
    *(
        b"",
        b"\0",
        b"\xff\xfe",
        b"a" * 70_000,
        "\N{SNOWMAN}".encode(),
        b"none",
        b"linear",
        b"yarn",
        b"longrope",
        b"bogus",
    ),
    *(
        b"llama",
        b"gpt2",
        b"bert",
        b"t5",
        b"rwkv",
        b"no_vocab",
        b"plamo2",
        b"gemma4",
        b"default",
        b"llama-bpe",
        b"qwen2",
    ),
    *(b"mean", b"{{ messages }}", b"{% for", b"\n\n\n"),
)
ARCHITECTURES = (
    *[
        "llama",
        "qwen2",
        "qwen3",
        "qwen2vl",
        "qwen3vl",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "phi2",
        "phi3",
        "gptneox",
        "gpt2",
        "falcon",
        "mpt",
        "bloom",
    ],
    *[
        "mamba",
        "mamba2",
        "jamba",
        "rwkv6",
        "rwkv7",
        "arwkv7",
        "lfm2",
        "deepseek2",
        "stablelm",
        "starcoder2",
        "olmo2",
        "glm4",
        "minicpm3",
        "bert",
        "nomic-bert",
    ],
    *[
        "modern-bert",
        "gemma-embedding",
        "command-r",
        "cohere2",
        "granite",
        "granitehybrid",
        "falcon-h1",
        "chatglm",
        "baichuan",
        "openelm",
    ],
    *[
        "t5",
        "clip",
        "wavtokenizer-dec",
        "qwen3next",
        "plamo2",
        "nemotron_h",
        "kimi-linear",
        "grok",
        "dbrx",
        "llama4",
        "gpt-oss",
        "apertus",
    ],
)
_TYPES = (0, 1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 16, 18, 20, 24, 26, 28, 30, 34, 39, 40, 41, 255, 2**32 - 1)


def mutated(rng: Rng, sound: GgufForm) -> bytes:
    """A damaged file, which depends only on the state of the generator."""
    form = sound.copy()
    for _ in range(1 + int(rng.choice(3, p=[0.6, 0.25, 0.15]))):
        _CHANGES[int(rng.choice(len(_CHANGES), p=_SHARES))](rng, form)
    data = form.to_bytes()
    return _damaged(rng, data) if rng.random() < 0.1 else data


def _architecture(form: GgufForm) -> str:
    pair = form.pair("general.architecture")
    return pair.value[8:].decode("utf-8", "replace") if pair is not None and pair.kind == STRING else "llama"


def _set_number(rng: Rng, form: GgufForm) -> None:
    """Change the number of an existing key."""
    pairs = [pair for pair in form.pairs if pair.kind in SCALARS]
    if pairs:
        pair = pairs[rng.integers(len(pairs))]
        pair.value = _number(rng, pair.kind, pair.value)


def _number(rng: Rng, kind: int, old: bytes) -> bytes:
    layout = SCALARS[kind]
    if layout in ("<f", "<d"):
        return struct.pack(layout, _FLOATS[rng.integers(len(_FLOATS))])
    size = struct.calcsize(layout)
    (was,) = struct.unpack(layout, old[:size].ljust(size, b"\0"))  # an earlier change may have changed the type
    near = (was - 1, was + 1, was + 2, was * 2, was // 2, was * 3, was // 3, -was)
    pool = (near, _COUNTS, _LARGE)[rng.choice(3, p=[0.45, 0.35, 0.2])]
    return (int(pool[rng.integers(len(pool))]) % 2 ** (8 * size)).to_bytes(size, "little")


def _add_number(rng: Rng, form: GgufForm) -> None:
    """Add a number or a flag with a key that engines may read."""
    kind = (UINT32, INT32, FLOAT32, BOOL, UINT64)[rng.choice(5, p=[0.5, 0.1, 0.2, 0.1, 0.1])]
    _put(form, _any_key(rng, form), kind, _number(rng, kind, bytes(8)[: struct.calcsize(SCALARS[kind])]))


def _add_array(rng: Rng, form: GgufForm) -> None:
    """Add an array with one of these keys, as if its values differed between layers."""
    kind = (UINT32, INT32, FLOAT32, BOOL)[rng.integers(4)]
    n = int(rng.choice([0, 1, 2, 3, 4, 5, 512, 513]))
    zero = bytes(struct.calcsize(SCALARS[kind]))
    items = b"".join(_number(rng, kind, zero) for _ in range(n))
    claimed = n if rng.random() < 0.9 else int(rng.choice([n + 1, 2**31, 2**62]))
    _put(form, _any_key(rng, form), ARRAY, array_value(kind, claimed, items))


def _any_key(rng: Rng, form: GgufForm) -> str:
    if rng.random() < 0.2:
        return f"tokenizer.ggml.{_TOKENIZER_KEYS[rng.integers(len(_TOKENIZER_KEYS))]}"
    return f"{_architecture(form)}.{_KEYS[rng.integers(len(_KEYS))]}"


def _put(form: GgufForm, key: str, kind: int, value: bytes) -> None:
    pair = form.pair(key)
    if pair is None:
        form.pairs.append(Pair(key.encode(), kind, value))
    else:
        pair.kind, pair.value = kind, value


def _set_text(rng: Rng, form: GgufForm) -> None:
    """Change the text of an existing key."""
    pairs = [pair for pair in form.pairs if pair.kind == STRING]
    if pairs:
        pairs[rng.integers(len(pairs))].value = text_value(_WORDS[rng.integers(len(_WORDS))])


def _set_architecture(rng: Rng, form: GgufForm) -> None:
    """Change the architecture, and usually the prefix of its keys, too."""
    old, new = _architecture(form), ARCHITECTURES[rng.integers(len(ARCHITECTURES))]
    _put(form, "general.architecture", STRING, text_value(new.encode()))
    if rng.random() < 0.85:
        for pair in form.pairs:
            if pair.key.startswith(f"{old}.".encode()):
                pair.key = new.encode() + pair.key[len(old) :]


def _edit_array(rng: Rng, form: GgufForm) -> None:
    """Make an array shorter or longer, or change its stated length, its item type or an item."""
    pairs = [pair for pair in form.pairs if pair.kind == ARRAY]
    if not pairs:
        return
    pair = pairs[rng.integers(len(pairs))]
    kind, n = struct.unpack_from("<IQ", pair.value)
    items = bytearray(pair.value[12:])
    match int(rng.integers(5)):
        case 0:
            n = int(rng.choice([0, 1, n - 1, n + 1, 2**31, 2**40, 2**64 - 1]))
        case 1:
            kind = int(rng.choice([0, 1, 4, 5, 6, 7, 8, 9, 10, 12, 13]))
        case 2:
            n, items = 0, bytearray()
        case 3 if kind in SCALARS and items:
            size = struct.calcsize(SCALARS[kind])
            at = size * int(rng.integers(len(items) // size))
            items[at : at + size] = _number(rng, kind, bytes(items[at : at + size]))
        case _ if items:
            at = int(rng.integers(len(items)))
            items[at] = int(rng.integers(256))
    pair.value = array_value(kind, n % 2**64, bytes(items))


def _edit_tokens(rng: Rng, form: GgufForm) -> None:
    """Give a vocabulary or its merges fewer, duplicate, empty, random or very long entries."""
    pair = form.pair(("tokenizer.ggml.tokens", "tokenizer.ggml.merges")[rng.integers(2)])
    if pair is None or pair.kind != ARRAY or struct.unpack_from("<I", pair.value)[0] != STRING:
        return
    texts, at = [], 12
    while at + 8 <= len(pair.value):  # the count may be wrong after an earlier change
        n = struct.unpack_from("<Q", pair.value, at)[0]
        texts.append(pair.value[at + 8 : at + 8 + n])
        at += 8 + n
    i = int(rng.integers(max(1, len(texts))))
    match int(rng.integers(5)):
        case 0:
            texts = texts[:i]
        case 1 if texts:
            texts[i] = texts[int(rng.integers(len(texts)))]
        case 2 if texts:
            texts[i] = _WORDS[rng.integers(len(_WORDS))]
        case 3 if texts:
            texts[i] = texts[i].replace(b" ", b"") + b" " * int(rng.integers(4))
        case _:
            texts += [b"more"] * int(rng.choice([1, 2, 300]))
    pair.value = array_value(STRING, len(texts), b"".join(map(text_value, texts)))


def _move_pairs(rng: Rng, form: GgufForm) -> None:
    """Remove, duplicate or rename a key, or change its type."""
    if not form.pairs:
        return
    i = int(rng.integers(len(form.pairs)))
    pair = form.pairs[i]
    match int(rng.integers(4)):
        case 0:
            del form.pairs[i]
        case 1:
            form.pairs.insert(int(rng.integers(len(form.pairs))), copy.copy(pair))
        case 2:
            pair.key = pair.key[:-1] if rng.random() < 0.5 else _WORDS[rng.integers(len(_WORDS))]
        case _:
            pair.kind = int(rng.choice([0, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 2**32 - 1]))


def _edit_tensor(rng: Rng, form: GgufForm) -> None:
    """Change the shape, type, name or offset of a tensor, or remove or duplicate it."""
    if not form.tensors:
        return
    i = int(rng.integers(len(form.tensors)))
    tensor = form.tensors[i]
    match int(rng.integers(9)):
        case 0 if tensor.dims:
            j = int(rng.integers(len(tensor.dims)))
            tensor.dims[j] = int(rng.choice([0, 1, tensor.dims[j] // 2, tensor.dims[j] - 1, tensor.dims[j] + 1, 2**31]))
        case 1:
            tensor.dims.reverse()
        case 2:
            tensor.kind = _TYPES[rng.integers(len(_TYPES))]
        case 3:
            tensor.offset = int(rng.choice([0, 1, 32, tensor.offset + 32, 2**31, 2**63, 2**64 - 32], p=None)) % 2**64
        case 4:
            del form.tensors[i]
        case 5:
            form.tensors.append(copy.deepcopy(tensor))
        case 6:
            other = form.tensors[int(rng.integers(len(form.tensors)))]
            tensor.name, other.name = other.name, tensor.name
        case 7:
            tensor.dims = [*tensor.dims, 1, 1][: int(rng.integers(1, 5))]
        case _:
            tensor.n_dims = int(rng.choice([0, 1, 2, 4, 5, 2**31, 2**32 - 1]))


def _fit_tensor(rng: Rng, form: GgufForm) -> None:
    """Give a tensor another width and data of the matching length, so that only its width is wrong."""
    if not form.tensors:
        return
    tensor = form.tensors[int(rng.integers(len(form.tensors)))]
    j = int(rng.integers(max(1, len(tensor.dims))))
    if tensor.kind == 0 and tensor.dims:
        tensor.dims[j] = max(1, tensor.dims[j] + int(rng.choice([-32, -2, -1, 1, 2, 32])))
        form.data += bytes(-len(form.data) % 32)
        tensor.offset = len(form.data)
        form.data += rng.standard_normal(min(1 << 20, int(np.prod(tensor.dims)))).astype("<f4").tobytes()


def _damage_weights(rng: Rng, form: GgufForm) -> None:
    """Insert numbers into the weights that no training gives."""
    word = struct.pack("<I", int(rng.choice([0, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0xFF800000, 0xFFFFFFFF])))
    for _ in range(int(rng.choice([1, 4, 64]))):
        at = 4 * int(rng.integers(max(1, len(form.data) // 4)))
        form.data[at : at + 4] = word


def _claim(rng: Rng, form: GgufForm) -> None:
    """Change the version or the counts in the header."""
    match int(rng.integers(4)):
        case 0:
            form.version = int(rng.choice([0, 1, 2, 4, 2**24 * 3, 2**32 - 1]))
        case 1:
            form.n_pairs = int(rng.choice([0, 1, len(form.pairs) + 1, 2**31, 2**63]))
        case 2:
            form.n_tensors = int(rng.choice([0, 1, len(form.tensors) + 1, 2**31, 2**63]))
        case _:
            _put(form, "general.alignment", UINT32, struct.pack("<I", int(rng.choice([0, 1, 7, 8, 64, 2**31]))))


def _damaged(rng: Rng, data: bytes) -> bytes:
    """Change, remove or insert bytes, mostly in the header."""
    reach = len(data) if rng.random() < 0.3 else max(1, min(len(data), 20_000))
    at, raw = int(rng.integers(reach)), bytearray(data)
    match int(rng.integers(4)):
        case 0:
            raw[at] ^= 1 << int(rng.integers(8))
        case 1:
            del raw[at:]
        case 2:
            del raw[at : at + int(rng.integers(1, 9))]
        case _:
            raw[at:at] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(raw)


_WEIGHTED: tuple[tuple[Change, float], ...] = (
    *((_set_number, 6), (_add_number, 5), (_add_array, 2), (_set_text, 1.5), (_set_architecture, 1.5)),
    *((_edit_array, 1.5), (_edit_tokens, 2), (_move_pairs, 1.5), (_edit_tensor, 3), (_fit_tensor, 2)),
    *((_damage_weights, 1), (_claim, 0.5)),
)
_CHANGES = [change for change, _ in _WEIGHTED]
_SHARES = np.array([share for _, share in _WEIGHTED]) / sum(share for _, share in _WEIGHTED)
