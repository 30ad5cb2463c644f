"""rwkv7: RWKV-7 "Goose". Time mixing by a state, channel mixing with the previous token; no attention, no positions."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec
from slm_core.architectures._keys import Keys
from slm_core.architectures._recurrent import Rwkv7Spec
from slm_core.architectures._sizes import Sizes, read_sizes_without_attention
from slm_core.architectures._spec import LayerSpec, ModelSpec, NormKind, TensorSpec
from slm_core.architectures._tables import Table, biases, linear, norms
from slm_core.errors import InvalidModelFile

_RANKS = {"w": "decay", "a": "iclr", "v": "value_residual_mix", "g": "gate"}


def spec(keys: Keys) -> ModelSpec:
    """Read an rwkv7; the first block's value mixing is not used."""
    n_ff, head_dim = keys.size("feed_forward_length"), keys.size("wkv.head_size")
    sizes = read_sizes_without_attention(keys)
    if sizes.n_embd % head_dim:
        raise InvalidModelFile(
            f"{keys.gguf.path}: heads of {head_dim} do not fill {sizes.n_embd} (metadata"
            f" '{keys.architecture}.wkv.head_size')"
        )
    keys.only("token_shift_count", 2)
    ranks = {name: keys.size(f"attention.{key}_lora_rank") for name, key in _RANKS.items()}
    layers = [_layer(sizes, n_ff, ranks, Rwkv7Spec(sizes.n_embd, head_dim, i == 0)) for i in range(sizes.n_layers)]
    outside = norms(sizes.n_embd, "token_embd_norm", "output_norm")
    return decoder_spec(keys, sizes, layers, outside | biases(outside), norm=NormKind.LAYER)


def _layer(sizes: Sizes, n_ff: int, ranks: dict[str, int], recurrent: Rwkv7Spec) -> LayerSpec:
    width = sizes.n_embd
    names = ("receptance", "key", "value", "output")
    table = norms(width, "attn_norm", "attn_norm_2", "time_mix_ln")
    table |= biases(table) | norms(width, "time_mix_k_k", "time_mix_k_a", "time_mix_r_k", "channel_mix_lerp_k")
    for name in names:
        table |= linear(f"time_mix_{name}", (width, width))
    for name, rank in ranks.items():
        table |= _low_rank(name, width, rank)
    if recurrent.is_first:
        unused = _low_rank("v", width, ranks["a"])
        table |= {name: TensorSpec(tensor.shape, required=False, used=False) for name, tensor in unused.items()}
    table["time_mix_lerp_fused.weight"] = TensorSpec((6, 1, 1, width))
    table |= linear("channel_mix_key", (n_ff, width)) | linear("channel_mix_value", (width, n_ff))
    return LayerSpec(table, None, ffn_norm="attn_norm_2", attends=False, recurrent=recurrent)


def _low_rank(name: str, width: int, rank: int) -> Table:
    """The down and up matrices, and the bias; the gate has no bias."""
    table = linear(f"time_mix_{name}1", (rank, width)) | linear(f"time_mix_{name}2", (width, rank))
    return table if name == "g" else table | norms(width, f"time_mix_{name}0")
