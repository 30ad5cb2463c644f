// Plain C++: runs anywhere, and is the definition of the names in README.md.
#pragma once

#include "formats/blocks.h"

namespace SLM_NAMESPACE {

constexpr int lanes = 8;
constexpr bool centres = true;
constexpr bool side_by_side() { return true; }
constexpr int sums_of_a_row = 1;
template <int bits>
constexpr int few_rows = 6;

struct Codes { std::uint8_t at[32]; };
using Chunk = Codes;
struct Ints { std::int32_t at[lanes]; };
struct Floats { float at[lanes]; };

template <class Vector, class Of>
inline Vector each(Of of) {
    Vector v;
    for (int i = 0; i < int(sizeof v.at / sizeof v.at[0]); ++i) v.at[i] = of(i);
    return v;
}

inline Codes load(const void* p) {
    Codes a;
    __builtin_memcpy(&a, p, sizeof a);
    return a;
}
inline Codes nibbles(const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return each<Codes>([&](int i) { return std::uint8_t(bytes[i % 16] >> (i < 16 ? 0 : 4) & 15); });
}
inline Codes field(Codes a, int shift, int mask) {
    return each<Codes>([&](int i) { return std::uint8_t((shift >= 0 ? a.at[i] >> shift : a.at[i] << -shift) & mask); });
}
inline Codes either(Codes a, Codes b) {
    return each<Codes>([&](int i) { return std::uint8_t(a.at[i] | b.at[i]); });
}
inline Codes middle_swapped(Codes a) {
    return each<Codes>([&](int i) { return a.at[i / 8 == 1 ? i + 8 : i / 8 == 2 ? i - 8 : i]; });
}
inline Codes flipped(Codes a) {
    return each<Codes>([&](int i) { return std::uint8_t(a.at[i] ^ 0x80); });
}
template <int value>
inline Codes flags(std::uint32_t word) {
    return each<Codes>([&](int i) { return std::uint8_t(word >> i & 1 ? value : 0); });
}
inline Codes lookup(const std::uint8_t* table, Codes a) {
    return each<Codes>([&](int i) { return table[a.at[i]]; });
}
template <class Vector>
inline Vector times_three(Vector a) {
    return each<Vector>([&](int i) { return std::uint8_t(a.at[i] * 3); });
}
inline Codes thirds(Codes a) {
    return each<Codes>([&](int i) { return std::uint8_t(a.at[i] * 3 >> 8); });
}
inline void store(std::uint8_t* to, Codes a) { __builtin_memcpy(to, &a, sizeof a); }

template <class Format>
inline Chunk chunk(const std::uint8_t* span, int c) {
    return Format::codes(span, c);
}

inline Ints no_ints() { return Ints{}; }
inline Ints load_ints(const std::int32_t* p) {
    return each<Ints>([&](int i) { return p[i]; });
}
inline Floats no_floats() { return Floats{}; }
// Unaligned, like the loads of the other instruction sets.
inline Floats load_floats(const void* p) {
    Floats a;
    __builtin_memcpy(&a, p, sizeof a);
    return a;
}
inline void store_floats(float* p, Floats a) { __builtin_memcpy(p, &a, sizeof a); }
inline Floats all(float a) {
    return each<Floats>([&](int) { return a; });
}
inline Floats to_floats(Ints a) {
    return each<Floats>([&](int i) { return float(a.at[i]); });
}
// The products' inner loops. They do not use `each`: builds with sanitizers would call its lambda for each lane.
inline Floats mul(Floats a, Floats b) {
    for (int i = 0; i < lanes; ++i) a.at[i] *= b.at[i];
    return a;
}
inline Floats add(Floats a, Floats b) {
    for (int i = 0; i < lanes; ++i) a.at[i] += b.at[i];
    return a;
}
inline Floats fma(Floats a, Floats b, Floats c) {
    for (int i = 0; i < lanes; ++i) c.at[i] += a.at[i] * b.at[i];
    return c;
}
inline Floats minus_product(Floats a, Floats b, Floats c) {
    return each<Floats>([&](int i) { return c.at[i] - a.at[i] * b.at[i]; });
}
inline float sum(Floats a) {
    float total = 0;
    for (float value : a.at) total += value;
    return total;
}

inline float half(std::uint16_t bits) {
    const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    if (exponent == 0) {
        const float tiny = float(mantissa) * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    return as_float(sign | (exponent == 31 ? 0xffu << 23 : (exponent + 112) << 23) | mantissa << 13);
}
inline Floats load_f16(const void* p) {
    return each<Floats>([&](int i) { return half(read16(static_cast<const std::uint8_t*>(p) + 2 * i)); });
}
inline Floats load_bf16(const void* p) {
    return each<Floats>(
        [&](int i) { return as_float(std::uint32_t(read16(static_cast<const std::uint8_t*>(p) + 2 * i)) << 16); });
}

// Sixteen factors, or eight scales and eight minimums.
struct Scales { float at[16]; };

template <int stride>
inline Scales halves(const std::uint8_t* p) {
    return each<Scales>([&](int i) { return i < 8 ? half(read16(p + i * stride)) : 0.0f; });
}
template <int stride>
inline Scales halves_and_minus(const std::uint8_t* p, const std::uint8_t* q) {
    return each<Scales>(
        [&](int i) { return i < 8 ? half(read16(p + i * stride)) : -half(read16(q + (i - 8) * stride)); });
}
inline Scales same_scales(float first, float second) {
    return each<Scales>([&](int i) { return i < 4 ? first : second; });
}
inline void store_scales(float* to, Scales a, int n) {
    for (int i = 0; i < n; ++i) to[i] = a.at[i];
}

struct Sixteen { std::uint8_t at[16]; };
inline Sixteen load_16(const void* p) {
    Sixteen a;
    __builtin_memcpy(&a, p, sizeof a);
    return a;
}
inline Sixteen sixteen(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    const std::uint32_t words[4] = {a, b, c, d};
    return load_16(words);
}
inline Codes joined(Sixteen a, Sixteen b) {
    return each<Codes>([&](int i) { return i < 16 ? a.at[i] : b.at[i - 16]; });
}
inline Sixteen low_four(Sixteen a) {
    return each<Sixteen>([&](int i) { return std::uint8_t(a.at[i] & 15); });
}
inline Sixteen high_four(Sixteen a) {
    return each<Sixteen>([&](int i) { return std::uint8_t(a.at[i] >> 4); });
}
inline Sixteen minus_32(Sixteen a) {
    return each<Sixteen>([&](int i) { return std::uint8_t(a.at[i] - 32); });
}
inline Scales scaled_halves(Sixteen bytes, float first, float second) {
    return each<Scales>([&](int i) { return float(bytes.at[i]) * (i < 8 ? first : second); });
}
inline Scales scaled(Sixteen bytes, float factor) { return scaled_halves(bytes, factor, factor); }
inline Scales scaled_signed(Sixteen bytes, float factor) {
    return each<Scales>([&](int i) { return float(std::int8_t(bytes.at[i])) * factor; });
}

inline Scales halved_powers(Sixteen bytes) {
    return each<Scales>([&](int i) {
        const std::uint32_t e = bytes.at[i];
        return i < 8 ? as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23) : 0.0f;  // the two smallest are subnormal
    });
}
inline Scales halved_e4m3(Sixteen bytes) {
    return each<Scales>([&](int i) {
        const int exponent = bytes.at[i] >> 3 & 15, mantissa = bytes.at[i] & 7;
        const float unit = as_float(std::uint32_t(127 - 11 + (exponent ? exponent : 1)) << 23);
        return bytes.at[i] == 127 ? 0.0f : unit * float(exponent ? 8 + mantissa : mantissa);
    });
}

template <bool wide>
inline Chunk centred(Chunk codes) {
    return wide ? flipped(codes) : codes;
}
template <bool wide>
inline Ints dot(Ints sums, Chunk codes, const std::int8_t* x) {
    codes = centred<wide>(codes);
    for (int i = 0; i < 32; ++i) sums.at[i / 4] += std::int8_t(codes.at[i]) * x[i];
    return sums;
}

inline Scales times(Scales a, const float* b) {
    return each<Scales>([&](int i) { return a.at[i] * b[i]; });
}

template <int group>
inline Floats spread(const Scales& scales, int c) {
    return each<Floats>([&](int i) { return group == 32 ? scales.at[c] : scales.at[2 * c + i / 4]; });
}

// sums - the upper eight factors * sum32[8 .. 15]; sum32[0 .. 7] are zeros.
inline Floats minus_upper(const Scales& scales, const float* sum32, Floats sums) {
    return each<Floats>([&](int i) { return sums.at[i] - scales.at[8 + i] * sum32[8 + i]; });
}
inline Floats minus_all(const Scales& scales, const float* b, Floats sums) {
    return each<Floats>([&](int i) { return sums.at[i] - scales.at[i] * b[i] - scales.at[8 + i] * b[8 + i]; });
}

// Products of codes that are the same in all lanes.
struct Same { std::int32_t at[4]; };
inline Same same_codes(const std::uint8_t* four) {
    return each<Same>([&](int i) { return std::int32_t(std::int8_t(four[i])); });
}
struct Bytes { std::int8_t at[32]; };
inline Bytes load_bytes(const std::int8_t* p) {
    return each<Bytes>([&](int i) { return p[i]; });
}
template <bool wide>
inline Ints dot_same(Ints sums, Same codes, Bytes x) {
    for (int i = 0; i < 32; ++i) sums.at[i / 4] += codes.at[i % 4] * x.at[i];
    return sums;
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_first(const void* p) { __builtin_prefetch(p); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

inline Floats largest(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
}
inline Floats magnitude(Floats a) {
    return each<Floats>([&](int i) { return __builtin_fabsf(a.at[i]); });
}
inline float largest_lane(Floats a) {
    float top = a.at[0];
    for (float value : a.at) top = value > top ? value : top;
    return top;
}
// Rounds to nearest, ties to even; NaN becomes 0.
inline void store_rounded(std::int8_t* to, Floats a) {
    for (int i = 0; i < lanes; ++i) to[i] = a.at[i] == a.at[i] ? std::int8_t(__builtin_rintf(a.at[i])) : std::int8_t(0);
}

// The same for four vectors, as the bits of one vector.
inline Floats rounded_codes(Floats a, Floats b, Floats c, Floats d) {
    std::int8_t codes[4 * lanes];
    store_rounded(codes, a), store_rounded(codes + lanes, b), store_rounded(codes + 2 * lanes, c),
        store_rounded(codes + 3 * lanes, d);
    return load_floats(codes);
}

inline Floats divide(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.at[i] / b.at[i]; });
}
// NaN if `a` is NaN.
inline Floats at_least(float limit, Floats a) {
    return each<Floats>([&](int i) { return limit > a.at[i] ? limit : a.at[i]; });
}
inline Floats at_most(float limit, Floats a) {
    return each<Floats>([&](int i) { return limit < a.at[i] ? limit : a.at[i]; });
}
inline Floats rounded(Floats a) {
    return each<Floats>([&](int i) { return __builtin_rintf(a.at[i]); });
}
// a * 2 ** whole; the power is between 2 ** -126 and 2 ** 127.
inline Floats times_power(Floats a, Floats whole) {
    return each<Floats>([&](int i) {
        return whole.at[i] == whole.at[i] ? a.at[i] * as_float(std::uint32_t(int(whole.at[i]) + 127) << 23)
                                          : whole.at[i];
    });
}
inline Floats sub(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.at[i] - b.at[i]; });
}
inline Floats where_below(Floats a, Floats b, Floats yes, Floats no) {
    return each<Floats>([&](int i) { return a.at[i] < b.at[i] ? yes.at[i] : no.at[i]; });
}
[[gnu::always_inline]] inline void transpose(Floats (&rows)[lanes]) {
    for (int i = 0; i < lanes; ++i)
        for (int k = 0; k < i; ++k) {
            const float kept = rows[i].at[k];
            rows[i].at[k] = rows[k].at[i], rows[k].at[i] = kept;
        }
}
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
    to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
}

