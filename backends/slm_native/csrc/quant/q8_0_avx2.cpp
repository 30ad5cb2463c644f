// Compiled with -mavx2 -mfma -mf16c; called only where the machine has all three. No standard headers with inline
// functions here: the linker could pick this file's copy of one for code that runs everywhere.
#include "q8_0.h"

#include <immintrin.h>

namespace slm::q8_0 {

namespace {

// The weights arrive in one straight line; asking for them this far ahead keeps the memory bus busy.
constexpr std::size_t prefetch_bytes = 8192;

// Eight signed bytes as floats.
__m256 load_quants(const std::int8_t* quants) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(quants))));
}

float sum_of_lanes(__m256 sums) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// One row of weights with N rows of activations: each weight is unpacked once.
template <std::size_t N>
void dot(const Block* row, std::size_t n_blocks, const float* x, float* y, std::size_t y_stride) {
    const std::size_t n_in = n_blocks * block_size;
    __m256 sums[N] = {};
    for (std::size_t b = 0; b < n_blocks; ++b, x += block_size) {
        _mm_prefetch(reinterpret_cast<const char*>(row + b) + prefetch_bytes, _MM_HINT_T1);
        __m256 products[N] = {};
        for (std::size_t i = 0; i < block_size; i += 8) {
            const __m256 quants = load_quants(row[b].quants + i);
            for (std::size_t n = 0; n < N; ++n)
                products[n] = _mm256_fmadd_ps(quants, _mm256_loadu_ps(x + n * n_in + i), products[n]);
        }
        const __m256 scale = _mm256_set1_ps(_cvtsh_ss(row[b].scale));
        for (std::size_t n = 0; n < N; ++n) sums[n] = _mm256_fmadd_ps(scale, products[n], sums[n]);
    }
    for (std::size_t n = 0; n < N; ++n) y[n * y_stride] = sum_of_lanes(sums[n]);
}

}  // namespace

void matmul_avx2(const Block* weights, std::size_t n_out, std::size_t n_blocks, const float* x, std::size_t n_tokens,
                 float* y) {
    const std::size_t n_in = n_blocks * block_size;
    for (std::size_t row = 0; row < n_out; ++row, weights += n_blocks) {
        std::size_t token = 0;
        for (; token + 4 <= n_tokens; token += 4)
            dot<4>(weights, n_blocks, x + token * n_in, y + token * n_out + row, n_out);
        for (; token < n_tokens; ++token)
            dot<1>(weights, n_blocks, x + token * n_in, y + token * n_out + row, n_out);
    }
}

}  // namespace slm::q8_0
