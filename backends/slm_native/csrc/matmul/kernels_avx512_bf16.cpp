// AVX512-BF16: products of pairs of bf16, two products per lane and instruction, compared with one in float32.
#include "kernels.h"

#define SLM_NAMESPACE slm::avx512_bf16
#include "simd/avx512.h"

#include "matmul/rows.inc"
#include "matmul/floats.inc"
#include "matmul/float_rows.inc"

namespace SLM_NAMESPACE {

namespace {

struct Bf16Pairs {
    using Value = std::uint16_t;
    static constexpr int step = 2 * lanes, bytes = 2;
    static Floats weights(const std::uint8_t* p) { return load_floats(p); }
    static Floats values(const Value* p) { return load_floats(p); }
    static Floats times(Floats w, Floats x, Floats sums) {
        return _mm512_dpbf16_ps(sums, __m512bh(_mm512_castps_si512(w)), __m512bh(_mm512_castps_si512(x)));
    }
    static float one_times(const std::uint8_t* w, Value x) { return BF16::one(w) * as_float(std::uint32_t(x) << 16); }
};

}  // namespace

void rows_of_bf16(const std::uint8_t* weights, std::size_t n_in, std::size_t begin, std::size_t end,
                  const std::uint16_t* x, std::size_t n_tokens, float* y, std::size_t y_stride) {
    float_rows_of_several<Bf16Pairs>(weights, n_in, begin, end, x, n_tokens, y, y_stride);
}

}  // namespace SLM_NAMESPACE
