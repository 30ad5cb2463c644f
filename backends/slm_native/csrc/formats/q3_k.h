// Q3_K: 16 groups of 16 weights, scale * (s - 32) * (q - 4); the third bits are in a field of their own.
#pragma once

namespace SLM_NAMESPACE {

struct Q3_K {
    using Block = BlockQ3_K;
    static constexpr int type = 11, block = 256, groups = 16, zero = 4, bits = 3;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        const Codes low = field(load(span + offsetof(Block, qs) + 32 * (g / 4)), 2 * (g % 4), 3);
        return either(low, field(load(span + offsetof(Block, hmask)), g - 2, 4));
    }
    static Scales factors(const std::uint8_t* span) {
        const std::uint8_t* packed = span + offsetof(Block, scales);
        const std::uint32_t a = read32(packed), b = read32(packed + 4), high = read32(packed + 8);
        const std::uint32_t low4 = 0x0f0f0f0f, low2 = 0x03030303;
        const Sixteen sub =
            sixteen((a & low4) | (high & low2) << 4, (b & low4) | (high >> 2 & low2) << 4,
                    (a >> 4 & low4) | (high >> 4 & low2) << 4, (b >> 4 & low4) | (high >> 6 & low2) << 4);
        return scaled_signed(minus_32(sub), half(read16(span + offsetof(Block, d))));
    }
};

}  // namespace SLM_NAMESPACE
