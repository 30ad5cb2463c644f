// AVX2, FMA and F16C. README.md explains the names.
#pragma once

#include "simd/x86_256.h"

namespace SLM_NAMESPACE {

constexpr bool centres = true;
constexpr bool side_by_side() { return false; }  // Zen 3 prefetches one stream of addresses well, but not four
constexpr int sums_of_a_row = 2;
template <int bits>
constexpr int few_rows = bits == 8 ? 6 : 4;  // `together` makes products of many rows with narrow codes fast

// Products of adjacent bytes are added in 16 bits, which is enough for codes up to 127 (2 * 127 * 127 < 2 ** 15). Wider
// codes are centred first: with magnitudes up to 128 and int8 values from -127 to 127, nothing saturates.
template <bool wide>
inline __m256i pairs(__m256i codes, __m256i x) {
    return wide ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
                : _mm256_maddubs_epi16(codes, x);
}
inline Ints add_pairs(Ints sums, __m256i pairs) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <bool wide>
inline Chunk centred(Chunk codes) {
    return wide ? flipped(codes) : codes;
}
template <bool wide>
inline Ints dot(Ints sums, Chunk codes, const std::int8_t* x) {
    codes = centred<wide>(codes);
    return add_pairs(sums, pairs<wide>(codes, load(x)));
}

// Narrow codes leave room for more products in 16 bits: 2 * 127 * 2 ** bits * 2 ** (7 - bits) < 2 ** 15.
template <int bits>
constexpr int together = bits >= 7   ? 1
                         : bits <= 4 ? 8
                                     : 1 << (7 - bits);
using Partial = __m256i;
inline Partial partial_from(Ints) { return _mm256_setzero_si256(); }
inline Ints with_partial(Ints sums, Partial partial) { return add_pairs(sums, partial); }

// Products of codes that are the same in all lanes.
using Same = __m256i;
inline Same same_codes(const std::uint8_t* four) { return _mm256_set1_epi32(int(read32(four))); }
using Bytes = __m256i;
inline Bytes load_bytes(const std::int8_t* p) { return load(p); }
template <bool wide>
inline Partial dot_same(Partial sums, Same codes, Bytes x) {
    sums = _mm256_add_epi16(sums, pairs<wide>(codes, x));
    asm("" : "+x"(sums));  // otherwise gcc computes all products of a tile first and spills them
    return sums;
}

}  // namespace SLM_NAMESPACE
