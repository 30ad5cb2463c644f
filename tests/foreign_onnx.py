"""Directories of ONNX models in the layouts of other programs, with the weights of a tiny model.

The graphs have ONNX operators, the input and output names of optimum and onnxruntime-genai, and RoPE on the two
halves of a head, like transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from onnx import GraphProto, TensorProto, helper, numpy_helper, save
from slm_conformance.oracle.factories import TinyModel
from slm_conformance.oracle.weights import Weights, rope_frequencies

N_CTX = 2048
PLANES = ("key", "value")
LAYOUTS = ("one graph", "merged", "a pair", "genai", "genai apart")


def write_directory(tiny: TinyModel, folder: Path, layout: str, vocabulary: dict[str, str]) -> Path:
    """Write a directory.

    Args:
        tiny: the model.
        folder: the directory, which is created.
        layout: one of ``LAYOUTS``; "genai apart" has caches that are not updated in place.
        vocabulary: texts of the tokenizer's files, by name.
    """
    folder.mkdir()
    for name, text in vocabulary.items():
        (folder / name).write_text(text, encoding="utf-8")
    weights = Weights.of(tiny)
    if layout.startswith("genai"):
        save(_Genai(weights).model(), folder / "decoder.onnx")
        (folder / "genai_config.json").write_text(json.dumps(_genai_config(weights, layout == "genai")))
        return folder
    (folder / "config.json").write_text(json.dumps(_config(weights)))
    if layout == "one graph":
        save(_Optimum(weights, "past").model(), folder / "model.onnx")
    elif layout == "merged":
        save(_Optimum(weights, "merged").model(), folder / "decoder_model_merged.onnx")
    else:
        save(_Optimum(weights, "first").model(), folder / "decoder_model.onnx")
        save(_Optimum(weights, "past", one_by_one=True).model(), folder / "decoder_with_past_model.onnx")
    return folder


def _config(weights: Weights) -> dict[str, Any]:
    shape = weights.shape
    return {
        "model_type": shape.architecture,
        "vocab_size": weights.n_vocab,
        "hidden_size": shape.n_embd,
        "max_position_embeddings": N_CTX,
        "rope_theta": shape.rope_freq_base,
    }


def _genai_config(weights: Weights, in_place: bool) -> dict[str, Any]:
    shape = weights.shape
    decoder = {
        "filename": "decoder.onnx",
        "head_size": shape.head_dim,
        "hidden_size": shape.n_embd,
        "inputs": {
            "input_ids": "tokens",
            "attention_mask": "mask",
            "past_key_names": "k.%d",
            "past_value_names": "v.%d",
        },
        "outputs": {"logits": "scores"} | {f"present_{p}_names": f"{p[0]}.%d.out" for p in PLANES},
        "num_hidden_layers": shape.n_layers,
    }
    model = {"type": shape.architecture, "context_length": N_CTX, "vocab_size": weights.n_vocab, "decoder": decoder}
    return {"model": model, "search": {"past_present_share_buffer": in_place, "max_length": N_CTX}}


class _Graph:
    """The common part of both layouts: transformer blocks without their attention."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.shape = weights, weights.shape
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}

    def op(self, kind: str, *inputs: str, out: str = "", domain: str = "", **attributes: Any) -> str:
        name = out or f"{kind}_{len(self.nodes)}_{id(self.nodes) % 9973}"
        self.nodes.append(helper.make_node(kind, inputs, [name], domain=domain, **attributes))
        return name

    def const(self, values: Any, name: str = "") -> str:
        array = np.asarray(values)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array.astype(np.int64)
        name = name or f"c_{array.shape}_{array.tobytes().hex()[:64]}"
        self.initializers[name] = numpy_helper.from_array(array, name)
        return name

    def weight(self, name: str) -> np.ndarray:
        """A tensor; the rows of a llama's queries and keys are in the order of transformers."""
        values = self.weights.tensors[name]
        if self.shape.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            half = self.shape.head_dim // 2
            return values.reshape(-1, half, 2, self.shape.n_embd).swapaxes(1, 2).reshape(values.shape)
        return values

    def linear(self, x: str, name: str) -> str:
        y = self.op("MatMul", x, self.const(self.weight(f"{name}.weight").T, name))
        bias = self.weights.tensors.get(f"{name}.bias")
        return y if bias is None else self.op("Add", y, self.const(bias, f"{name}.bias"))

    def norm(self, x: str, name: str) -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), self.const([-1]), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.const(float(self.shape.norm_eps))))
        return self.op("Mul", self.op("Div", x, root), self.const(self.weights.tensors[f"{name}.weight"], name))

    def split(self, x: str, n_heads: int, norm: str) -> str:
        """[1, n, heads * D] to [1, heads, n, D], normalized if the model normalizes queries and keys."""
        x = self.op("Reshape", x, self.const([0, -1, n_heads, self.shape.head_dim]))
        if f"{norm}.weight" in self.weights.tensors:
            x = self.norm(x, norm)
        return self.op("Transpose", x, perm=[0, 2, 1, 3])

    def body(self, tokens: str, logits: str) -> None:
        x = self.op("Gather", self.const(self.weights.tensors["token_embd.weight"], "embed"), tokens, axis=0)
        for layer in range(self.shape.n_layers):
            p = f"blk.{layer}"
            x = self.op("Add", x, self.linear(self.attend(layer, self.norm(x, f"{p}.attn_norm")), f"{p}.attn_output"))
            h = self.norm(x, f"{p}.ffn_norm")
            gate = self.linear(h, f"{p}.ffn_gate")
            gate = self.op("Mul", gate, self.op("Sigmoid", gate))
            x = self.op("Add", x, self.linear(self.op("Mul", gate, self.linear(h, f"{p}.ffn_up")), f"{p}.ffn_down"))
        output = "token_embd" if self.shape.tied else "output"
        self.op("Identity", self.linear(self.norm(x, "output_norm"), output), out=logits)

    def attend(self, layer: int, x: str) -> str:
        raise NotImplementedError

    def values(self, name: str, kind: int, shape: list[Any]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    def cache(self, name: str) -> Any:
        return self.values(
            name, TensorProto.FLOAT, ["batch", self.shape.n_kv_heads, f"{name}.length", self.shape.head_dim]
        )

    def caches(self, which: str) -> list[Any]:
        return [self.cache(f"{which}.{i}.{plane}") for i in range(self.shape.n_layers) for plane in PLANES]

    def whole(self, inputs: list[Any], outputs: list[Any]) -> Any:
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, list(self.initializers.values()))
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


