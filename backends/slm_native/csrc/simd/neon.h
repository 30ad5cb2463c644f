// NEON with dot products (Armv8.2-A dotprod). README.md explains the names.
#pragma once

#include <arm_neon.h>

#include "formats/blocks.h"

namespace SLM_NAMESPACE {

constexpr int lanes = 8;
constexpr bool centres = true;
constexpr bool side_by_side() { return true; }
constexpr int sums_of_a_row = 1;
template <int bits>
constexpr int few_rows = 6;

struct Codes { uint8x16_t first, second; };
using Chunk = Codes;
struct Ints { int32x4_t first, second; };
struct Floats { float32x4_t first, second; };

inline Codes load(const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return {vld1q_u8(bytes), vld1q_u8(bytes + 16)};
}
inline Codes nibbles(const void* p) {
    const uint8x16_t both = vld1q_u8(static_cast<const std::uint8_t*>(p));
    return {vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8(both, 4)};
}
inline Codes field(Codes a, int shift, int mask) {
    const int8x16_t up = vdupq_n_s8(std::int8_t(-shift));
    const uint8x16_t bits = vdupq_n_u8(std::uint8_t(mask));
    return {vandq_u8(vshlq_u8(a.first, up), bits), vandq_u8(vshlq_u8(a.second, up), bits)};
}
inline Codes either(Codes a, Codes b) { return {vorrq_u8(a.first, b.first), vorrq_u8(a.second, b.second)}; }
inline Codes middle_swapped(Codes a) {
    return {vcombine_u8(vget_low_u8(a.first), vget_low_u8(a.second)),
            vcombine_u8(vget_high_u8(a.first), vget_high_u8(a.second))};
}
inline Codes flipped(Codes a) {
    const uint8x16_t top = vdupq_n_u8(0x80);
    return {veorq_u8(a.first, top), veorq_u8(a.second, top)};
}

// Byte i of sixteen is `value` if bit i of a word is set.
template <int value>
inline uint8x16_t half_flags(std::uint32_t word) {
    const uint8x8_t bits = vcreate_u8(0x8040201008040201);
    const uint8x16_t spread = vcombine_u8(vdup_n_u8(std::uint8_t(word)), vdup_n_u8(std::uint8_t(word >> 8)));
    return vandq_u8(vtstq_u8(spread, vcombine_u8(bits, bits)), vdupq_n_u8(value));
}
template <int value>
inline Codes flags(std::uint32_t word) {
    return {half_flags<value>(word), half_flags<value>(word >> 16)};
}

inline Codes lookup(const std::uint8_t* table, Codes a) {
    const uint8x16_t values = vld1q_u8(table);
    return {vqtbl1q_u8(values, a.first), vqtbl1q_u8(values, a.second)};
}
inline uint8x16_t times_three(uint8x16_t a) { return vaddq_u8(a, vaddq_u8(a, a)); }
inline Codes times_three(Codes a) { return {times_three(a.first), times_three(a.second)}; }
inline uint8x16_t half_thirds(uint8x16_t a) {
    const uint8x16_t first = vcgeq_u8(a, vdupq_n_u8(86)), second = vcgeq_u8(a, vdupq_n_u8(171));  // 255 for true
    return vsubq_u8(vdupq_n_u8(0), vaddq_u8(first, second));
}
inline Codes thirds(Codes a) { return {half_thirds(a.first), half_thirds(a.second)}; }
inline void store(std::uint8_t* to, Codes a) {
    vst1q_u8(to, a.first);
    vst1q_u8(to + 16, a.second);
}

// Chunk c of a span of 256 weights, for formats with 32 codes at a time.
template <class Format>
inline Chunk chunk(const std::uint8_t* span, int c) {
    return Format::codes(span, c);
}

inline Ints no_ints() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline Ints load_ints(const std::int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
inline Floats no_floats() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline Floats load_floats(const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);  // unaligned
    return {vreinterpretq_f32_u8(vld1q_u8(bytes)), vreinterpretq_f32_u8(vld1q_u8(bytes + 16))};
}
inline void store_floats(float* p, Floats a) {
    vst1q_f32(p, a.first);
    vst1q_f32(p + 4, a.second);
}
inline Floats all(float a) { return {vdupq_n_f32(a), vdupq_n_f32(a)}; }
inline Floats to_floats(Ints a) { return {vcvtq_f32_s32(a.first), vcvtq_f32_s32(a.second)}; }
inline Floats mul(Floats a, Floats b) { return {vmulq_f32(a.first, b.first), vmulq_f32(a.second, b.second)}; }
inline Floats add(Floats a, Floats b) { return {vaddq_f32(a.first, b.first), vaddq_f32(a.second, b.second)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
    return {vfmaq_f32(c.first, a.first, b.first), vfmaq_f32(c.second, a.second, b.second)};
}
inline Floats minus_product(Floats a, Floats b, Floats c) {
    return {vfmsq_f32(c.first, a.first, b.first), vfmsq_f32(c.second, a.second, b.second)};
}
inline float sum(Floats a) { return vaddvq_f32(vaddq_f32(a.first, a.second)); }

inline Floats from_halves(uint16x8_t bits) {
    const float16x8_t values = vreinterpretq_f16_u16(bits);
    return {vcvt_f32_f16(vget_low_f16(values)), vcvt_high_f32_f16(values)};
}
inline uint16x8_t eight_words(const void* p) {
    return vreinterpretq_u16_u8(vld1q_u8(static_cast<const std::uint8_t*>(p)));
}
inline Floats load_f16(const void* p) { return from_halves(eight_words(p)); }
inline Floats load_bf16(const void* p) {
    const uint16x8_t bits = eight_words(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
}
inline float half(std::uint16_t bits) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0);
}

// Sixteen factors, or eight scales and eight minimums. In memory, as broadcasts from memory are as fast.
struct Scales { alignas(16) float at[16]; };

inline Scales as_scales(Floats lower, Floats upper) {
    Scales scales;
    store_floats(scales.at, lower);
    store_floats(scales.at + 8, upper);
    return scales;
}
template <int stride>
inline Floats eight_halves(const std::uint8_t* p) {
    std::uint16_t bits[8];
    for (int i = 0; i < 8; ++i) bits[i] = read16(p + i * stride);
    return from_halves(vld1q_u16(bits));
}
template <int stride>
inline Scales halves(const std::uint8_t* p) {
    return as_scales(eight_halves<stride>(p), no_floats());
}
template <int stride>
inline Scales halves_and_minus(const std::uint8_t* p, const std::uint8_t* q) {
    const Floats upper = eight_halves<stride>(q);
    return as_scales(eight_halves<stride>(p), {vnegq_f32(upper.first), vnegq_f32(upper.second)});
}
inline Scales same_scales(float first, float second) {
    return as_scales({vdupq_n_f32(first), vdupq_n_f32(second)}, no_floats());
}
inline void store_scales(float* to, const Scales& a, int n) {
    __builtin_memcpy(to, a.at, std::size_t(n) * sizeof(float));
}

using Sixteen = uint8x16_t;
inline Sixteen load_16(const void* p) { return vld1q_u8(static_cast<const std::uint8_t*>(p)); }
inline Sixteen sixteen(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    const std::uint32_t words[4] = {a, b, c, d};
    return vreinterpretq_u8_u32(vld1q_u32(words));
}
inline Codes joined(Sixteen a, Sixteen b) { return {a, b}; }
inline Sixteen low_four(Sixteen a) { return vandq_u8(a, vdupq_n_u8(15)); }
inline Sixteen high_four(Sixteen a) { return vshrq_n_u8(a, 4); }
inline Sixteen minus_32(Sixteen a) { return vsubq_u8(a, vdupq_n_u8(32)); }

inline Floats scaled_eight(uint8x8_t bytes, float factor) {
    const uint16x8_t wide = vmovl_u8(bytes);
    return {vmulq_n_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), factor),
            vmulq_n_f32(vcvtq_f32_u32(vmovl_high_u16(wide)), factor)};
}
inline Floats scaled_eight(int8x8_t bytes, float factor) {
    const int16x8_t wide = vmovl_s8(bytes);
    return {vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), factor),
            vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(wide)), factor)};
}
inline Scales scaled_halves(Sixteen bytes, float first, float second) {
    return as_scales(scaled_eight(vget_low_u8(bytes), first), scaled_eight(vget_high_u8(bytes), second));
}
inline Scales scaled(Sixteen bytes, float factor) { return scaled_halves(bytes, factor, factor); }
inline Scales scaled_signed(Sixteen bytes, float factor) {
    const int8x16_t values = vreinterpretq_s8_u8(bytes);
    return as_scales(scaled_eight(vget_low_s8(values), factor), scaled_eight(vget_high_s8(values), factor));
}

