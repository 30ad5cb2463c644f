// AVX2, FMA and F16C. What the names mean is in README.md beside.
#pragma once

#include "x86_256.h"

namespace SLM_NAMESPACE {

constexpr bool centres = true;

// Products of adjacent bytes are added in 16 bits, which holds codes up to 127 (2 * 127 * 127 < 2 ** 15); wider codes
// are centred first: with magnitudes up to 128 and int8 values from -127 to 127 nothing saturates either.
template <bool wide>
inline Ints products(__m256i codes, __m256i x) {
    const __m256i pairs = wide ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
                               : _mm256_maddubs_epi16(codes, x);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

template <bool wide>
inline Ints dot(Ints sums, Chunk codes, const std::int8_t* x) {
    if constexpr (wide) codes = flipped(codes);
    return _mm256_add_epi32(sums, products<wide>(codes, load(x)));
}

// Products of codes that are the same for all lanes.
using Same = __m256i;
template <bool wide>
inline Same same_codes(const std::uint8_t* four) {
    const __m256i codes = _mm256_set1_epi32(int(read32(four)));
    return wide ? flipped(codes) : codes;
}
using Bytes = __m256i;
inline Bytes load_bytes(const std::int8_t* p) { return load(p); }
template <bool wide>
inline Ints dot_same(Ints sums, Same codes, Bytes x) {
    return _mm256_add_epi32(sums, products<wide>(codes, x));
}

}  // namespace SLM_NAMESPACE
