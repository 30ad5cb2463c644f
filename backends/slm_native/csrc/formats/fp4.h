// MXFP4 and NVFP4: nibbles are four-bit floats (E2M1); code = 2 * value + 16.
#pragma once

namespace SLM_NAMESPACE {

alignas(16) constexpr std::uint8_t e2m1_codes[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// 32 weights of 2 ** (e - 127) * value (OCP Microscaling Formats 1.0).
struct MXFP4 {
    using Block = BlockMXFP4;
    static constexpr int type = 39, block = 32, groups = 8, zero = 16, bits = 5;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        return lookup(e2m1_codes, nibbles(span + g * sizeof(Block) + offsetof(Block, qs)));
    }
    static Scales factors(const std::uint8_t* span) {
        std::uint64_t exponents = 0;
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) exponents |= std::uint64_t(span[g * sizeof(Block)]) << 8 * g;
        return halved_powers(sixteen(std::uint32_t(exponents), std::uint32_t(exponents >> 32), 0, 0));
    }
};

// 4 groups of 16 weights, value * an eight-bit float (E4M3, never negative); 8 bytes per group.
struct NVFP4 {
    using Block = BlockNVFP4;
    static constexpr int type = 40, block = 64, groups = 16, zero = 16, bits = 5;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        const std::uint8_t* run = span + g / 2 * sizeof(Block) + offsetof(Block, qs) + 16 * (g % 2);
        return middle_swapped(lookup(e2m1_codes, nibbles(run)));
    }
    static Scales factors(const std::uint8_t* span) {
        constexpr std::size_t next = sizeof(Block);
        return halved_e4m3(
            sixteen(read32(span), read32(span + next), read32(span + 2 * next), read32(span + 3 * next)));
    }
};

}  // namespace SLM_NAMESPACE
