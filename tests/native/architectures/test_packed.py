"""Directories with matrices of integers: GPTQ, AWQ and compressed-tensors' own format.

The oracle is the definition of each format: integers and scales are drawn, weights are computed of them in float64, and
the integers are packed as the formats' authors describe it. transformers computes the logits of these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slm_core as slm
from native.architectures.checkpoints import change_config, change_tensors, save_directory
from native.architectures.engines import make_subject, native_logits, transformers_logits
from native.architectures.exported import export, with_vocabulary
from native.exact import exact
from slm_core.checkpoints import Checkpoint
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.quant import dequantize

GROUP = 32
N_TOKENS = 30
OPTIONS = exact(n_ctx=N_TOKENS, n_batch=N_TOKENS)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Drawn:
    """codes [out, in], scales [out, groups], zeros [out, groups], the group of each column [in]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        scales = self.scales.astype(np.float64)
        return scales[:, self.groups] * (self.codes.astype(np.float64) - self.zeros[:, self.groups])


def draw(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, *, symmetric: bool, in_order: bool = True
) -> Drawn:
    n_out, n_in = shape
    n_groups = n_in // GROUP
    zeros = np.full((n_out, n_groups), 1 << (bits - 1))
    if not symmetric:
        zeros = rng.integers(1, 1 << bits, zeros.shape)
    groups = np.arange(n_in) // GROUP
    codes = rng.integers(0, 1 << bits, shape)
    scales = (rng.uniform(0.2, 1, zeros.shape) * (0.5 if bits == 4 else 0.03) / n_in**0.5).astype(np.float16)
    return Drawn(codes, scales, zeros, groups if in_order else rng.permutation(groups))


def ints(values: np.ndarray, bits: int) -> np.ndarray:
    """Integers of the last axis in int32, the first one in the lowest bits."""
    per = 32 // bits
    grouped = values.astype(np.uint64).reshape(*values.shape[:-1], -1, per)
    return (grouped << (bits * np.arange(per, dtype=np.uint64))).sum(-1).astype(np.uint32).view(np.int32)


def gptq(base: str, drawn: Drawn, bits: int, *, version: int = 1, has_order: bool = True) -> dict[str, np.ndarray]:
    """AutoGPTQ: integers along columns of (in, out); version 1 stores zero points minus 1."""
    zeros = drawn.zeros - 1 if version == 1 else drawn.zeros
    tensors = {
        f"{base}.qweight": ints(drawn.codes, bits).T,
        f"{base}.qzeros": ints(np.ascontiguousarray(zeros.T), bits),
        f"{base}.scales": drawn.scales.T,
    }
    return tensors | ({f"{base}.g_idx": drawn.groups.astype(np.int32)} if has_order else {})


def awq(base: str, drawn: Drawn, bits: int) -> dict[str, np.ndarray]:
    """AutoAWQ's "gemm": integers along rows of (in, out), eight columns in another order."""

    def packed(values: np.ndarray) -> np.ndarray:
        return ints(values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(values.shape), bits)

    return {
        f"{base}.qweight": packed(np.ascontiguousarray(drawn.codes.T)),
        f"{base}.qzeros": packed(np.ascontiguousarray(drawn.zeros.T)),
        f"{base}.scales": drawn.scales.T,
    }


def compressed(base: str, drawn: Drawn, bits: int) -> dict[str, np.ndarray]:
    """compressed-tensors: integers along rows of (out, in); zero points along columns."""
    zero = 1 << (bits - 1)
    tensors = {
        f"{base}.weight_packed": ints(drawn.codes, bits),
        f"{base}.weight_scale": drawn.scales,
        f"{base}.weight_shape": np.array(drawn.codes.shape, np.int64),
    }
    if (drawn.zeros != zero).any():
        tensors[f"{base}.weight_zero_point"] = np.ascontiguousarray(ints(np.ascontiguousarray(drawn.zeros.T), bits).T)
    if (np.diff(drawn.groups) < 0).any():
        tensors[f"{base}.weight_g_idx"] = drawn.groups.astype(np.int32)
    return tensors


