// AVX-512 with VNNI. README.md explains the names.
#pragma once

#include "simd/x86.h"

namespace SLM_NAMESPACE {

constexpr int lanes = 16;
constexpr bool centres = false;
inline bool side_by_side() { return !reads_one_stream; }
constexpr int sums_of_a_row = 1;  // so that results are equal with and without side_by_side()
template <int bits>
constexpr int few_rows = 6;

using Chunk = __m512i;
using Ints = __m512i;
using Floats = __m512;

template <int value>
inline Codes flags(std::uint32_t word) {
    return _mm256_maskz_set1_epi8(word, char(value));
}

// Chunk c of a span of 256 weights, for formats with 32 codes at a time.
template <class Format>
inline Chunk chunk(const std::uint8_t* span, int c) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(Format::codes(span, 2 * c)), Format::codes(span, 2 * c + 1), 1);
}

inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Ints load_ints(const std::int32_t* p) { return _mm512_loadu_si512(p); }
inline Floats no_floats() { return _mm512_setzero_ps(); }
inline Floats load_floats(const void* p) { return _mm512_loadu_ps(p); }
inline void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline void store(std::uint8_t* to, Chunk a) { _mm512_storeu_si512(to, a); }
inline Floats all(float a) { return _mm512_set1_ps(a); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats minus_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a); }

inline Floats load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Floats load_bf16(const void* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline float half(std::uint16_t bits) { return _cvtsh_ss(bits); }

struct WordIndex { alignas(64) std::uint16_t at[32]; };
// The indices of eight halves.
template <int stride>
constexpr WordIndex halves_at() {
    WordIndex index{};
    for (int i = 0; i < 8; ++i) index.at[i] = std::uint16_t(i * stride / 2);
    return index;
}
template <int stride>
alignas(64) constexpr WordIndex halves_index = halves_at<stride>();

// Sixteen factors, or eight scales and eight minimums.
using Scales = __m512;

// Eight halves, `stride` bytes apart.
template <int stride>
inline __m256 eight_halves(const std::uint8_t* p) {
    if constexpr (stride == 18) {  // all halves within two registers
        const __m512i index = _mm512_load_si512(halves_index<stride>.at);
        const __m512i packed = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), index, _mm512_loadu_si512(p + 64));
        return _mm256_cvtph_ps(_mm512_castsi512_si128(packed));
    }
    const auto at = [&](int i) { return short(read16(p + i * stride)); };
    return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}
template <int stride>
inline Scales halves(const std::uint8_t* p) {
    return _mm512_zextps256_ps512(eight_halves<stride>(p));
}
template <int stride>
inline Scales halves_and_minus(const std::uint8_t* p, const std::uint8_t* q) {
    const __m256 minus = _mm256_xor_ps(eight_halves<stride>(q), _mm256_set1_ps(-0.0f));
    return _mm512_insertf32x8(_mm512_castps256_ps512(eight_halves<stride>(p)), minus, 1);
}
inline Scales same_scales(float first, float second) {
    return _mm512_mask_blend_ps(0x00f0, _mm512_set1_ps(first), _mm512_set1_ps(second));
}
inline void store_scales(float* to, Scales a, int n) { _mm512_mask_storeu_ps(to, __mmask16((1u << n) - 1), a); }

inline Scales scaled(Sixteen bytes, float factor) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), _mm512_set1_ps(factor));
}
inline Scales scaled_signed(Sixteen bytes, float factor) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), _mm512_set1_ps(factor));
}
inline Scales scaled_halves(Sixteen bytes, float first, float second) {
    const __m512 factors = _mm512_insertf32x8(_mm512_set1_ps(first), _mm256_set1_ps(second), 1);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), factors);
}

inline Scales halved_powers(Sixteen bytes) { return _mm512_zextps256_ps512(eight_halved_powers(bytes)); }
inline Scales halved_e4m3(Sixteen bytes) {
    return _mm512_mul_ps(_mm512_cvtph_ps(e4m3_as_halves(bytes)), _mm512_set1_ps(128));
}

// VNNI multiplies unsigned by signed bytes without saturation, so codes may have any width.
template <bool wide>
inline Chunk centred(Chunk codes) {
    return codes;
}
template <bool wide>
inline Ints dot(Ints sums, Chunk codes, const std::int8_t* x) {
    return _mm512_dpbusd_epi32(sums, codes, _mm512_loadu_si512(x));
}

inline Scales times(Scales a, const float* b) { return _mm512_mul_ps(a, _mm512_load_ps(b)); }

template <int group>
inline Floats spread(Scales scales, int c) {
    const __m512i lane = group == 32 ? _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1)
                                     : _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(64 / group * c)), scales);
}