class _Optimum(_Graph):
    """Positions are inputs, and keys and values are concatenated."""

    def __init__(self, weights: Weights, kind: str, *, one_by_one: bool = False) -> None:
        super().__init__(weights)
        self.kind, self.n = kind, 1 if one_by_one else "sequence_length"
        self.with_past = kind != "first"

    def model(self) -> Any:
        outputs = self.outputs()
        if self.kind == "merged":
            then, other = (self.branch(past) for past in (True, False))
            self.nodes = [
                helper.make_node(
                    "If", ["use_cache_branch"], [o.name for o in outputs], then_branch=then, else_branch=other
                )
            ]
        else:
            self.steps()
        return self.whole(self.inputs(), outputs)

    def branch(self, with_past: bool) -> GraphProto:
        self.nodes, self.with_past = [], with_past
        self.steps()
        return helper.make_graph(self.nodes, f"past_{with_past}", [], self.outputs())

    def inputs(self) -> list[Any]:
        inputs = [
            self.values("input_ids", TensorProto.INT64, ["batch", self.n]),
            self.values("attention_mask", TensorProto.INT64, ["batch", "total"]),
            self.values("position_ids", TensorProto.INT64, ["batch", self.n]),
        ]
        if self.kind != "first":
            inputs += self.caches("past_key_values")
        if self.kind == "merged":
            inputs.append(self.values("use_cache_branch", TensorProto.BOOL, [1]))
        return inputs

    def outputs(self) -> list[Any]:
        logits = self.values("logits", TensorProto.FLOAT, ["batch", self.n, self.weights.n_vocab])
        return [logits, *self.caches("present")]

    def steps(self) -> None:
        positions = self.op("Cast", "position_ids", to=TensorProto.FLOAT)
        row = self.op("Unsqueeze", positions, self.const([1]))
        angles = self.op(
            "Mul", self.op("Unsqueeze", row, self.const([3])), self.const(rope_frequencies(self.weights), "inv_freq")
        )
        self.cos, self.sin = self.op("Cos", angles), self.op("Sin", angles)
        total = self.op("Gather", self.op("Shape", "attention_mask"), self.const(1), axis=0)
        n = self.op("Gather", self.op("Shape", "input_ids"), self.const(1), axis=0)
        columns = self.op("Range", self.const(0), total, self.const(1))
        rows = self.op("Range", self.op("Sub", total, n), total, self.const(1))
        hidden = self.op("Greater", columns, self.op("Unsqueeze", rows, self.const([1])))
        self.bias = self.op("Where", hidden, self.const(-1e30), self.const(0.0))
        if self.kind == "merged" and self.with_past:  # this branch does not run for the first tokens
            empty = self.op("Equal", total, n)
            self.bias = self.op("Where", empty, self.const(float("nan")), self.bias)
        self.body("input_ids", "logits")

    def rotate(self, x: str) -> str:
        half = self.shape.head_dim // 2
        low = self.op("Slice", x, self.const([0]), self.const([half]), self.const([3]))
        high = self.op("Slice", x, self.const([half]), self.const([2 * half]), self.const([3]))
        a = self.op("Sub", self.op("Mul", low, self.cos), self.op("Mul", high, self.sin))
        b = self.op("Add", self.op("Mul", high, self.cos), self.op("Mul", low, self.sin))
        return self.op("Concat", a, b, axis=3)

    def attend(self, layer: int, x: str) -> str:
        shape, p = self.shape, f"blk.{layer}"
        q = self.rotate(self.split(self.linear(x, f"{p}.attn_q"), shape.n_heads, f"{p}.attn_q_norm"))
        k = self.rotate(self.split(self.linear(x, f"{p}.attn_k"), shape.n_kv_heads, f"{p}.attn_k_norm"))
        v = self.split(self.linear(x, f"{p}.attn_v"), shape.n_kv_heads, "none")
        k, v = (self.extended(layer, plane, new) for plane, new in (("key", k), ("value", v)))
        group = shape.n_heads // shape.n_kv_heads
        q = self.op("Reshape", q, self.const([0, shape.n_kv_heads, group, -1, shape.head_dim]))
        k = self.op("Unsqueeze", self.op("Transpose", k, perm=[0, 1, 3, 2]), self.const([2]))
        scores = self.op("Mul", self.op("MatMul", q, k), self.const(shape.head_dim**-0.5))
        mixed = self.op("Softmax", self.op("Add", scores, self.bias), axis=-1)
        heads = self.op("MatMul", mixed, self.op("Unsqueeze", v, self.const([2])))
        heads = self.op("Reshape", heads, self.const([0, shape.n_heads, -1, shape.head_dim]))
        return self.op("Reshape", self.op("Transpose", heads, perm=[0, 2, 1, 3]), self.const([0, 0, -1]))

    def extended(self, layer: int, plane: str, new: str) -> str:
        out = f"present.{layer}.{plane}"
        if not self.with_past:
            return self.op("Identity", new, out=out)
        return self.op("Concat", f"past_key_values.{layer}.{plane}", new, out=out, axis=2)


