// Shared by AVX2 and AVX-512: codes of 32 and of 16 weights. README.md explains the names.
#pragma once

#include <immintrin.h>

#include "formats/blocks.h"

namespace SLM_NAMESPACE {

using Codes = __m256i;

inline Codes load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline Codes nibbles(const void* p) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return _mm256_and_si256(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
}

inline Codes field(Codes a, int shift, int mask) {
    const Codes moved = shift >= 0 ? _mm256_srli_epi16(a, shift) : _mm256_slli_epi16(a, -shift);
    return _mm256_and_si256(moved, _mm256_set1_epi8(char(mask)));
}
inline Codes either(Codes a, Codes b) { return _mm256_or_si256(a, b); }
inline Codes middle_swapped(Codes a) { return _mm256_permute4x64_epi64(a, 0b11011000); }
inline Codes flipped(Codes a) { return _mm256_xor_si256(a, _mm256_set1_epi8(char(0x80))); }

inline Codes lookup(const std::uint8_t* table, Codes a) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), a);
}

inline Codes times_three(Codes a) { return _mm256_add_epi8(a, _mm256_add_epi8(a, a)); }
inline Codes thirds(Codes a) {
    const auto from = [a](int least) {
        return _mm256_cmpeq_epi8(_mm256_max_epu8(a, _mm256_set1_epi8(char(least))), a);
    };
    return _mm256_sub_epi8(_mm256_sub_epi8(_mm256_setzero_si256(), from(86)), from(171));
}

inline void store(std::uint8_t* to, Codes a) { _mm256_storeu_si256((__m256i*)to, a); }

using Sixteen = __m128i;
inline Sixteen load_16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Sixteen sixteen(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    return _mm_setr_epi32(int(a), int(b), int(c), int(d));
}
inline Sixteen low_four(Sixteen a) { return _mm_and_si128(a, _mm_set1_epi8(15)); }
inline Sixteen high_four(Sixteen a) { return low_four(_mm_srli_epi16(a, 4)); }
inline Sixteen minus_32(Sixteen a) { return _mm_sub_epi8(a, _mm_set1_epi8(32)); }

inline Sixteen times_three(Sixteen a) { return _mm_add_epi8(a, _mm_add_epi8(a, a)); }
inline Codes joined(Sixteen a, Sixteen b) { return _mm256_set_m128i(b, a); }
inline __m256 eight_halved_powers(Sixteen bytes) {
    const __m256i one = _mm256_set1_epi32(1), e = _mm256_cvtepu8_epi32(bytes);
    const __m256i tiny =
        _mm256_sllv_epi32(_mm256_set1_epi32(1 << 21), _mm256_min_epi32(e, one));  // subnormal, of 0 and 1
    return _mm256_castsi256_ps(_mm256_max_epi32(tiny, _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23)));
}
// E4M3 magnitudes as halves, times 2 ** -8; 0 for NaN.
inline __m256i e4m3_as_halves(Sixteen bytes) {
    const __m128i none = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(127)), number = _mm_and_si128(bytes, _mm_set1_epi8(127));
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_andnot_si128(none, number)), 7);
}

inline void prefetch_to_write(const void* p) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p))); }

}  // namespace SLM_NAMESPACE
