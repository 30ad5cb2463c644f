// Products of quantized or BF16 weights with many rows of activations on a matrix unit (AMX).
//
// Weights are the left operand: in a panel of 32 rows, a cache line has 32 weights of one row. Activations are packed
// once for all products. There are two by two tiles of sums, so that each loaded operand is used in two products. Long
// rows are multiplied in parts of `part` weights: a part of the activations stays in the L2 cache while all panels use
// it.
#include "kernels.h"

#if defined(SLM_PLAIN_TILES)
#define SLM_NAMESPACE slm::amx_plain
#else
#define SLM_NAMESPACE slm::amx
#endif
#include "simd/avx512.h"
#include "matmul/tile_unit.h"

namespace SLM_NAMESPACE {

namespace {

constexpr std::size_t part = 1024;  // weights of a row; all panels are multiplied before the next part

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }

inline void store_rounded_bf16(std::uint16_t* to, Floats values) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), __m256i(_mm512_cvtneps_pbh(values)));
#else
    store_bf16(to, values);
#endif
}

void pack(const float* const* rows, std::size_t n_rows, std::size_t n, std::uint16_t* to) {
    alignas(64) std::uint16_t pairs[operand] = {};  // row by row
    for (std::size_t i = 0; i < n; i += step, to += operand) {
        for (std::size_t r = 0; r < n_rows; ++r)
            for (std::size_t k = 0; k < step; k += lanes) {
                const __mmask16 here = first_lanes(i + k < n ? n - i - k : 0);
                store_rounded_bf16(pairs + r * step + k, _mm512_maskz_loadu_ps(here, rows[r] + i + k));
            }
        Floats square[lanes];
#pragma GCC unroll 16
        for (int r = 0; r < lanes; ++r) square[r] = load_floats(pairs + r * int(step));
        transpose(square);
#pragma GCC unroll 16
        for (int k = 0; k < lanes; ++k) _mm512_storeu_ps(to + k * int(step), square[k]);
    }
}

// The work memory of a thread.
struct Work {
    std::uint16_t* panels;  // [panels][steps of a part][32 rows][32]
    std::uint8_t* codes;    // of one unpacked panel
    float* factors;
    float* sums;  // [panels][pairs of tiles of tokens][2][2][16 rows][16 tokens]

    static constexpr std::size_t panel = tiled_panel * part;
    static constexpr std::size_t most_factors = tiled_panel * (part / span_weights) * 32;
    static std::size_t pairs_of(std::size_t n_tokens) { return div_up(n_tokens, 2 * unit_rows); }
    static std::size_t bytes(std::size_t n_in, std::size_t n_tokens) {
        const std::size_t n_sums = 4 * tile_values * (n_in > part ? most_tiled_panels * pairs_of(n_tokens) : 1);
        return most_tiled_panels * panel * sizeof(std::uint16_t) + panel + (most_factors + n_sums) * sizeof(float);
    }
    explicit Work(std::uint8_t* at)
        : panels(reinterpret_cast<std::uint16_t*>(at)), codes(at + most_tiled_panels * panel * sizeof(std::uint16_t)),
          factors(reinterpret_cast<float*>(codes + panel)), sums(factors + most_factors) {}
};

// Converts 32 codes, of group g or of groups 2 g and 2 g + 1, to bf16: factor * (code - zero) - minimum.
template <int groups, bool has_min>
inline void weights_of_codes(const std::uint8_t* codes, const float* factors, int g, int zero, std::uint16_t* to) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const int group = groups == 8 ? g : 2 * g + i;
        const Ints code = _mm512_sub_epi32(_mm512_cvtepu8_epi32(load_16(codes + 16 * i)), _mm512_set1_epi32(zero));
        const Floats weight = mul(to_floats(code), all(factors[group]));
        store_rounded_bf16(to + 16 * i, has_min ? sub(weight, all(factors[groups + group])) : weight);
    }
}

