// AVX2 with and without VNNI: everything except integer products. README.md explains the names.
#pragma once

#include "simd/x86.h"

namespace SLM_NAMESPACE {

constexpr int lanes = 8;

using Chunk = __m256i;
using Ints = __m256i;
using Floats = __m256;

template <int value>
inline Codes flags(std::uint32_t word) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x(std::int64_t(0x8040201008040201));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(int(word)), byte_of);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of), bit_of);
    return _mm256_and_si256(is_set, _mm256_set1_epi8(char(value)));
}

// Chunk c of a span of 256 weights, for formats with 32 codes at a time.
template <class Format>
inline Chunk chunk(const std::uint8_t* span, int c) {
    return Format::codes(span, c);
}

inline Ints no_ints() { return _mm256_setzero_si256(); }
inline Ints load_ints(const std::int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Floats no_floats() { return _mm256_setzero_ps(); }
inline Floats load_floats(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
inline void store_floats(float* p, Floats a) { _mm256_storeu_ps(p, a); }
inline Floats all(float a) { return _mm256_set1_ps(a); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats minus_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline float sum(Floats a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline Floats load_f16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline Floats load_bf16(const void* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline float half(std::uint16_t bits) { return _cvtsh_ss(bits); }

// Sixteen factors, or eight scales and eight minimums. In memory, as broadcasts from memory are as fast.
struct Scales { alignas(32) float at[16]; };

inline Scales as_scales(__m256 lower, __m256 upper) {
    Scales scales;
    _mm256_store_ps(scales.at, lower);
    _mm256_store_ps(scales.at + 8, upper);
    return scales;
}
template <int stride>
inline __m256 eight_halves(const std::uint8_t* p) {
    const auto at = [&](int i) { return short(read16(p + i * stride)); };
    return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}
template <int stride>
inline Scales halves(const std::uint8_t* p) {
    return as_scales(eight_halves<stride>(p), _mm256_setzero_ps());
}
template <int stride>
inline Scales halves_and_minus(const std::uint8_t* p, const std::uint8_t* q) {
    return as_scales(eight_halves<stride>(p), _mm256_xor_ps(eight_halves<stride>(q), _mm256_set1_ps(-0.0f)));
}
inline Scales same_scales(float first, float second) {
    return as_scales(_mm256_blend_ps(_mm256_set1_ps(first), _mm256_set1_ps(second), 0xf0), _mm256_setzero_ps());
}
inline void store_scales(float* to, const Scales& a, int n) {
    _mm256_storeu_ps(to, _mm256_load_ps(a.at));
    if (n > 8) _mm256_storeu_ps(to + 8, _mm256_load_ps(a.at + 8));
}

inline Scales scaled_halves(Sixteen bytes, float first, float second) {
    return as_scales(
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_set1_ps(first)),
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_bsrli_si128(bytes, 8))), _mm256_set1_ps(second)));
}
inline Scales scaled(Sixteen bytes, float factor) { return scaled_halves(bytes, factor, factor); }
inline Scales scaled_signed(Sixteen bytes, float factor) {
    const __m256 all = _mm256_set1_ps(factor);
    return as_scales(_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), all),
                     _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_bsrli_si128(bytes, 8))), all));
}

inline Scales halved_powers(Sixteen bytes) { return as_scales(eight_halved_powers(bytes), _mm256_setzero_ps()); }
inline Scales halved_e4m3(Sixteen bytes) {
    const __m256i halves = e4m3_as_halves(bytes);
    const __m256 to_half = _mm256_set1_ps(128);
    return as_scales(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), to_half),
                     _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), to_half));
}

inline Scales times(const Scales& a, const float* b) {
    return as_scales(_mm256_mul_ps(_mm256_load_ps(a.at), _mm256_load_ps(b)),
                     _mm256_mul_ps(_mm256_load_ps(a.at + 8), _mm256_load_ps(b + 8)));
}

template <int group>
inline Floats spread(const Scales& scales, int c) {
    if constexpr (group == 32) return _mm256_broadcast_ss(scales.at + c);
    const __m256d two = _mm256_broadcast_sd(reinterpret_cast<const double*>(scales.at + 2 * c));
    return _mm256_permutevar_ps(_mm256_castpd_ps(two), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

// sums - the upper eight factors * sum32[8 .. 15]; sum32[0 .. 7] are zeros.
inline Floats minus_upper(const Scales& scales, const float* sum32, Floats sums) {
    return _mm256_fnmadd_ps(_mm256_load_ps(scales.at + 8), _mm256_load_ps(sum32 + 8), sums);
}
inline Floats minus_all(const Scales& scales, const float* b, Floats sums) {
    sums = _mm256_fnmadd_ps(_mm256_load_ps(scales.at), _mm256_load_ps(b), sums);
    return _mm256_fnmadd_ps(_mm256_load_ps(scales.at + 8), _mm256_load_ps(b + 8), sums);
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
inline void prefetch_first(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline Floats largest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline float largest_lane(Floats a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
// Rounds to nearest, ties to even.
inline void store_rounded(std::int8_t* to, Floats a) {
    const __m256i wide = _mm256_cvtps_epi32(a);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
}

// The same for four vectors, as the bits of one vector.
inline Floats rounded_codes(Floats a, Floats b, Floats c, Floats d) {
    const __m256i ab = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
    const __m256i cd = _mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
    const __m256i from = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // four of each 128 bits
    return _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), from));
}

inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
// NaN if `a` is NaN.
inline Floats at_least(float limit, Floats a) { return _mm256_max_ps(_mm256_set1_ps(limit), a); }
inline Floats at_most(float limit, Floats a) { return _mm256_min_ps(_mm256_set1_ps(limit), a); }
inline Floats rounded(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2 ** whole; the power is between 2 ** -126 and 2 ** 127.
inline Floats times_power(Floats a, Floats whole) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats where_below(Floats a, Floats b, Floats yes, Floats no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
[[gnu::always_inline]] inline void transpose(Floats (&rows)[lanes]) {
    Floats pairs[lanes];
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < lanes; i += 4) {  // vector i + k: part L of 128 bits has rows i .. i + 3 of column 4 L + k
        rows[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44),
        rows[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        rows[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        rows[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const Floats first = rows[k], second = rows[4 + k];
        rows[k] = _mm256_permute2f128_ps(first, second, 0x20),
        rows[4 + k] = _mm256_permute2f128_ps(first, second, 0x31);
    }
}
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

template <class Of>
inline Chunk chunk_of(const Of& of, int c) {
    return of(c);
}
inline Floats spread_blocks(const float* p) { return _mm256_broadcast_ss(p); }
inline Codes lowered(Codes a, int by) { return _mm256_sub_epi8(a, _mm256_set1_epi8(char(by))); }
inline Floats bytes_as_floats(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
template <int i>
inline Floats part_as_floats(Codes a) {
    const __m128i half = _mm256_extracti128_si256(a, i / 2);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(i % 2 ? _mm_bsrli_si128(half, 8) : half));
}
inline std::uint16_t to_half(float a) {
    return std::uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(a), _MM_FROUND_TO_NEAREST_INT)));
}
inline void store_f16(void* p, Floats a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_bf16(void* p, Floats a) {
    const __m256i bits = _mm256_castps_si256(a),
                  odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256 up = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))));
    const __m256 none = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    const __m256i kept = _mm256_castps_si256(_mm256_blendv_ps(up, none, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
    const __m256i upper = _mm256_srli_epi32(kept, 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
    _mm_storeu_si128(static_cast<__m128i*>(p), packed);
}

}  // namespace SLM_NAMESPACE
