"""Compiles Triton kernels for GPUs that this machine need not have: `python compile_triton.py 80 90 75:512`.

Arguments are compute capabilities, for which every kernel is compiled. With the width of heads after a colon, it is
attention alone, with new tokens. The wrappers run on tensors of the CPU.
Instead of a launch, the kernel is compiled for the types of its arguments. As in Triton, an integer argument of 1
becomes a constant, and multiples of 16 are known as such. Prints one line per kernel: its name, the compute capability,
the bytes of machine code and of shared memory, the registers per thread, and the bytes of registers that spill. If a
thread has several consecutive values of a block, the name ends in their number.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from slm_core.architectures import RopeStyle
from slm_core.types import KvType
from slm_native.kernels import Scoring
from slm_native.kernels.torch.pages import DecodeGroup, TorchKvLayer, TorchPageStore
from slm_native.kernels.torch.triton import products, small_steps
from slm_native.kernels.torch.triton.decoding import WRITTEN, NewTokens, attend_decoding
from slm_native.kernels.torch.triton.formats import PackedFormat, packed_format, packed_types
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


def is_aligned(value: object) -> bool:
    """Whether Triton compiles for a multiple of 16; tensors begin at one."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def compiler(target: GPUTarget) -> Callable[..., Callable[..., None]]:
    def launch(kernel: JITFunction, grid: object) -> Callable[..., None]:
        def compile_kernel(*args: object, num_warps: int = 4, num_stages: int = 3, **constants: object) -> None:
            names = [name for name in kernel.arg_names if name not in constants]
            arguments = dict(zip(names, args, strict=True))
            constants |= {name: 1 for name, value in arguments.items() if isinstance(value, int) and value == 1}
            signature = {name: triton_type(value) for name, value in arguments.items()}
            signature |= dict.fromkeys(constants, "constexpr")
            ordered = {name: signature[name] for name in kernel.arg_names}
            aligned = [i for i, name in enumerate(kernel.arg_names) if is_aligned(arguments.get(name))]
            attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
            source = ASTSource(fn=kernel, signature=ordered, constexprs=constants, attrs=attributes)
            name = kernel.__name__ + (f"[{per_thread}]" if (per_thread := constants.get("PER_THREAD", 1)) != 1 else "")
            options = {"num_warps": num_warps, "num_stages": num_stages}
            compiled = triton.compile(source, target=target, options=options)
            registers, spilled = resources(compiled.asm["cubin"])
            sizes = len(compiled.asm["cubin"]), compiled.metadata.shared, registers, spilled
            sys.stdout.write(f"{name} {target.arch} {' '.join(map(str, sizes))}\n")

        return compile_kernel

    return launch


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory, where registers spill."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return registers, stack


def layer_of(kv_type: str, width: int) -> TorchKvLayer:
    codec = codec_of(kv_type, width)
    return TorchPageStore(PageLayout(range(1), 2, width, codec, codec), 4, torch.device("cpu")).layers[0]


def attention(width: int, kv_types: Sequence[str]) -> Iterator[Callable[[], object]]:
    """With new tokens where the kernel writes them: this kernel includes that of tokens in the cache."""
    for kv_type in kv_types:
        new = new_tokens(width) if kv_type in WRITTEN else None
        yield lambda kv_type=kv_type, new=new: attend(width, kv_type, new)


def attend(width: int, kv_type: str, new: NewTokens | None) -> None:
    """Attention of a decode, with all options for some KV types."""
    group = DecodeGroup(torch.tensor([0, 1]), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([100, 130]), 130)
    all_options = Scoring(64, 30.0, torch.zeros(8), torch.zeros(8))
    layer, heads = layer_of(kv_type, width), torch.zeros(2, 8, width)
    scoring = all_options if kv_type in ("f32", "q8_0") else Scoring()
    dtype = {"f32": torch.float32, "q8_0": torch.bfloat16}.get(kv_type, torch.float16)
    attend_decoding(heads, layer, group, 0.1, scoring, dtype=dtype, out=heads, new=new)


def new_tokens(width: int) -> NewTokens:
    """Two heads of keys and values, with every option."""
    heads, angles, places = torch.zeros(2, 2 * width), torch.zeros(2, width // 2), torch.zeros(2, dtype=torch.int64)
    norm = torch.zeros(width), 1e-5
    return NewTokens(heads, heads, norm, norm, angles, angles, RopeStyle.HALF_SPLIT, places, places)


def large(form: PackedFormat, n_in: int) -> torch.Tensor:
    """A matrix that fills a GPU; its memory is never written."""
    return torch.empty(1 << 16, n_in // form.block_size * form.block_bytes, dtype=torch.uint8)


def join() -> None:
    """Attention that leaves its results to be combined by a kernel of their own."""
    layer, heads = layer_of("f16", 128), torch.zeros(2, 8, 128)
    layer.arrivals = layer.arrivals[:1]
    group = DecodeGroup(torch.tensor([0, 1]), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([100, 130]), 130)
    attend_decoding(heads, layer, group, 0.1, Scoring(sinks=torch.zeros(8)), dtype=torch.float16, out=heads)


def products_and_steps() -> Iterator[Callable[[], object]]:
    for ggml_type in packed_types():
        n_in = max(32, ggml_type.block_size) * 16
        form = packed_format(ggml_type, n_in)
        assert form is not None
        packed = torch.zeros(80, n_in // ggml_type.block_size * ggml_type.block_bytes, dtype=torch.uint8)
        few = torch.zeros(8 if ggml_type.name == "Q4_K" else 1, n_in)
        yield lambda x=few, packed=packed, form=form: products.few_rows(x, packed, form)
        if form.terms is not None or ggml_type.name in MANY_ROWS_TYPES:
            x = torch.zeros(1, n_in)
            yield lambda x=x, form=form: products.few_rows(x, large(form, x.shape[1]), form, gated=True)
        if ggml_type.name in MANY_ROWS_TYPES:
            many = torch.zeros(70, n_in, dtype=torch.bfloat16 if ggml_type.name == "BF16" else torch.float16)
            yield lambda x=many, packed=packed, form=form: products.many_rows(x, packed, form)
        yield lambda packed=packed, form=form: products.dequantized(packed, form, torch.float16)
    heads, angles, places = torch.zeros(2, 8, 128), torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64)
    for kv_type in ("f32", "f16", "q8_0"):  # torch encodes the other types
        stored = {"planes": tuple(layer_of(kv_type, 128).key_planes), "pages": places, "slots": places}
        yield lambda stored=stored: small_steps.norm_rope_and_store(
            heads[:, :2], torch.zeros(128), 1e-5, angles, angles, RopeStyle.HALF_SPLIT, **stored
        )
    for style in RopeStyle:
        yield lambda style=style: small_steps.norm_and_rope(heads, None, 1e-5, angles, angles, style)
    yield join
    yield lambda: small_steps.silu_mul(angles, angles)
    yield lambda: small_steps.rms_norm(angles, torch.zeros(64), 1e-5)


def all_kernels() -> Iterator[Callable[[], object]]:
    return itertools.chain(attention(128, tuple(KvType)), products_and_steps())


def attention_of(width: int) -> Iterator[Callable[[], object]]:
    return attention(width, ["f16"])


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        capability, _, width = argument.partition(":")
        JITFunction.__getitem__ = compiler(GPUTarget("cuda", int(capability), 32))
        for call in attention_of(int(width)) if width else all_kernels():
            call()