template <int groups, bool has_min>
void tile_codes(const Panel& panel, int zero, std::uint16_t* to) {
    constexpr std::size_t n_factors = groups * (has_min ? 2 : 1);
    const std::size_t n_spans = panel.n_in / span_weights;
    for (std::size_t r = 0; r < panel.n_rows; ++r)
        for (std::size_t s = 0; s < n_spans; ++s)
            for (int g = 0; g < 8; ++g)
                weights_of_codes<groups, has_min>(panel.codes + r * panel.n_in + s * span_weights + 32 * std::size_t(g),
                                                  panel.factors + (r * n_spans + s) * n_factors, g, zero,
                                                  to + ((8 * s + std::size_t(g)) * tiled_panel + r) * step);
}

// Unpacks weights [first, first + n) of n_rows rows; `first` is a multiple of `part`.
void tile_quantized(const TiledWeights& weights, std::size_t row, std::size_t n_rows, std::size_t first, std::size_t n,
                    const Work& work, std::uint16_t* to) {
    const FormatKernels& format = *weights.format;
    const std::size_t span_bytes = span_weights / std::size_t(format.block) * format.block_bytes;
    Rows rows = weights.rows;
    rows.data += first / span_weights * span_bytes;
    const bool is_last = first + n == weights.n_in;
    rows.n_spans = n / span_weights, rows.tail_bytes = is_last ? weights.rows.tail_bytes : 0;
    Panel panel{n_rows, div_up(n, span_weights) * span_weights, work.codes, work.factors, nullptr, 0};
    format.expand(rows, row, row + n_rows, panel);
    if (format.groups == 8 && !format.has_min) tile_codes<8, false>(panel, format.start_zero, to);
    if (format.groups == 8 && format.has_min) tile_codes<8, true>(panel, format.start_zero, to);
    if (format.groups == 16 && !format.has_min) tile_codes<16, false>(panel, format.start_zero, to);
    if (format.groups == 16 && format.has_min) tile_codes<16, true>(panel, format.start_zero, to);
}

void tile_bf16(const TiledWeights& weights, std::size_t row, std::size_t n_rows, std::size_t first, std::size_t n,
               std::uint16_t* to) {
    for (std::size_t r = 0; r < n_rows; ++r) {
        const std::uint8_t* from = weights.rows.data + (row + r) * weights.rows.row_bytes + 2 * first;
        for (std::size_t i = 0; i < n; i += step, from += 2 * step) {
            std::uint16_t* line = to + i * tiled_panel + r * step;
            if (i + step > n) __builtin_memset(line, 0, 2 * step);
            __builtin_memcpy(line, from, 2 * least(step, n - i));
        }
    }
}

// Transposes sums [16 rows][16 tokens] to y[t * y_stride + r].
inline void put_tile(const float* sums, std::size_t n_rows, std::size_t n_tokens, float* y, std::size_t y_stride) {
    Floats square[lanes];
#pragma GCC unroll 16
    for (int r = 0; r < lanes; ++r) square[r] = load_floats(sums + r * lanes);
    transpose(square);
#pragma GCC unroll 16
    for (std::size_t t = 0; t < lanes; ++t)
        if (t < n_tokens) _mm512_mask_storeu_ps(y + t * y_stride, first_lanes(n_rows), square[t]);
}

// The results of 32 rows of weights and up to 32 tokens.
struct Results {
    float* y;
    std::size_t y_stride, n_rows, n_tokens;

    // Prefetches the lines that one token writes; lines of different tokens are far apart.
    void prefetch_token(std::size_t token) const {
        if (token >= n_tokens) return;
        prefetch_first(y + token * y_stride);
        prefetch_first(y + token * y_stride + n_rows - 1);
    }
    void put(const float* sums) const {
        for (std::size_t i = 0; i < 4; ++i) {
            const std::size_t row = i % 2 * unit_rows, token = i / 2 * unit_rows;
            if (row >= n_rows || token >= n_tokens) continue;
            put_tile(sums + i * tile_values, least(16, n_rows - row), n_tokens - token, y + token * y_stride + row,
                     y_stride);
        }
    }
};

