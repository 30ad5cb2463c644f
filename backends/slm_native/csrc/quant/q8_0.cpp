// The portable twin of the faster kernels, and the choice among them.
#include "q8_0.h"

#include <bit>

namespace slm::q8_0 {

namespace {

constexpr std::size_t lanes = 8;

// Exact, whatever the processor's treatment of subnormal numbers: no float here is subnormal.
float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    const float rest = exponent == 0    ? float(mantissa) * 0x1p-24f
                       : exponent == 31 ? std::bit_cast<float>(0x7f800000u | mantissa << 13)
                                        : std::bit_cast<float>((exponent + 112) << 23 | mantissa << 13);
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(rest) | sign);
}

float dot(const Block* row, std::size_t n_blocks, const float* x) {
    float sums[lanes] = {};
    for (std::size_t b = 0; b < n_blocks; ++b, x += block_size) {
        float products[lanes] = {};
        for (std::size_t i = 0; i < block_size; i += lanes)
            for (std::size_t lane = 0; lane < lanes; ++lane)
                products[lane] += float(row[b].quants[i + lane]) * x[i + lane];
        const float scale = half_to_float(row[b].scale);
        for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += scale * products[lane];
    }
    for (std::size_t half = lanes / 2; half > 0; half /= 2)
        for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0];
}

}  // namespace

void matmul_scalar(const Block* weights, std::size_t n_out, std::size_t n_blocks, const float* x,
                   std::size_t n_tokens, float* y) {
    for (std::size_t row = 0; row < n_out; ++row, weights += n_blocks)
        for (std::size_t token = 0; token < n_tokens; ++token)
            y[token * n_out + row] = dot(weights, n_blocks, x + token * n_blocks * block_size);
}

Matmul* matmul_for([[maybe_unused]] Isa isa) {
#if defined(SLM_HAVE_AVX2)
    if (isa == Isa::avx2) return matmul_avx2;
#endif
    return matmul_scalar;
}

}  // namespace slm::q8_0