inline float32x4_t four_halved_powers(uint16x4_t bytes) {
    const int32x4_t one = vdupq_n_s32(1), e = vreinterpretq_s32_u32(vmovl_u16(bytes));
    const int32x4_t tiny = vshlq_s32(vdupq_n_s32(1 << 21), vminq_s32(e, one));  // subnormal, of 0 and 1
    return vreinterpretq_f32_s32(vmaxq_s32(tiny, vshlq_n_s32(vsubq_s32(e, one), 23)));
}
inline Scales halved_powers(Sixteen bytes) {
    const uint16x8_t wide = vmovl_u8(vget_low_u8(bytes));
    return as_scales({four_halved_powers(vget_low_u16(wide)), four_halved_powers(vget_high_u16(wide))}, no_floats());
}
inline Scales halved_e4m3(Sixteen bytes) {
    const uint8x16_t none = vceqq_u8(bytes, vdupq_n_u8(127)), number = vbicq_u8(vandq_u8(bytes, vdupq_n_u8(127)), none);
    const Floats to_half = all(128);  // as halves they are smaller by a factor of 2 ** -8
    return as_scales(mul(from_halves(vshll_n_u8(vget_low_u8(number), 7)), to_half),
                     mul(from_halves(vshll_n_u8(vget_high_u8(number), 7)), to_half));
}