// Multiplies a panel by one or two tiles of activations, x_stride apart, in n_steps products. Adds to sums, or
// overwrites them if is_first.
template <int n_tiles>
inline void multiply_panel(const std::uint16_t* panel, const std::uint16_t* x, std::size_t x_stride,
                           std::size_t n_steps, bool is_first, float* sums, const Results& results) {
    if (is_first) {
        zero_tile<0>(), zero_tile<1>();
        if constexpr (n_tiles == 2) zero_tile<2>(), zero_tile<3>();
    } else {
        load_tile<0>(sums, unit_row_bytes), load_tile<1>(sums + tile_values, unit_row_bytes);
        if constexpr (n_tiles == 2) {
            load_tile<2>(sums + 2 * tile_values, unit_row_bytes);
            load_tile<3>(sums + 3 * tile_values, unit_row_bytes);
        }
    }
    for (std::size_t s = 0; s < n_steps; ++s, panel += 2 * operand, x += operand) {
        load_tile<4>(panel, unit_row_bytes), load_tile<6>(x, unit_row_bytes);
        multiply_tiles<0, 4, 6>();
        load_tile<5>(panel + operand, unit_row_bytes);
        multiply_tiles<1, 5, 6>();
        if constexpr (n_tiles == 2) {
            load_tile<7>(x + x_stride, unit_row_bytes);
            multiply_tiles<2, 4, 7>();
            multiply_tiles<3, 5, 7>();
        }
        results.prefetch_token(s);
    }
    store_tile<0>(sums, unit_row_bytes), store_tile<1>(sums + tile_values, unit_row_bytes);
    if constexpr (n_tiles == 2) {
        store_tile<2>(sums + 2 * tile_values, unit_row_bytes);
        store_tile<3>(sums + 3 * tile_values, unit_row_bytes);
    }
}

void multiply(const TiledWeights& weights, std::size_t begin, std::size_t end, const std::uint16_t* x,
              std::size_t n_tokens, std::uint8_t* memory, float* y, std::size_t y_stride) {
    constexpr std::size_t tokens_together = 256;  // a part of their activations fits in the L2 cache
    const Work work(memory);
    const std::size_t n_in = weights.n_in, n_panels = div_up(end - begin, tiled_panel),
                      n_pairs = Work::pairs_of(n_tokens);
    const std::size_t x_stride = div_up(n_in, step) * operand;
    const auto rows_of = [&](std::size_t panel) { return least(tiled_panel, end - begin - panel * tiled_panel); };
    configure_tiles();
    for (std::size_t first = 0; first < n_in; first += part) {
        const std::size_t n = least(part, n_in - first), n_steps = div_up(n, step);
        const bool is_last = first + n == n_in;
        for (std::size_t p = 0; p < n_panels; ++p) {
            std::uint16_t* to = work.panels + p * Work::panel;
            const std::size_t row = begin + p * tiled_panel;
            if (weights.format) tile_quantized(weights, row, rows_of(p), first, n, work, to);
            else tile_bf16(weights, row, rows_of(p), first, n, to);
        }
        publish_stores();
        for (std::size_t t = 0; t < n_tokens; t += tokens_together)
            for (std::size_t p = 0; p < n_panels; ++p)
                for (std::size_t token = t; token < least(t + tokens_together, n_tokens); token += 2 * unit_rows) {
                    const std::size_t here = least(2 * unit_rows, n_tokens - token);
                    const Results results{y + token * y_stride + p * tiled_panel, y_stride, rows_of(p),
                                          is_last ? here : 0};
                    float* sums =
                        work.sums + (n_in > part ? (p * n_pairs + token / (2 * unit_rows)) * 4 * tile_values : 0);
                    const std::uint16_t* panel = work.panels + p * Work::panel;
                    const std::uint16_t* from = x + token / unit_rows * x_stride + first / step * operand;
                    if (here > unit_rows) multiply_panel<2>(panel, from, x_stride, n_steps, first == 0, sums, results);
                    else multiply_panel<1>(panel, from, x_stride, n_steps, first == 0, sums, results);
                    if (is_last) results.put(sums);
                }
    }
    release_tiles();
}

}  // namespace

const TileKernels tile_kernels = {pack, Work::bytes, multiply};

}  // namespace SLM_NAMESPACE