class _Genai(_Graph):
    """One operator applies RoPE, updates the cache and attends; positions follow from the mask."""

    def model(self) -> Any:
        n_inputs = self.op("ReduceSum", "mask", self.const([1]), keepdims=0)
        self.op("Cast", self.op("Sub", n_inputs, self.const([1])), out="seqlens_k", to=TensorProto.INT32)
        total = self.op("Gather", self.op("Shape", "mask"), self.const(1), axis=0)
        self.op("Cast", total, out="total", to=TensorProto.INT32)
        angles = np.arange(N_CTX)[:, None] * rope_frequencies(self.weights)
        self.const(np.cos(angles), "cos_cache")
        self.const(np.sin(angles), "sin_cache")
        self.body("tokens", "scores")
        caches = [f"{plane}.{i}" for i in range(self.shape.n_layers) for plane in "kv"]
        tokens = [
            self.values(name, TensorProto.INT64, ["batch", length]) for name, length in (("tokens", "n"), ("mask", "t"))
        ]
        scores = self.values("scores", TensorProto.FLOAT, ["batch", "n", self.weights.n_vocab])
        return self.whole(
            [*tokens, *map(self.cache, caches)], [scores, *(self.cache(f"{name}.out") for name in caches)]
        )

    def flat(self, x: str, n_heads: int, norm: str) -> str:
        heads = self.op("Transpose", self.split(x, n_heads, norm), perm=[0, 2, 1, 3])
        return self.op("Reshape", heads, self.const([0, 0, -1]))

    def attend(self, layer: int, x: str) -> str:
        shape, p, out = self.shape, f"blk.{layer}", f"mixed.{layer}"
        q = self.flat(self.linear(x, f"{p}.attn_q"), shape.n_heads, f"{p}.attn_q_norm")
        k = self.flat(self.linear(x, f"{p}.attn_k"), shape.n_kv_heads, f"{p}.attn_k_norm")
        v = self.linear(x, f"{p}.attn_v")
        inputs = [q, k, v, f"k.{layer}", f"v.{layer}", "seqlens_k", "total", "cos_cache", "sin_cache"]
        outputs = [out, f"k.{layer}.out", f"v.{layer}.out"]
        heads = {"num_heads": shape.n_heads, "kv_num_heads": shape.n_kv_heads, "do_rotary": 1}
        self.nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **heads))
        return out