// Both operands are signed: codes up to 127 unchanged, wider codes centred.
template <bool wide>
inline Chunk centred(Chunk codes) {
    return wide ? flipped(codes) : codes;
}
template <bool wide>
inline Ints dot(Ints sums, Chunk codes, const std::int8_t* x) {
    codes = centred<wide>(codes);
    return {vdotq_s32(sums.first, vreinterpretq_s8_u8(codes.first), vld1q_s8(x)),
            vdotq_s32(sums.second, vreinterpretq_s8_u8(codes.second), vld1q_s8(x + 16))};
}

inline Scales times(const Scales& a, const float* b) {
    return as_scales(mul(load_floats(a.at), load_floats(b)), mul(load_floats(a.at + 8), load_floats(b + 8)));
}

template <int group>
inline Floats spread(const Scales& scales, int c) {
    if constexpr (group == 32) return all(scales.at[c]);
    return {vdupq_n_f32(scales.at[2 * c]), vdupq_n_f32(scales.at[2 * c + 1])};
}

// sums - the upper eight factors * sum32[8 .. 15]; sum32[0 .. 7] are zeros.
inline Floats minus_upper(const Scales& scales, const float* sum32, Floats sums) {
    return minus_product(load_floats(scales.at + 8), load_floats(sum32 + 8), sums);
}
inline Floats minus_all(const Scales& scales, const float* b, Floats sums) {
    sums = minus_product(load_floats(scales.at), load_floats(b), sums);
    return minus_product(load_floats(scales.at + 8), load_floats(b + 8), sums);
}

// Products of codes that are the same in all lanes.
using Same = int8x16_t;
inline Same same_codes(const std::uint8_t* four) { return vreinterpretq_s8_u32(vdupq_n_u32(read32(four))); }
struct Bytes { int8x16_t first, second; };
inline Bytes load_bytes(const std::int8_t* p) { return {vld1q_s8(p), vld1q_s8(p + 16)}; }
template <bool wide>
inline Ints dot_same(Ints sums, Same codes, Bytes x) {
    return {vdotq_s32(sums.first, codes, x.first), vdotq_s32(sums.second, codes, x.second)};
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_first(const void* p) { __builtin_prefetch(p); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Floats largest(Floats a, Floats b) { return {larger(a.first, b.first), larger(a.second, b.second)}; }
inline Floats magnitude(Floats a) { return {vabsq_f32(a.first), vabsq_f32(a.second)}; }
inline float largest_lane(Floats a) { return vmaxvq_f32(vmaxq_f32(a.first, a.second)); }
// Rounds to nearest, ties to even; NaN becomes 0.
inline int8x8_t eight_rounded(Floats a) {
    return vqmovn_s16(vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a.first)), vqmovn_s32(vcvtnq_s32_f32(a.second))));
}
inline void store_rounded(std::int8_t* to, Floats a) { vst1_s8(to, eight_rounded(a)); }
// The same for four vectors, as the bits of one vector.
inline Floats rounded_codes(Floats a, Floats b, Floats c, Floats d) {
    return {vreinterpretq_f32_s8(vcombine_s8(eight_rounded(a), eight_rounded(b))),
            vreinterpretq_f32_s8(vcombine_s8(eight_rounded(c), eight_rounded(d)))};
}

