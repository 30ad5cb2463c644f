"""The initial corpora of the fuzzers: small generated valid inputs of every target."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import slm_core as slm
from slm_conformance.oracle import factories
from slm_conformance.oracle.factories import ModelShape, make_tiny_model
from slm_core.chat import Session
from slm_core.constraints import Regex
from slm_core.container import unpack
from slm_core.generation import StoppingAction
from slm_core.model import Model
from slm_core.sampling import Sampling
from slm_core.types import Message, Pos, Role

SMALL = ModelShape("llama", 1, 32, 32, 2, 1, 16, 1e4, 1e-5, tied=True)
SEPARATOR = b"\xff|\xfe"
"""The separator between the sections of a dump in the inputs of the target "dump parts"."""
KINDS = ("sequence", "session", "chat")


@cache
def small_model(weight_type: str = "q8_0") -> bytes:
    """A GGUF file of about 30 kB."""
    whole = factories.SHAPES["llama"]
    factories.SHAPES["llama"] = SMALL
    try:
        with TemporaryDirectory() as folder:
            path = make_tiny_model("llama", weight_type).write(Path(folder) / "small.gguf")
            return path.read_bytes()
    finally:
        factories.SHAPES["llama"] = whole


@cache
def loaded() -> Model:
    """The small model, loaded on the native engine."""
    model = slm.load(small_model(), backend="native", device="cpu", n_threads=1)
    atexit.register(model.close)
    return model


def dumps() -> list[bytes]:
    """Dumps of sequences with and without cuts, of sessions with a paused answer, and of chats."""
    model = loaded()
    with model.new_context(n_ctx=128, n_seq_max=2, n_batch=32) as context:
        batch = context.new_batch()
        batch.extend([5, 6, 7, 8, 9], Pos(0, 0))
        context.decode(batch)
        dumps = [context.dump(0)]
        context.cut(Pos(0, 1), Pos(0, 3))
        dumps.append(context.dump(0))
    with Session(model.new_context(n_ctx=128, n_batch=32), model.vocab, owns_context=True) as session:
        session.append("hello you")
        dumps.append(session.dump())
        for constraint in (None, Regex("[a-z]{20}")):
            generation = session.generate(
                Sampling(temperature=1.0, seed=3, max_tokens=20, stop=("zz",)),
                constraint=constraint,
                stopping_criteria=[
                    lambda event, draft: StoppingAction.PAUSE if len(draft.tokens) == 3 else StoppingAction.NEXT
                ],
            )
            for _ in generation:
                pass
            dumps.append(session.dump())
            session.truncate(2)
    with model.chat(n_ctx=128, n_batch=32, messages=[Message(Role.USER, "hi"), Message(Role.ASSISTANT, "you")]) as chat:
        dumps.append(chat.dump())
    return dumps


def dump_parts() -> list[bytes]:
    """Dumps as the id of their kind, JSON and sections, without lengths and checksum."""
    inputs = []
    for dump in dumps():
        kind = next(kind for kind in KINDS if f'{{"kind": "{kind}"'.encode() in dump[:40])
        meta, sections = unpack(kind, dump)
        inputs.append(bytes([KINDS.index(kind)]) + SEPARATOR.join([json.dumps(meta).encode(), *sections]))
    return inputs


def safetensors() -> list[bytes]:
    """A file with three tensors, and a file without tensors."""
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
        "c": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [34, 35]},
    }
    data = np.arange(35, dtype=np.uint8).tobytes()
    return [_lengthened(json.dumps(header).encode()) + data, _lengthened(b"{}")]


def _lengthened(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def configs() -> list[bytes]:
    """The ``config.json`` of a few families."""
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "vocab_size": 300,
        "tie_word_embeddings": True,
    }
    mixtral = {**llama, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    mixtral |= {"num_experts_per_tok": 2, "rope_scaling": None, "sliding_window": None}
    qwen = {**llama, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_scaling": None}
    quantized = {**qwen, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
    return [json.dumps(config).encode() for config in (llama, mixtral, qwen, quantized)]


def tokenizers() -> list[bytes]:
    """The ``tokenizer.json`` of a small byte-level and a small WordPiece vocabulary."""
    letters = {chr(97 + i): i for i in range(6)} | {"ab": 6, "abc": 7, "<s>": 8}
    special = {"id": 8, "content": "<s>", "special": True, "normalized": False}
    special |= {"single_word": False, "lstrip": False, "rstrip": False}
    plain: dict[str, object] = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bpe = {
        **plain,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": letters, "merges": [["a", "b"], ["ab", "c"]], "unk_token": None},
    }
    chinese = {"handle_chinese_chars": True, "strip_accents": None}
    pieces = {"[UNK]": 0, "a": 1, "##b": 2, "[CLS]": 3, "[SEP]": 4}
    wordpiece = {
        **plain,
        "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "clean_text": True, **chinese},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "vocab": pieces,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    }
    return [json.dumps(tokenizer).encode() for tokenizer in (bpe, wordpiece)]


def models() -> list[bytes]:
    """GGUF files."""
    return [small_model("q8_0"), small_model("f16")]


CORPORA: Mapping[str, Callable[[], list[bytes]]] = {
    "gguf": models,
    "load": models,
    "safetensors": safetensors,
    "config": configs,
    "tokenizer": tokenizers,
    "dump": dumps,
    "dump_parts": dump_parts,
}
"""Functions that return the inputs, by target."""


CPP_TARGETS = ("weights", "cache", "routing")
"""The C++ targets in ``cpp``."""

_N_ISAS, _N_KINDS = 8, 32  # upper bounds; the targets take them modulo the numbers of the machine


def cpp_inputs(target: str) -> list[bytes]:
    """Inputs of a C++ target: every instruction set with every type of weights or cache, and several kinds of bytes.

    The first bytes are the numbers of the instruction set, the type and the sizes. The rest is weights, a cache or
    router outputs: random bytes, or one repeated byte, some of which give infinities or NaNs.
    """
    rng = np.random.default_rng(0)
    inputs = []
    for isa in range(_N_ISAS):
        for kind in range(_N_KINDS):
            sizes = rng.integers(0, 256, 6, dtype=np.uint8).tobytes()
            body = rng.integers(0, 256, 400, dtype=np.uint8).tobytes()
            fill = (b"\xff", b"\x7f", b"\x00", b"\x80", b"\x7c")[kind % 5] * 40
            start = sizes[:2] if target == "routing" else bytes([isa, kind])
            inputs.append(start + sizes[2:] + (body if (isa + kind) % 2 else fill))
    return inputs