template <class Of>
inline Chunk chunk_of(const Of& of, int c) {
    return of(c);
}
inline Floats spread_blocks(const float* p) { return all(*p); }
inline Codes lowered(Codes a, int by) {
    return each<Codes>([&](int i) { return std::uint8_t(a.at[i] - by); });
}
inline Floats bytes_as_floats(const void* p) {
    return each<Floats>([&](int i) { return float(static_cast<const std::int8_t*>(p)[i]); });
}
template <int part>
inline Floats part_as_floats(const Codes& a) {
    return each<Floats>([&](int i) { return float(std::int8_t(a.at[part * lanes + i])); });
}
// Rounds to nearest, ties to even; subnormal halves are multiples of 2 ** -24.
inline std::uint16_t to_half(float a) {
    const std::uint32_t bits = as_bits(a), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (size > 0x7f800000) return std::uint16_t(sign | 0x7e00);
    if (size >= 0x477ff000) return std::uint16_t(sign | 0x7c00);
    if (size < 0x38800000) return std::uint16_t(sign | std::uint32_t(__builtin_rintf(as_float(size) * 0x1p24f)));
    return std::uint16_t(sign | (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13);
}
inline void store_f16(void* p, Floats a) {
    for (int i = 0; i < lanes; ++i) {
        const std::uint16_t bits = to_half(a.at[i]);
        __builtin_memcpy(static_cast<std::uint8_t*>(p) + 2 * i, &bits, 2);
    }
}
inline void store_bf16(void* p, Floats a) {
    for (int i = 0; i < lanes; ++i) {
        const std::uint32_t bits = as_bits(a.at[i]), up = bits + 0x7fff + (bits >> 16 & 1);
        const std::uint16_t kept = a.at[i] == a.at[i] ? std::uint16_t(up >> 16) : std::uint16_t(0x7fc0);
        __builtin_memcpy(static_cast<std::uint8_t*>(p) + 2 * i, &kept, 2);
    }
}

}  // namespace SLM_NAMESPACE

#include "simd/whole_sums.h"
