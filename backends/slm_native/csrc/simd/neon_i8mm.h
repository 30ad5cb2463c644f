// NEON with int8 matrix products (Armv8.2-A i8mm): the names that pairs.inc needs in addition to neon.h.
#pragma once

#include "simd/neon.h"

namespace SLM_NAMESPACE {

// Eight rows of eight activations, two rows per vector; their products with two rows of codes, a 2 x 2 square per
// vector.
struct Pairs { int8x16_t at[4]; };
struct Squares { int32x4_t at[4]; };

inline Pairs load_pairs(const std::int8_t* p) {
    return {vld1q_s8(p), vld1q_s8(p + 16), vld1q_s8(p + 32), vld1q_s8(p + 48)};
}

// Stores four activations of each of eight rows, followed by the next four.
inline void store_pairs(std::int8_t* to, Bytes first, Bytes second) {
    const auto zip = [to](int i, int8x16_t a, int8x16_t b) {
        const int32x4x2_t rows = vzipq_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b));
        vst1q_s8(to + 32 * i, vreinterpretq_s8_s32(rows.val[0]));
        vst1q_s8(to + 32 * i + 16, vreinterpretq_s8_s32(rows.val[1]));
    };
    zip(0, first.first, second.first);
    zip(1, first.second, second.second);
}

inline Same two_rows(const std::uint8_t* upper, const std::uint8_t* lower) {
    return vreinterpretq_s8_u8(vcombine_u8(vld1_u8(upper), vld1_u8(lower)));
}
inline void multiply_pairs(Squares& sums, Same codes, const Pairs& x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums.at[i] = vmmlaq_s32(sums.at[i], codes, x.at[i]);
}

inline Ints plus(Ints a, Ints b) { return {vaddq_s32(a.first, b.first), vaddq_s32(a.second, b.second)}; }
inline int32x4_t upper_of(int32x4_t a, int32x4_t b) { return vcombine_s32(vget_low_s32(a), vget_low_s32(b)); }
inline int32x4_t lower_of(int32x4_t a, int32x4_t b) { return vcombine_s32(vget_high_s32(a), vget_high_s32(b)); }
inline Ints upper_row(const Squares& a) { return {upper_of(a.at[0], a.at[1]), upper_of(a.at[2], a.at[3])}; }
inline Ints lower_row(const Squares& a) { return {lower_of(a.at[0], a.at[1]), lower_of(a.at[2], a.at[3])}; }

}  // namespace SLM_NAMESPACE
