// TQ2_0, TQ1_0 and Q1_0: weights of -1, 0 and 1, or of -1 and 1, times one scale; codes are weights + 1.
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

// 256 weights, five to a byte, in base 3: a byte is a fraction whose leading digit comes first. 32 bytes hold weights
// 0 .. 159, 16 bytes 160 .. 239, 4 bytes (of four digits) the rest; a digit of all bytes before the next.
struct TQ1_0 {
    using Block = BlockTQ1_0;
    static constexpr int type = 34, block = 256, groups = 8, zero = 1, bits = 2;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        std::uint8_t digits[32] = {};  // or gcc 12 loses some of them in a build with -fsanitize=thread
        if (g < 5) {
            leading(span, 32, g, digits);
        } else {
            const std::uint8_t* rest = span + 32;
            leading(rest, 16, 2 * (g - 5), digits);
            if (g < 7) leading(rest, 16, 2 * (g - 5) + 1, digits + 16);
            else
                for (int n = 0; n < 4; ++n) leading(span + offsetof(Block, qh), 4, n, digits + 16 + 4 * n);
        }
        return load(digits);
    }
    static Scales factors(const std::uint8_t* span) {
        const float scale = half(read16(span + offsetof(Block, d)));
        return same_scales(scale, scale);
    }

private:
    static void leading(const std::uint8_t* bytes, int n_bytes, int digit, std::uint8_t* to) {
        constexpr int powers[5] = {1, 3, 9, 27, 81};
        for (int i = 0; i < n_bytes; ++i) to[i] = std::uint8_t((bytes[i] * powers[digit] & 255) * 3 >> 8);
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