// sums - the upper eight factors * sum32[8 .. 15]; sum32[0 .. 7] are zeros.
inline Floats minus_upper(Scales scales, const float* sum32, Floats sums) {
    return _mm512_fnmadd_ps(scales, _mm512_load_ps(sum32), sums);
}
inline Floats minus_all(Scales scales, const float* b, Floats sums) {
    return _mm512_fnmadd_ps(scales, _mm512_load_ps(b), sums);
}

// Products of codes that are the same in all lanes.
using Same = __m512i;
inline Same same_codes(const std::uint8_t* four) { return _mm512_set1_epi32(int(read32(four))); }
using Bytes = __m512i;
inline Bytes load_bytes(const std::int8_t* p) { return _mm512_loadu_si512(p); }
template <bool wide>
inline Ints dot_same(Ints sums, Same codes, Bytes x) {
    return _mm512_dpbusd_epi32(sums, codes, x);
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
inline void prefetch_first(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline Floats largest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
inline float largest_lane(Floats a) { return _mm512_reduce_max_ps(a); }
// Rounds to nearest, ties to even.
inline void store_rounded(std::int8_t* to, Floats a) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}

// The same for four vectors, as the bits of one vector.
inline Floats rounded_codes(Floats a, Floats b, Floats c, Floats d) {
    const __m512i ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
    const __m512i cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
    const __m512i from =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // four of each 128 bits
    return _mm512_castsi512_ps(_mm512_permutexvar_epi32(from, _mm512_packs_epi16(ab, cd)));
}

inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
// NaN if `a` is NaN.
inline Floats at_least(float limit, Floats a) { return _mm512_max_ps(_mm512_set1_ps(limit), a); }
inline Floats at_most(float limit, Floats a) { return _mm512_min_ps(_mm512_set1_ps(limit), a); }
inline Floats rounded(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2 ** whole; the power is between 2 ** -126 and 2 ** 127.
inline Floats times_power(Floats a, Floats whole) { return _mm512_scalef_ps(a, whole); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats where_below(Floats a, Floats b, Floats yes, Floats no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
[[gnu::always_inline]] inline void transpose(Floats (&rows)[lanes]) {
    const auto doubles = [](Floats a) { return _mm512_castps_pd(a); };
    Floats pairs[lanes];
#pragma GCC unroll 8
    for (int i = 0; i < lanes; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i += 4) {  // vector i + k: part L of 128 bits has rows i .. i + 3 of column 4 L + k
        rows[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(doubles(pairs[i]), doubles(pairs[i + 2])));
        rows[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(doubles(pairs[i]), doubles(pairs[i + 2])));
        rows[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(doubles(pairs[i + 1]), doubles(pairs[i + 3])));
        rows[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(doubles(pairs[i + 1]), doubles(pairs[i + 3])));
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const Floats even = _mm512_shuffle_f32x4(rows[k], rows[4 + k], 0x88),
                     odd = _mm512_shuffle_f32x4(rows[k], rows[4 + k], 0xdd);
        const Floats even2 = _mm512_shuffle_f32x4(rows[8 + k], rows[12 + k], 0x88);
        const Floats odd2 = _mm512_shuffle_f32x4(rows[8 + k], rows[12 + k], 0xdd);
        rows[k] = _mm512_shuffle_f32x4(even, even2, 0x88), rows[8 + k] = _mm512_shuffle_f32x4(even, even2, 0xdd);
        rows[4 + k] = _mm512_shuffle_f32x4(odd, odd2, 0x88), rows[12 + k] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
}
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
    const auto folded = [](Floats x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); };
    const __m256 ab = _mm256_hadd_ps(folded(a), folded(b)), cd = _mm256_hadd_ps(folded(c), folded(d));
    const __m256 all = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

template <class Of>
inline Chunk chunk_of(const Of& of, int c) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(of(2 * c)), of(2 * c + 1), 1);
}
inline Floats spread_blocks(const float* p) {
    const __m512i halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1);
    return _mm512_permutexvar_ps(halves, _mm512_castsi512_ps(_mm512_set1_epi64(std::int64_t(read64(p)))));
}
inline Codes lowered(Codes a, int by) { return _mm256_sub_epi8(a, _mm256_set1_epi8(char(by))); }
inline Floats bytes_as_floats(const void* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(p))); }
template <int i>
inline Floats part_as_floats(Codes a) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(a, i)));
}
inline std::uint16_t to_half(float a) {
    return std::uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(a), _MM_FROUND_TO_NEAREST_INT)));
}
inline void store_f16(void* p, Floats a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_bf16(void* p, Floats a) {
    const __m512i bits = _mm512_castps_si512(a),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i kept =
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), up, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

}  // namespace SLM_NAMESPACE

#include "simd/whole_sums.h"