inline Floats divide(Floats a, Floats b) { return {vdivq_f32(a.first, b.first), vdivq_f32(a.second, b.second)}; }
// NaN if `a` is NaN.
inline Floats at_least(float limit, Floats a) { return largest(all(limit), a); }
inline Floats at_most(float limit, Floats a) {
    const float32x4_t most = vdupq_n_f32(limit);
    return {vbslq_f32(vcltq_f32(most, a.first), most, a.first), vbslq_f32(vcltq_f32(most, a.second), most, a.second)};
}
inline Floats rounded(Floats a) { return {vrndnq_f32(a.first), vrndnq_f32(a.second)}; }
// 2 ** whole, between 2 ** -126 and 2 ** 127.
inline float32x4_t power(float32x4_t whole) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)), 23));
}
inline Floats times_power(Floats a, Floats whole) {
    return {vmulq_f32(a.first, power(whole.first)), vmulq_f32(a.second, power(whole.second))};
}
inline Floats sub(Floats a, Floats b) { return {vsubq_f32(a.first, b.first), vsubq_f32(a.second, b.second)}; }
inline Floats where_below(Floats a, Floats b, Floats yes, Floats no) {
    return {vbslq_f32(vcltq_f32(a.first, b.first), yes.first, no.first),
            vbslq_f32(vcltq_f32(a.second, b.second), yes.second, no.second)};
}
// Transposes a square of four vectors.
inline void transpose_four(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    const auto wide = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
    const auto narrow = [](float64x2_t x) { return vreinterpretq_f32_f64(x); };
    const float32x4_t even = vtrn1q_f32(a, b), odd = vtrn2q_f32(a, b), even2 = vtrn1q_f32(c, d),
                      odd2 = vtrn2q_f32(c, d);
    a = narrow(vzip1q_f64(wide(even), wide(even2))), b = narrow(vzip1q_f64(wide(odd), wide(odd2)));
    c = narrow(vzip2q_f64(wide(even), wide(even2))), d = narrow(vzip2q_f64(wide(odd), wide(odd2)));
}
[[gnu::always_inline]] inline void transpose(Floats (&rows)[lanes]) {
    transpose_four(rows[0].first, rows[1].first, rows[2].first, rows[3].first);
    transpose_four(rows[0].second, rows[1].second, rows[2].second, rows[3].second);
    transpose_four(rows[4].first, rows[5].first, rows[6].first, rows[7].first);
    transpose_four(rows[4].second, rows[5].second, rows[6].second, rows[7].second);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const float32x4_t kept = rows[i].second;
        rows[i].second = rows[4 + i].first, rows[4 + i].first = kept;
    }
}
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
    const auto folded = [](Floats x) { return vaddq_f32(x.first, x.second); };
    const float32x4_t ab = vpaddq_f32(folded(a), folded(b)), cd = vpaddq_f32(folded(c), folded(d));
    vst1q_f32(to, vpaddq_f32(ab, cd));
}

template <class Of>
inline Chunk chunk_of(const Of& of, int c) {
    return of(c);
}
inline Floats spread_blocks(const float* p) { return all(*p); }
inline Codes lowered(Codes a, int by) {
    const uint8x16_t less = vdupq_n_u8(std::uint8_t(by));
    return {vsubq_u8(a.first, less), vsubq_u8(a.second, less)};
}
inline Floats eight_as_floats(int8x8_t bytes) {
    const int16x8_t wide = vmovl_s8(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}
inline Floats bytes_as_floats(const void* p) { return eight_as_floats(vld1_s8(static_cast<const std::int8_t*>(p))); }
template <int i>
inline Floats part_as_floats(Codes a) {
    const int8x16_t half = vreinterpretq_s8_u8(i / 2 ? a.second : a.first);
    return eight_as_floats(i % 2 ? vget_high_s8(half) : vget_low_s8(half));
}
inline std::uint16_t to_half(float a) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(a))), 0); }
inline void store_f16(void* p, Floats a) {
    const float16x8_t halves = vcombine_f16(vcvt_f16_f32(a.first), vcvt_f16_f32(a.second));
    vst1q_u8(static_cast<std::uint8_t*>(p), vreinterpretq_u8_f16(halves));
}
inline uint16x4_t to_bf16(float32x4_t a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), up, vdupq_n_u32(0x7fc00000)), 16);
}
inline void store_bf16(void* p, Floats a) {
    vst1q_u8(static_cast<std::uint8_t*>(p), vreinterpretq_u8_u16(vcombine_u16(to_bf16(a.first), to_bf16(a.second))));
}

}  // namespace SLM_NAMESPACE

#include "simd/whole_sums.h"
