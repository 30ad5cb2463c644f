"""Fused elementwise operations. Alone they are memory-bound, so neighbours are computed in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slm_core.architectures import RopeStyle
from slm_native.kernels.torch.triton._checks import check, check_rows, on_device_of
from slm_native.kv import PAGE_TOKENS

_LANES = 1024
_HALF_EVEN = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a number below 2^22 to an integer, halves to even."""


@triton.jit
def _gated(
    gate_ptr,
    up_ptr,
    y_ptr,
    width,
    gate_row,
    up_row,
    LANES: tl.constexpr,  # noqa: N803  (Triton's custom for constants)
):
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    there = lane < width
    gate = tl.load(gate_ptr + row * gate_row + lane, mask=there, other=0.0)
    up = tl.load(up_ptr + row * up_row + lane, mask=there, other=0.0)
    tl.store(y_ptr + row * width + lane, gate / (1 + tl.exp(-gate)) * up, mask=there)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gate * sigmoid(gate) * up``.

    Args:
        gate: float32 [T, width]; the rows may be parts of longer ones.
        up: the same.

    Returns:
        float32 [T, width].

    Raises:
        ValueError: another type, shape or layout.
    """
    n_rows, width = gate.shape
    check_rows("gate", gate, torch.float32, (n_rows, width))
    check_rows("up", up, torch.float32, (n_rows, width))
    y = torch.empty(n_rows, width, dtype=torch.float32, device=gate.device)
    with on_device_of(gate):
        grid = (n_rows, triton.cdiv(width, _LANES))
        _gated[grid](gate, up, y, width, gate.stride(0), up.stride(0), LANES=_LANES)
    return y


@triton.jit
def _normed(x_ptr, weight_ptr, y_ptr, width, eps, LANES: tl.constexpr):  # noqa: N803
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    there = lane < width
    x = tl.load(x_ptr + row * width + lane, mask=there, other=0.0)
    weight = tl.load(weight_ptr + lane, mask=there, other=0.0)
    tl.store(y_ptr + row * width + lane, x / tl.sqrt(tl.sum(x * x, axis=0) / width + eps) * weight, mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight``.

    Args:
        x: float32 [..., width].
        weight: float32 [width].
        eps: see above.

    Returns:
        float32, the shape of ``x``.

    Raises:
        ValueError: another type, shape or layout.
    """
    width = x.shape[-1]
    check("x", x, torch.float32, tuple(x.shape))
    check("weight", weight, torch.float32, (width,))
    y = torch.empty_like(x)
    lanes = triton.next_power_of_2(width)
    with on_device_of(x):
        _normed[(x.numel() // width,)](x, weight, y, width, eps, LANES=lanes)
    return y


@triton.jit
def positioned(
    heads,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    d,
    real,
    eps,
    D: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    NORMED: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
    AXIS: tl.constexpr,  # noqa: N803
):
    """Heads of one token, normalized and rotated: [DP] for one pointer, [G, DP] for pointers [G, 1]."""
    if INTERLEAVED:
        pair, other, first = d // 2, d ^ 1, d % 2 == 0
    else:
        pair, other, first = d % HALF if HALF else d, tl.where(d < HALF, d + HALF, d - HALF), d < HALF
    is_rotated = d < 2 * HALF
    x = tl.load(heads + d, mask=real & (d < D), other=0.0)
    partner = tl.load(heads + other, mask=real & is_rotated, other=0.0)
    if NORMED:
        root = tl.sqrt(tl.sum(x * x, axis=AXIS, keep_dims=True) / D + eps)
        x = x / root * tl.load(weight_ptr + d, mask=d < D, other=0.0)
        partner = partner / root * tl.load(weight_ptr + other, mask=is_rotated, other=0.0)
    cos = tl.load(cos_ptr + pair, mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + pair, mask=is_rotated, other=0.0)
    return x * cos + tl.where(first, -partner, partner) * sin


@triton.jit
def write_head(
    x,
    plane_ptr,
    scales_ptr,
    at,
    d,
    D: tl.constexpr,  # noqa: N803
    DP: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
):
    """Encode one head [DP] and write it as number ``at`` of the heads in a plane; ``BLOCKS`` is 0 unless it is q8_0."""
    y_head = plane_ptr + at * D
    if BLOCKS == 0:
        if plane_ptr.dtype.element_ty == tl.float16:
            x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        tl.store(y_head + d, x.to(plane_ptr.dtype.element_ty), mask=d < D)
    else:
        blocks = tl.reshape(x, (BLOCKS, 32))
        peak = tl.max(tl.abs(blocks), axis=1)  # blocks below 1e-30 are encoded as zeros
        scale = peak / 127
        inverse = tl.where(peak > 1e-30, 1 / tl.where(peak > 1e-30, scale, 1.0), 0.0)
        quants = (blocks * inverse[:, None] + _HALF_EVEN) - _HALF_EVEN
        tl.store(y_head + d, tl.reshape(quants, (DP,)).to(tl.int8), mask=d < D)
        tl.store(scales_ptr + at * BLOCKS + tl.arange(0, BLOCKS), tl.minimum(scale, 65504.0).to(tl.float16))


@triton.jit
def _positioned(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    scales_ptr,
    pages,
    slots,
    eps,
    x_row,
    page_stride,
    scale_page_stride,
    H: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    DP: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr,  # noqa: N803
    NORMED: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
    STORED: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
):
    """One head of one token: normalized, rotated, and written to a row or to the KV cache."""
    token, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, DP)
    x_head, angles = x_ptr + token.to(tl.int64) * x_row + head * D, token * HALF
    x = positioned(
        x_head, weight_ptr, cos_ptr + angles, sin_ptr + angles, d, d < D, eps, D, HALF, NORMED, INTERLEAVED, 0
    )
    if not STORED:
        tl.store(y_ptr + (token.to(tl.int64) * H + head) * D + d, x, mask=d < D)
    else:
        page, slot = tl.load(pages + token), tl.load(slots + token)
        of_page = y_ptr + page * page_stride
        write_head(x, of_page, scales_ptr + page * scale_page_stride, head * PAGE + slot, d, D, DP, BLOCKS)


def norm_and_rope(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, style: RopeStyle) -> Tensor:
    """Normalize heads, if there is a weight, and rotate them.

    Args:
        x: float32 [T, H, D]; the rows may be parts of longer ones.
        weight: float32 [D], or None.
        eps: epsilon of the norm.
        cos: float32 [T, R/2], R at most D; R = 0 rotates nothing.
        sin: the same.
        style: which values form a pair.

    Returns:
        float32 [T, H, D].

    Raises:
        ValueError: another type, shape or layout.
    """
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _position(x, weight, eps, cos, sin, style, planes=(y,), pages=None, slots=None)
    return y


def norm_rope_and_store(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    style: RopeStyle,
    *,
    planes: tuple[Tensor, ...],
    pages: Tensor,
    slots: Tensor,
) -> None:
    """Normalize heads, if there is a weight; rotate, encode and write them to their pages of the KV cache.

    Args:
        x: float32 [T, K, D]; the rows may be parts of longer ones. D is a power of two if the cache has blocks (q8_0).
        weight: float32 [D], or None.
        eps: epsilon of the norm.
        cos: float32 [T, R/2], R at most D; R = 0 rotates nothing.
        sin: the same.
        style: which values form a pair.
        planes: the planes of a layer's keys or values, [n_pages, K, 64, W] each.
        pages: int64 [T], the page of each token.
        slots: int64 [T], the slot of each token on its page.

    Raises:
        ValueError: another type, shape or layout.
    """
    _position(x, weight, eps, cos, sin, style, planes=planes, pages=pages, slots=slots)


def _position(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    style: RopeStyle,
    *,
    planes: tuple[Tensor, ...],
    pages: Tensor | None,
    slots: Tensor | None,
) -> None:
    n_tokens, n_heads, width = x.shape
    check_rows("x", x, torch.float32, (n_tokens, n_heads, width))
    check("cos", cos, torch.float32, (n_tokens, None))
    check("sin", sin, torch.float32, (n_tokens, cos.shape[1]))
    if 2 * cos.shape[1] > width:
        raise ValueError(f"cos is {tuple(cos.shape)} (accepted: half of {width} at most)")
    if weight is not None:
        check("weight", weight, torch.float32, (width,))
    stored = pages is not None and slots is not None
    if stored:
        _check_places(planes, pages, slots, n_tokens, n_heads, width)
    y, scales = planes[0], planes[-1]
    with on_device_of(x):
        _positioned[n_tokens, n_heads](
            *(x, x if weight is None else weight, cos, sin, y, scales),
            *(x if pages is None else pages, x if slots is None else slots, eps),
            *(x.stride(0), y.stride(0), scales.stride(0)),
            H=n_heads,
            D=width,
            DP=triton.next_power_of_2(width),
            HALF=cos.shape[1],
            PAGE=PAGE_TOKENS,
            NORMED=weight is not None,
            INTERLEAVED=style is RopeStyle.INTERLEAVED,
            STORED=stored,
            BLOCKS=scales.shape[-1] if len(planes) > 1 else 0,
        )


def _check_places(
    planes: tuple[Tensor, ...], pages: Tensor | None, slots: Tensor | None, n_tokens: int, n_heads: int, width: int
) -> None:
    for name, indices in (("pages", pages), ("slots", slots)):
        assert indices is not None, "they come together"
        check(name, indices, torch.int64, (n_tokens,))
    if planes[0].shape[1] != n_heads or planes[0].shape[3] != width:
        raise ValueError(f"pages {tuple(planes[0].shape)} (accepted: {n_heads} heads of {width})")
    if len(planes) > 1 and width & (width - 1):
        raise ValueError(f"heads of {width} in blocks (accepted: a power of two)")
    for plane in planes:
        if plane.stride()[1:] != (PAGE_TOKENS * plane.shape[3], plane.shape[3], 1):
            raise ValueError(f"pages have strides {plane.stride()} (accepted: heads, slots, values in order)")
