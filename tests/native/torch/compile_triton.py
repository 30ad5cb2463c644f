"""Compiles every Triton kernel for a GPU that this machine need not have: `python compile_triton.py 90`.

The wrappers run on tensors of the CPU. Instead of a launch, the kernel is compiled for the types of its arguments. As
in Triton, an integer argument of 1 becomes a constant. Prints one line per kernel: its name and the bytes of machine
code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from slm_core.architectures import RopeStyle
from slm_core.types import KvType
from slm_native.kernels import Scoring
from slm_native.kernels.torch.pages import DecodeGroup, TorchPageStore
from slm_native.kernels.torch.triton import products, small_steps
from slm_native.kernels.torch.triton.decoding import attend_decoding
from slm_native.kernels.torch.triton.formats import packed_format, packed_types
from slm_native.kv import PageLayout, codec_of

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
MANY_ROWS_TYPES = ("BF16", "Q5_0", "Q6_K")
"""Types for which ``many_rows`` is compiled; the other types add no code that ``few_rows`` does not compile."""


def triton_type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 1 << 31 else "i64"


def compiler(target: GPUTarget) -> Callable[..., Callable[..., None]]:
    def launch(kernel: JITFunction, grid: object) -> Callable[..., None]:
        def compile_kernel(*args: object, num_warps: int = 4, **constants: object) -> None:
            names = [name for name in kernel.arg_names if name not in constants]
            arguments = dict(zip(names, args, strict=True))
            constants |= {name: 1 for name, value in arguments.items() if isinstance(value, int) and value == 1}
            signature = {name: triton_type(value) for name, value in arguments.items()}
            signature |= dict.fromkeys(constants, "constexpr")
            ordered = {name: signature[name] for name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=ordered, constexprs=constants)
            compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
            sys.stdout.write(f"{kernel.__name__} {len(compiled.asm['cubin'])}\n")

        return compile_kernel

    return launch


def calls() -> Iterator[Callable[[], object]]:
    for ggml_type in packed_types():
        n_in = max(32, ggml_type.block_size) * 16
        form = packed_format(ggml_type, n_in)
        assert form is not None
        packed = torch.zeros(80, n_in // ggml_type.block_size * ggml_type.block_bytes, dtype=torch.uint8)
        few = torch.zeros(8 if ggml_type.name == "Q4_K" else 1, n_in)
        yield lambda x=few, packed=packed, form=form: products.few_rows(x, packed, form)
        if ggml_type.name in MANY_ROWS_TYPES:
            many = torch.zeros(70, n_in, dtype=torch.bfloat16 if ggml_type.name == "BF16" else torch.float16)
            yield lambda x=many, packed=packed, form=form: products.many_rows(x, packed, form)
    heads, table = torch.zeros(2, 8, 128), torch.zeros(2, 3, dtype=torch.int64)
    group = DecodeGroup(torch.tensor([0, 1]), table, torch.tensor([100, 130]), 130)
    angles, no_places = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64)
    all_options = Scoring(64, 30.0, torch.zeros(8), torch.zeros(8))
    for kv_type in KvType:
        codec = codec_of(kv_type, 128)
        layer = TorchPageStore(PageLayout(range(1), 2, 128, codec, codec), 4, torch.device("cpu")).layers[0]
        scoring, q = {
            "f32": (all_options, heads),
            "f16": (Scoring(), heads.half()),
            "q8_0": (all_options, heads.bfloat16()),
        }.get(kv_type, (Scoring(), heads.half()))
        yield lambda q=q, layer=layer, scoring=scoring: attend_decoding(q, layer, group, 0.1, scoring)
        if kv_type not in ("f32", "f16", "q8_0"):
            continue  # torch encodes these types
        store_arguments = {"planes": tuple(layer.key_planes), "pages": no_places, "slots": no_places}
        yield lambda store_arguments=store_arguments: small_steps.norm_rope_and_store(
            heads[:, :2].contiguous(), torch.zeros(128), 1e-5, angles, angles, RopeStyle.HALF_SPLIT, **store_arguments
        )
    for style in RopeStyle:
        yield lambda style=style: small_steps.norm_and_rope(heads, None, 1e-5, angles, angles, style)
    yield lambda: small_steps.silu_mul(heads, heads)
    yield lambda: small_steps.rms_norm(angles, torch.zeros(64), 1e-5)


if __name__ == "__main__":
    JITFunction.__getitem__ = compiler(GPUTarget("cuda", int(sys.argv[1]), 32))
    for call in calls():
        call()
