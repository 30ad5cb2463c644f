// AVX2, FMA, F16C and VNNI in 256 bits. README.md explains the names.
#pragma once

#include "simd/x86_256.h"

namespace SLM_NAMESPACE {

constexpr bool centres = false;
constexpr bool side_by_side() { return true; }
constexpr int sums_of_a_row = 1;
template <int bits>
constexpr int few_rows = 6;

inline Ints dot_products(Ints sums, __m256i codes, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else  // a build that tests these kernels on AVX-512: the same instruction in its AVX-512 encoding
    return _mm256_dpbusd_epi32(sums, codes, x);
#endif
}

// VNNI multiplies unsigned by signed bytes without saturation, so codes may have any width.
template <bool wide>
inline Chunk centred(Chunk codes) {
    return codes;
}
template <bool wide>
inline Ints dot(Ints sums, Chunk codes, const std::int8_t* x) {
    return dot_products(sums, codes, load(x));
}

// Products of codes that are the same in all lanes.
using Same = __m256i;
inline Same same_codes(const std::uint8_t* four) { return _mm256_set1_epi32(int(read32(four))); }
using Bytes = __m256i;
inline Bytes load_bytes(const std::int8_t* p) { return load(p); }
template <bool wide>
inline Ints dot_same(Ints sums, Same codes, Bytes x) {
    return dot_products(sums, codes, x);
}

}  // namespace SLM_NAMESPACE

#include "simd/whole_sums.h"
