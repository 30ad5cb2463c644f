// The table of kernels of an instruction set. Only plain data and declarations: all instruction sets include this.
//
// A product with quantized weights rounds activations to int8, with one scale per 32, and multiplies integers. Scales
// are applied to the sum of a group of weights, minimums to sums of activations. `rows` multiplies few rows of
// activations: it reads each weight once and stores no unpacked weights. `expand` and `tiles` multiply many rows: they
// unpack a panel of weights once and multiply it in cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention_kernels.h"
#include "isa.h"
#include "layers/recurrent_kernels.h"

namespace slm {

constexpr int span_weights = 256;

// 256 activations of one row, the input of `rows`. If the width is not a multiple of 256, the last span is multiplied
// by the last 256 weights of a row: its first activations are zeros, because an earlier span has these weights. A row
// shorter than 256 is padded with zeros at the end.
struct alignas(64) Span {
    std::int8_t q[256];
    std::int32_t start[64];  // -zero times the sum of four adjacent q: initial values of the integer sums
    float scale8[16];        // one per 32; then eight ones, for the minimums of a format
    float scale16[16];       // one per 32, each twice
    float sum32[16];         // eight zeros; then scale times the sum of q, one per 32
    float sum16[16];         // the same, one per 16
};

// Activations of `lanes` rows side by side, the input of `tiles`: vector v has the rows from lanes * v on.
struct PackedRows {
    std::size_t n_vectors, n_in, n_given;  // n_given is the width of a row; n_in is padded to a multiple of 256
    std::int8_t* q;       // [n_vectors][n_in / 4][lanes][4], or in the layout of the instruction set's `pack`
    float* scale;         // [n_vectors][n_in / 32][lanes]
    std::int32_t* start;  // [n_vectors][n_in / group][lanes]
    float* sum;           // [n_vectors][n_in / group][lanes]
};

// Rows of a matrix of quantized weights.
struct Rows {
    const std::uint8_t* data;
    std::size_t row_bytes, n_spans, tail_bytes;  // a row has n_spans whole spans and then tail_bytes
};

// A panel of unpacked rows.
struct Panel {
    std::size_t n_rows, n_in;  // n_in is a multiple of 256
    std::uint8_t* codes;       // [n_rows][n_in]
    float* factors;            // [n_rows][n_in / 256][groups, or 2 * groups with minimums]
    const std::uint8_t* next;  // the rows to unpack next: `tiles` prefetches them
    std::size_t next_bytes;
};

struct FormatKernels {
    int type, block, groups, start_zero;
    std::size_t block_bytes, few_rows;  // few_rows: the maximum rows for `rows`
    bool has_min;
    // y[t * y_stride + r] = row r times x[t], r from begin to end; x is [n_tokens][x_stride].
    void (*rows)(const Rows& weights, std::size_t begin, std::size_t end, const Span* x, std::size_t x_stride,
                 std::size_t n_tokens, float* y, std::size_t y_stride);
    void (*expand)(const Rows& weights, std::size_t begin, std::size_t end, Panel& panel);
    void (*dequantize)(const Rows& weights, std::size_t row, std::size_t n_in, float* to);
    // y[t * y_stride + r] for all rows of the panel and tokens 0 .. n_tokens - 1; `work` holds n_rows * 4 * lanes.
    void (*tiles)(const Panel& panel, const PackedRows& x, std::size_t n_tokens, float* work, float* y,
                  std::size_t y_stride);
};

// Weights of F32, F16 and BF16.
struct FloatKernels {
    int type;
    std::size_t bytes;  // bytes of a weight
    // y[t * y_stride + r] = row r times x[t] in float32, r from begin to end; x is [n_tokens][n_in].
    void (*rows)(const std::uint8_t* weights, std::size_t n_in, std::size_t begin, std::size_t end, const float* x,
                 std::size_t n_tokens, float* y, std::size_t y_stride);
    // The same with activations in bf16 and sums in float32. Null if it would not be faster.
    void (*rows_of_bf16)(const std::uint8_t* weights, std::size_t n_in, std::size_t begin, std::size_t end,
                         const std::uint16_t* x, std::size_t n_tokens, float* y, std::size_t y_stride);
    void (*expand)(const std::uint8_t* weights, std::size_t n, float* to);
};

// An RMS norm, or a layer norm if `centred`; no norm if `weight` is null.
struct Norm {
    const float *weight, *bias;  // [n_rows][width], applied to the rows of x cyclically; bias may be null
    std::size_t width, n_rows;
    float eps;
    bool centred;
};

// Rows of weights for a matrix unit: quantized, or bf16 if `format` is null.
struct TiledWeights {
    const FormatKernels* format;
    Rows rows;
    std::size_t n_in;
};

constexpr std::size_t tiled_panel = 32;       // rows of weights per product
constexpr std::size_t most_tiled_panels = 4;  // panels that are unpacked together: activations are read once for all

// Products of many rows of activations on a matrix unit: weights and activations in bf16, sums in float32.
struct TileKernels {
    // Packs at most 16 rows of n activations to [ceil(n / 32)][16 pairs][16 rows][2], padded with zeros.
    void (*pack)(const float* const* rows, std::size_t n_rows, std::size_t n, std::uint16_t* to);
    std::size_t (*work_bytes)(std::size_t n_in, std::size_t n_tokens);
    // y[t * y_stride + r - begin] = row r times x[t], r from begin to end: at most most_tiled_panels * tiled_panel
    // rows.
    void (*multiply)(const TiledWeights& weights, std::size_t begin, std::size_t end, const std::uint16_t* x,
                     std::size_t n_tokens, std::uint8_t* work, float* y, std::size_t y_stride);
};

enum class ActivationKind { silu, gelu, gelu_tanh, relu, relu_squared, swiglu_clamped, xielu };

// The activation of a feed-forward layer; see Activation and Xielu in slm_core/architectures.
struct Activation {
    ActivationKind kind;
    float alpha_n, alpha_p, beta, eps;  // of xielu
};

struct IsaKernels {
    int lanes;
    const FormatKernels* formats;
    std::size_t n_formats;
    const FloatKernels* floats;
    std::size_t n_floats;
    // Rounds n activations to ceil(n / 256) spans.
    void (*quantize)(const float* x, std::size_t n, int zero, Span* to);
    // Rounds and packs at most `lanes` rows of n activations to vector v of `to`.
    void (*pack)(const float* const* rows, std::size_t n_rows, std::size_t n, int zero, int groups, PackedRows& to,
                 std::size_t v);
    void (*round_to_bf16)(const float* x, std::size_t n, std::uint16_t* to);
    // Transposes x [n_tokens][n_in] to [n_in][lanes]; n_tokens is at most `lanes`.
    void (*pack_floats)(const float* x, std::size_t n_tokens, std::size_t n_in, float* to);
    // y[t * y_stride + r] = row r of a panel [n_rows][n_in] times x[t], x [n_vectors][n_in][lanes].
    void (*float_tiles)(const float* panel, std::size_t n_rows, std::size_t n_in, const float* x, std::size_t n_vectors,
                        std::size_t n_tokens, float* work, float* y, std::size_t y_stride);
    // y = normalize(x), rows [n_rows][norm.width]; y may be x.
    void (*normalize)(const Norm& norm, const float* x, std::size_t n_rows, float* y);
    // y = base (or 0 if null) + the sum of shares[j] * parts[j], n values each; y may be one of them.
    void (*add_parts)(const float* base, const float* const* parts, const float* shares, std::size_t n_parts,
                      std::size_t n, float* y);
    // y += the sum of shares[j] * row j of `rows`, float16 [n_rows][n].
    void (*add_f16_rows)(const std::uint16_t* rows, const float* shares, std::size_t n_rows, std::size_t n, float* y);
    // row = max(0, row - (mean + n_deviations * standard deviation)), in place.
    void (*gaussian_topk)(float* row, std::size_t width, float n_deviations);
    // y = activation(gate), times `up` unless it is null; y may be gate.
    void (*activate)(const Activation& activation, const float* gate, const float* up, std::size_t n, float* y);
    // RoPE on the heads x [n_heads][width] of one token, in place: pair i, which is the values 2 i and 2 i + 1 or i and
    // half + i, is rotated by angle i.
    void (*rotate)(float* x, std::size_t n_heads, std::size_t width, const float* cos, const float* sin,
                   std::size_t half, bool interleaved);
    const AttentionKernels* attention;
    const ScanKernels* scan;
    const TileKernels* unit;  // null without a matrix unit
};

// clang-format off: a line each
namespace scalar { extern const IsaKernels kernels; namespace attending { extern const AttentionKernels kernels; extern const ScanKernels scanning; } }
namespace avx2 { extern const IsaKernels kernels; namespace attending { extern const AttentionKernels kernels; extern const ScanKernels scanning; } }
namespace avx_vnni { extern const IsaKernels kernels; namespace attending { extern const AttentionKernels kernels; extern const ScanKernels scanning; } }
namespace avx512 { extern const IsaKernels kernels; namespace attending { extern const AttentionKernels kernels; extern const ScanKernels scanning; } }
// clang-format on
// AVX-512 with one more product. No static table: it would be initialized before CPU detection.
namespace avx512_bf16 {
void rows_of_bf16(const std::uint8_t* weights, std::size_t n_in, std::size_t begin, std::size_t end,
                  const std::uint16_t* x, std::size_t n_tokens, float* y, std::size_t y_stride);
}
// clang-format off
namespace amx { extern const TileKernels tile_kernels; namespace attending { extern const AttentionKernels kernels; } }
namespace amx_plain { extern const TileKernels tile_kernels; namespace attending { extern const AttentionKernels kernels; } }
namespace neon { extern const IsaKernels kernels; namespace attending { extern const AttentionKernels kernels; extern const ScanKernels scanning; } }
// clang-format on
// NEON with other products of panels (by ggml type), and packed activations for them.
namespace neon_i8mm {
decltype(FormatKernels::tiles) tiles_of(int type);
void pack_pairs(const float* const* rows, std::size_t n_rows, std::size_t n, int zero, int groups, PackedRows& to,
                std::size_t v);
}  // namespace neon_i8mm

}  // namespace slm
