"""Random Hugging Face directories against transformers: ``python -m fuzz.directories FIRST LAST [FAMILY ...]``.

Each seed from FIRST to LAST - 1 makes a tiny model of each family with a random configuration, and up to three times as
many tokens as the declared context. The native engine decodes them in random batches, from the directory and from the
GGUF file that is made of it. The logits equal those of transformers in float32, or the directory is refused. The exit
status is 1 after a difference.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from native.architectures.conversion import randomize
from native.architectures.engines import native_logits, transformers_logits
from native.architectures.exported import export, with_vocabulary
from native.exact import exact
from slm_conformance.oracle.factories import n_vocab
from slm_core.errors import SlmError
from slm_core.types import ModelOptions
from slm_native.backend import NativeBackend

Settings: TypeAlias = dict[str, Any]
Make: TypeAlias = Callable[[random.Random], Settings]
BOUND = 1e-4  # clause 9 of the contract: float32, relative
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _sizes(rng: random.Random, *, own_width: bool = True) -> Settings:
    """Sizes; ``own_width``: whether heads may have another width than E / H."""
    n_heads, head_dim = rng.choice([2, 3, 4, 6]), rng.choice([8, 16, 24])
    sizes = {
        "vocab_size": n_vocab() + rng.choice([0, 13]),
        "hidden_size": rng.choice([48, 96, n_heads * head_dim]) if own_width else n_heads * head_dim,
        "intermediate_size": rng.choice([32, 96]),
        "num_hidden_layers": rng.choice([1, 2, 5]),
        "num_attention_heads": n_heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 3, 6) if n_heads % n == 0]),
        "max_position_embeddings": rng.choice([16, 24, 40]),
        "tie_word_embeddings": rng.random() < 0.5,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    return {**sizes, "head_dim": head_dim} if own_width else sizes


def _rope(rng: random.Random, sizes: Settings, *kinds: str, shares: tuple[float, ...] = (1.0,)) -> Settings:
    n_ctx, kind, share = sizes["max_position_embeddings"], rng.choice(["default", *kinds]), rng.choice(shares)
    head_dim = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    rope: Settings = {"rope_type": kind, "rope_theta": rng.choice([1e3, 1e4, 5e5])}
    if shares != (1.0,):
        rope["partial_rotary_factor"] = share
    if kind in ("linear", "dynamic", "yarn"):
        rope["factor"] = rng.choice([1.0, 2.5, 4.0])
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = n_ctx // rng.choice([1, 2])
    if kind == "yarn":
        optional = {
            "attention_factor": [0.7, 1.3],
            "mscale": [0.7, 1.0],
            "mscale_all_dim": [0, 0.7, 1.0],
            "beta_fast": [4.0],
            "truncate": [True, False],
        }
        rope |= {key: rng.choice(values) for key, values in optional.items() if rng.random() < 0.4}
    if kind == "llama3":
        rope |= {"factor": rng.choice([8.0, 32.0]), "low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "longrope":
        n_pairs = int(head_dim * share) // 2
        rope |= {f"{name}_factor": [rng.uniform(1, 8) for _ in range(n_pairs)] for name in ("short", "long")}
        rope |= {"attention_factor": 1.2} if rng.random() < 0.4 else {}
    return {"rope_parameters": rope}


def _window(rng: random.Random, sizes: Settings) -> int:
    n_ctx = sizes["max_position_embeddings"]
    return int(rng.choice([4, n_ctx - 1, n_ctx, n_ctx + 5]))


def _kinds_of_layers(rng: random.Random, sizes: Settings) -> Settings:
    kinds = [rng.choice([_SLIDING, _FULL]) for _ in range(sizes["num_hidden_layers"])]
    return {"layer_types": kinds, "sliding_window": _window(rng, sizes)}


def _dense(*kinds: str, own_width: bool = True, window: bool = False, **choices: list[Any]) -> Make:
    def make(rng: random.Random) -> Settings:
        sizes = _sizes(rng, own_width=own_width)
        chosen = {key: rng.choice(values) for key, values in choices.items()}
        windows = {"sliding_window": rng.choice([None, _window(rng, sizes)])} if window else {}
        return {**sizes, **_rope(rng, sizes, *kinds), **windows, **chosen}

    return make


def _mixed(*kinds: str, **choices: list[Any]) -> Make:
    """Sliding-window layers among others."""

    def make(rng: random.Random) -> Settings:
        sizes = _sizes(rng)
        chosen = {key: rng.choice(values) for key, values in choices.items()}
        return {**sizes, **_rope(rng, sizes, *kinds), **_kinds_of_layers(rng, sizes), **chosen}

    return make


def _gemma2(rng: random.Random) -> Settings:
    chosen = _mixed("linear", attn_logit_softcapping=[5.0, 50.0], final_logit_softcapping=[3.0, 30.0])(rng)
    return {**chosen, "query_pre_attn_scalar": chosen["head_dim"]}


def _phi3(rng: random.Random) -> Settings:
    sizes = _sizes(rng, own_width=False)
    rope = _rope(rng, sizes, "longrope", shares=(0.5, 1.0))
    original = rope["rope_parameters"].get("original_max_position_embeddings", 16)
    window = rng.choice([None, _window(rng, sizes)])
    return {**sizes, **rope, "original_max_position_embeddings": original, "sliding_window": window}


_BOTH = [False, True]
_SCALINGS = ("linear", "yarn", "llama3", "longrope", "dynamic")
_EXPERTS: dict[str, list[Any]] = {"num_experts_per_tok": [1, 2], "moe_intermediate_size": [32, 64]}
_MULTIPLIERS: dict[str, list[Any]] = {
    "embedding_multiplier": [1.0, 12.0],
    "residual_multiplier": [0.22, 1.0],
    "attention_multiplier": [0.1, 1.0],
    "logits_scaling": [1.0, 8.0],
}
FAMILIES: Mapping[str, Make] = {
    "Arcee": _dense("linear", "yarn"),
    "Cohere": _dense("linear", own_width=False, use_qk_norm=_BOTH, logit_scale=[0.0625, 0.8]),
    "Cohere2": _mixed("linear", logit_scale=[0.0625, 0.8]),
    "Ernie4_5": _dense("linear", "yarn", use_bias=_BOTH),
    "Exaone4": _mixed("linear", "llama3"),
    "Gemma2": _gemma2,
    "Granite": _dense("linear", "yarn", attention_bias=_BOTH, **_MULTIPLIERS),
    "Llama": _dense(*_SCALINGS, attention_bias=_BOTH, mlp_bias=_BOTH),
    "Mistral": _dense(*_SCALINGS, window=True),
    "Mixtral": _dense("linear", num_local_experts=[2, 5], num_experts_per_tok=[1, 2]),
    "Olmo2": _dense("linear", "yarn"),
    "Phi3": _phi3,
    "Qwen2": _dense(*_SCALINGS),
    "Qwen2Moe": _dense("yarn", num_experts=[4], shared_expert_intermediate_size=[48], norm_topk_prob=_BOTH, **_EXPERTS),
    "Qwen3": _dense(*_SCALINGS),
    "Qwen3Moe": _dense("yarn", num_experts=[4, 7], norm_topk_prob=_BOTH, **_EXPERTS),
    "StableLm": _dense(own_width=False, use_qkv_bias=_BOTH, qk_layernorm=_BOTH, use_parallel_residual=_BOTH),
    "Starcoder2": _dense("linear", "yarn", own_width=False, window=True),
}
"""By the names of classes in transformers: the random settings of a configuration."""


def write_model(family: str, rng: random.Random, folder: Path) -> Settings:
    """Save a random model; returns its settings."""
    settings = FAMILIES[family](rng)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    randomize(model, rng.randrange(1000))
    dtype = rng.choice(_DTYPES)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=rng.choice(["60KB", "1GB"]))
    if rng.random() < 0.3:
        _state_as_transformers_4(folder / "config.json")
    return {**settings, "dtype": str(dtype)}


def _state_as_transformers_4(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    path.write_text(json.dumps(config))


def compare(family: str, seed: int, folder: Path) -> str:
    """The outcome of a case: "equal", "refused: ..." or "different: ..."."""
    rng = random.Random(f"{family} {seed}")
    settings = write_model(family, rng, folder / "hf")
    tokens = rng.choices(range(250), k=rng.randint(1, 3 * settings["max_position_embeddings"]))
    chunks: list[int] = []
    while (left := len(tokens) - sum(chunks)) > 0:
        chunks.append(rng.choice([1, rng.randint(1, left)]))
    model = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
        folder / "hf", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    expected = transformers_logits(model.eval(), tokens)
    try:
        rows = {"directory": _logits(folder / "hf", tokens, chunks)}
        path = export(with_vocabulary(folder / "hf", folder / "vocab"), folder / "model.gguf")
        rows["GGUF file"] = _logits(path, tokens, chunks)
    except SlmError as error:
        return f"refused: {error}"
    errors = {name: float(_relative(actual, expected).max()) for name, actual in rows.items()}
    return "equal" if max(errors.values()) < BOUND else f"different: {errors} {settings} {chunks}"


def _logits(path: Path, tokens: list[int], chunks: list[int]) -> NDArray[np.floating[Any]]:
    options, sizes = ModelOptions(backend_options={"tier": "reference"}), exact(n_ctx=len(tokens), n_batch=len(tokens))
    with NativeBackend().load(path, options) as model, model.new_context(sizes) as context:
        return native_logits(context, tokens, chunks)


def _relative(actual: NDArray[np.floating[Any]], expected: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    norms: NDArray[np.float64] = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return norms


def main(first: str, last: str, *families: str) -> int:
    """Compare all cases; returns the exit status."""
    set_verbosity_error()
    outcomes: Counter[str] = Counter()
    for seed in range(int(first), int(last)):
        for family in families or FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                outcome = compare(family, seed, Path(folder))
            outcomes[outcome.partition(":")[0]] += 1
            if outcome != "equal":
                print(family, seed, outcome.replace(folder, ""))
    print(dict(outcomes))
    return 1 if outcomes["different"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
