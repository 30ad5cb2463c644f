// IQ4_NL and IQ4_XS: nibbles index sixteen non-linear levels; code = level + 128.
#pragma once

namespace SLM_NAMESPACE {

alignas(16) constexpr std::uint8_t iq4_levels[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                     129, 141, 153, 166, 181, 197, 217, 241};

// 32 weights of scale * level.
struct IQ4_NL {
    using Block = BlockIQ4_NL;
    static constexpr int type = 20, block = 32, groups = 8, zero = 128, bits = 8;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        return lookup(iq4_levels, nibbles(span + g * sizeof(Block) + offsetof(Block, qs)));
    }
    static Scales factors(const std::uint8_t* span) { return halves<sizeof(Block)>(span); }
};

// 8 groups of 32 weights, scale * (s - 32) * level; s has four low and two high bits.
struct IQ4_XS {
    using Block = BlockIQ4_XS;
    static constexpr int type = 23, block = 256, groups = 8, zero = 128, bits = 8;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        return lookup(iq4_levels, nibbles(span + offsetof(Block, qs) + 16 * g));
    }
    static Scales factors(const std::uint8_t* span) {
        std::uint64_t low = read32(span + offsetof(Block, scales_l)), high = read16(span + offsetof(Block, scales_h));
        low = (low | low << 16) & 0x0000ffff0000ffff;  // a byte for each nibble
        low = (low | low << 8) & 0x00ff00ff00ff00ff;
        low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
        high = (high | high << 24) & 0x000000ff000000ff;  // a byte for each pair of bits
        high = (high | high << 12) & 0x000f000f000f000f;
        high = (high | high << 6) & 0x0303030303030303;
        const std::uint64_t sub = low | high << 4;
        const Sixteen bytes = sixteen(std::uint32_t(sub), std::uint32_t(sub >> 32), 0x20202020, 0x20202020);
        return scaled_signed(minus_32(bytes), half(read16(span)));
    }
};

}  // namespace SLM_NAMESPACE
