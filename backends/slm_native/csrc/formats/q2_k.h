// Q2_K: 16 groups of 16 weights, scale * s * q - min_scale * m; s and m share a byte.
#pragma once

namespace SLM_NAMESPACE {

struct Q2_K {
    using Block = BlockQ2_K;
    static constexpr int type = 10, block = 256, groups = 16, zero = 0, bits = 2;
    static constexpr bool has_min = true;

    static Codes codes(const std::uint8_t* span, int g) {
        return field(load(span + offsetof(Block, qs) + 32 * (g / 4)), 2 * (g % 4), 3);
    }
    static Scales factors(const std::uint8_t* span) {
        return scaled(low_four(load_16(span)), half(read16(span + offsetof(Block, d))));
    }
    static Scales minimums(const std::uint8_t* span) {
        return scaled(high_four(load_16(span)), half(read16(span + offsetof(Block, dmin))));
    }
};

}  // namespace SLM_NAMESPACE