def about_compressed(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def about_gptq(bits: int, **options: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True, "desc_act": False, **options}


def about_awq(bits: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": bits, "group_size": GROUP, "zero_point": True, "version": "gemm"}


Pack = Callable[[str, Drawn, int], Mapping[str, np.ndarray]]
CASES: dict[str, tuple[Pack, dict[str, Any], int, dict[str, bool], str]] = {
    "gptq": (gptq, about_gptq(4), 4, {"symmetric": True}, "Q4_0"),
    "gptq-8": (gptq, about_gptq(8), 8, {"symmetric": True}, "Q8_0"),
    "gptq-asymmetric": (gptq, about_gptq(4, sym=False), 4, {"symmetric": False}, "Q4_1"),
    "gptq-8-asymmetric": (gptq, about_gptq(8, sym=False), 8, {"symmetric": False}, "F16"),
    "gptq-order": (gptq, about_gptq(4, desc_act=True), 4, {"symmetric": True, "in_order": False}, "F16"),
    "gptq-no-order": (lambda *a: gptq(*a, has_order=False), about_gptq(4), 4, {"symmetric": True}, "Q4_0"),
    "gptq-2": (
        lambda *a: gptq(*a, version=2),
        about_gptq(4, checkpoint_format="gptq_v2", sym=False),
        4,
        {"symmetric": False},
        "Q4_1",
    ),
    "awq": (awq, about_awq(4), 4, {"symmetric": False}, "Q4_1"),
    "compressed": (compressed, about_compressed(4), 4, {"symmetric": True}, "Q4_0"),
    "compressed-8": (compressed, about_compressed(8), 8, {"symmetric": True}, "Q8_0"),
    "compressed-asymmetric": (compressed, about_compressed(4), 4, {"symmetric": False}, "Q4_1"),
    "compressed-order": (compressed, about_compressed(4), 4, {"symmetric": True, "in_order": False}, "F16"),
}
"""Packing, configuration, bits, how matrices are drawn, the type that they get."""


def packed_directory(tmp_path: Path, case: str, family: str = "llama") -> tuple[Any, Path, dict[str, Drawn]]:
    """A model with random weights, the directory with its packed matrices, and the random integers and scales."""
    pack, about, bits, options, _ = CASES[case]
    subject, rng = make_subject(tmp_path, family), np.random.default_rng(5)
    folder = save_directory(subject.model, tmp_path / "hf")
    drawn: dict[str, Drawn] = {}
    state = subject.model.state_dict()

    def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = dict(tensors)
        for name in sorted(tensors.keys() & state.keys()):
            if name.endswith("_proj.weight") and tensors[name].shape[1] % GROUP == 0:
                base = name.removesuffix(".weight")
                drawn[base] = draw(rng, tuple(tensors[name].shape), bits, **options)
                state[name].copy_(torch.tensor(drawn[base].weights))
                del result[name]
                parts = pack(base, drawn[base], bits)
                result |= {part: torch.tensor(np.ascontiguousarray(values)) for part, values in parts.items()}
        return result

    change_tensors(folder, packed)
    change_config(folder, lambda stated: {**stated, "quantization_config": about})
    return subject.model, folder, drawn


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_kept(tmp_path, case: str, load, random_tokens, assert_close) -> None:
    """Exactly in Q4_0 and Q8_0; in Q4_1 the product of scale and zero point is rounded; in F16 each weight is."""
    model, folder, drawn = packed_directory(tmp_path, case)
    kind = CASES[case][4]
    assert len(drawn) >= 3 * 6
    with Checkpoint(folder) as directory:
        for base, matrix in drawn.items():
            name = {"self_attn.o_proj": "attn_output", "mlp.up_proj": "ffn_up"}.get(base.split(".", 3)[-1])
            if name is None:
                continue
            info = directory.tensors[f"blk.{base.split('.')[2]}.{name}.weight"]
            assert info.ggml_type.name == kind
            actual = dequantize(directory.tensor_data(info.name), info.ggml_type, info.shape).astype(np.float64)
            scales, zeros = (part.astype(np.float64)[:, matrix.groups] for part in (matrix.scales, matrix.zeros))
            bound = {"Q4_1": scales * zeros * 2.0**-11, "F16": np.abs(matrix.weights) * 2.0**-11 + 2.0**-25}
            # Sums of float32 have an error of half a unit in the last place of the larger term.
            assert (
                np.abs(actual - matrix.weights) <= bound.get(kind, 0) + scales * zeros * 2.0**-23 * (kind == "Q4_1")
            ).all()
    tokens = random_tokens(N_TOKENS)
    expected = transformers_logits(model, tokens)
    with load(folder).new_context(OPTIONS) as context:
        logits = native_logits(context, tokens, [N_TOKENS])
    assert_close(logits, expected, 1e-4 if kind in ("Q4_0", "Q8_0") else 5e-3)


def test_a_packed_directory_becomes_a_gguf_file(tmp_path, load, random_tokens) -> None:
    """native computes the same of both. llama.cpp rounds activations to 8 bits, which moves these logits by 4 %."""
    model, folder, _ = packed_directory(tmp_path, "gptq")
    path = export(with_vocabulary(folder, tmp_path / "vocab"), tmp_path / "model.gguf")
    tokens = random_tokens(N_TOKENS)
    expected = transformers_logits(model, tokens)
    with slm.load(path, backend="llamacpp") as loaded, loaded.model.new_context(OPTIONS) as context:
        logits = native_logits(context, tokens, [N_TOKENS])
    assert np.linalg.norm(logits - expected) < 0.1 * np.linalg.norm(expected)
    rows = []
    for source in (folder, path):
        with load(source).new_context(OPTIONS) as context:
            rows.append(native_logits(context, tokens, [N_TOKENS]))
    assert np.array_equal(*rows)


def test_rows_that_a_family_takes_apart_become_f16(tmp_path, load, random_tokens, assert_close) -> None:
    """Latent attention transposes a part of a matrix, which blocks of columns do not allow."""
    model, folder, _ = packed_directory(tmp_path, "gptq", "deepseek2_lite")
    with Checkpoint(folder) as directory:
        types = {name.split(".", 2)[-1]: info.ggml_type.name for name, info in directory.tensors.items()}
    assert (types["attn_k_b.weight"], types["attn_output.weight"]) == ("F16", "Q4_0")
    tokens = random_tokens(N_TOKENS)
    with load(folder).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS]), transformers_logits(model, tokens), 2e-2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bits": 3}, UnsupportedModel, r"matrices of 3 bits \(accepted: 4, and 8 for GPTQ\)"),
        ({"quant_method": "bitsandbytes"}, UnsupportedModel, "'bitsandbytes', which is not implemented"),
        ({"checkpoint_format": "marlin"}, UnsupportedModel, "checkpoint_format"),
        ({"dynamic": {"x": {"bits": 8}}}, UnsupportedModel, "dynamic"),
        ({"surprise": 1}, UnsupportedModel, "surprise"),
    ],
)
def test_other_configurations_are_refused(tmp_path, change, error, message) -> None:
    _, folder, _ = packed_directory(tmp_path, "gptq")
    about = {**about_gptq(4), **change}
    change_config(folder, lambda stated: {**stated, "quantization_config": about})
    with pytest.raises(error, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("case", "part", "change", "message"),
    [
        ("gptq", "qzeros", None, "qzeros' is missing"),
        ("gptq", "scales", lambda t: t[:1], r"scales' has the shape|qzeros' has the shape"),
        ("gptq", "scales", lambda t: t.to(torch.int32), "of type I32"),
        ("gptq", "g_idx", lambda t: t + 10**6, "names groups other than 0 to"),
        ("gptq", "g_idx", lambda t: t[:-1], "g_idx' has the shape"),
        ("gptq", "qweight", lambda t: t.reshape(-1), "is packed, but no matrix"),
        ("awq", "qzeros", lambda t: t[:, :-1], "qzeros' has the shape"),
        ("compressed", "weight_shape", lambda t: t + 1, "weight_shape' is "),
        ("compressed", "weight_scale", lambda t: t[:, :-2], "288 columns in 7 groups"),
    ],
)
def test_damaged_parts_are_refused(tmp_path, case, part, change, message) -> None:
    _, folder, _ = packed_directory(tmp_path, case)
    name = f"model.layers.1.mlp.up_proj.{part}"

    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changed = {} if change is None else {name: change(tensors[name])}
        return {key: tensor for key, tensor in tensors.items() if key != name} | changed

    change_tensors(folder, damage)
    with pytest.raises((InvalidModelFile, UnsupportedModel), match=message) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)
