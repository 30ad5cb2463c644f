// What AVX2 and AVX-512 have in common: codes of 32 and of 16 weights. What the names mean is in README.md beside.
#pragma once

#include <immintrin.h>

#include "../blocks.h"

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

inline void store(std::uint8_t* to, Codes a) { _mm256_storeu_si256((__m256i*)to, a); }

using Sixteen = __m128i;
inline Sixteen load_16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Sixteen sixteen(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    return _mm_setr_epi32(int(a), int(b), int(c), int(d));
}
inline Sixteen low_four(Sixteen a) { return _mm_and_si128(a, _mm_set1_epi8(15)); }
inline Sixteen high_four(Sixteen a) { return low_four(_mm_srli_epi16(a, 4)); }
inline Sixteen minus_32(Sixteen a) { return _mm_sub_epi8(a, _mm_set1_epi8(32)); }

inline void prefetch_to_write(const void* p) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p))); }

}  // namespace SLM_NAMESPACE
