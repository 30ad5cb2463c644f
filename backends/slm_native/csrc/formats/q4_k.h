// Q4_K: 8 groups of 32 weights, scale * s * q - min_scale * m; 32 bytes hold two groups.
#pragma once

namespace SLM_NAMESPACE {

// The six-bit scales and minimums of Q4_K and Q5_K (12 bytes), times `scale` and `min_scale`.
inline Scales six_bit_factors(const std::uint8_t* packed, float scale, float min_scale) {
    const std::uint32_t a = read32(packed), b = read32(packed + 4), c = read32(packed + 8);
    const std::uint32_t low6 = 0x3f3f3f3f, low4 = 0x0f0f0f0f, low2 = 0x03030303;
    const Sixteen sub =
        sixteen(a & low6, (c & low4) | (a >> 6 & low2) << 4, b & low6, (c >> 4 & low4) | (b >> 6 & low2) << 4);
    return scaled_halves(sub, scale, min_scale);
}

struct Q4_K {
    using Block = BlockQ4_K;
    static constexpr int type = 12, block = 256, groups = 8, zero = 0, bits = 4;
    static constexpr bool has_min = true;

    static Codes codes(const std::uint8_t* span, int g) {
        return field(load(span + offsetof(Block, qs) + 32 * (g / 2)), 4 * (g % 2), 15);
    }
    static Scales factors(const std::uint8_t* span) {
        return six_bit_factors(span + offsetof(Block, scales), half(read16(span)),
                               half(read16(span + offsetof(Block, dmin))));
    }
};

}  // namespace SLM_NAMESPACE
