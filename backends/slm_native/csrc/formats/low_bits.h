// TQ2_0, TQ1_0 and Q1_0: weights of -1, 0 and 1, or of -1 and 1, times one scale; code = weight + 1.
#pragma once

namespace SLM_NAMESPACE {

// 256 weights of two bits.
struct TQ2_0 {
    using Block = BlockTQ2_0;
    static constexpr int type = 35, block = 256, groups = 8, zero = 1, bits = 2;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) { return field(load(span + 32 * (g / 4)), 2 * (g % 4), 3); }
    static Scales factors(const std::uint8_t* span) {
        const float scale = half(read16(span + offsetof(Block, d)));
        return same_scales(scale, scale);
    }
};

// 256 weights in base 3, five per byte. A byte is a fraction of 256; the first weight is its leading digit. 32 bytes
// hold weights 0 .. 159, 16 bytes hold 160 .. 239, 4 bytes with four digits each hold the rest. Within each part, the
// first digits of all bytes come first.
struct TQ1_0 {
    using Block = BlockTQ1_0;
    static constexpr int type = 34, block = 256, groups = 8, zero = 1, bits = 2;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        if (g < 5) return thirds(shifted(load(span), g));
        const Sixteen rest = load_16(span + 32);
        if (g < 7) return thirds(joined(shifted(rest, 2 * (g - 5)), shifted(rest, 2 * (g - 5) + 1)));
        const std::uint32_t first = read32(span + offsetof(Block, qh)), second = tripled(first),
                            third = tripled(second);
        return thirds(joined(shifted(rest, 4), sixteen(first, second, third, tripled(third))));
    }
    static Scales factors(const std::uint8_t* span) {
        const float scale = half(read16(span + offsetof(Block, d)));
        return same_scales(scale, scale);
    }

private:
    // Drops the n leading base-3 digits of fractions of 256.
    template <class Vector>
    static Vector shifted(Vector fractions, int n) {
        for (int i = 0; i < n; ++i) fractions = times_three(fractions);
        return fractions;
    }
    static std::uint32_t tripled(std::uint32_t four) {
        const std::uint32_t even = four & 0x00ff00ff, odd = four >> 8 & 0x00ff00ff;
        return (even * 3 & 0x00ff00ff) | (odd * 3 & 0x00ff00ff) << 8;
    }
};

// 128 weights of one bit: set is 1, clear is -1.
struct Q1_0 {
    using Block = BlockQ1_0;
    static constexpr int type = 41, block = 128, groups = 8, zero = 1, bits = 2;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        return flags<2>(read32(span + g / 4 * sizeof(Block) + offsetof(Block, qs) + 4 * (g % 4)));
    }
    static Scales factors(const std::uint8_t* span) {
        return same_scales(half(read16(span)), half(read16(span + sizeof(Block))));
    }
};

}  // namespace SLM_NAMESPACE
