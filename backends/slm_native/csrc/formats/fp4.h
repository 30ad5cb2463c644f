// MXFP4 and NVFP4: nibbles that are four-bit floats (E2M1); codes are twice their values, + 16.
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
        alignas(64) float f[16] = {};
        for (int g = 0; g < 8; ++g) {  // 2 ** (e - 128), which is subnormal for the two smallest
            const std::uint32_t e = span[g * sizeof(Block)];
            f[g] = as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        }
        return load_scales(f);
    }
};

// 4 groups of 16 weights, value * an eight-bit float (E4M3, never negative); 8 bytes hold a group.
struct NVFP4 {
    using Block = BlockNVFP4;
    static constexpr int type = 40, block = 64, groups = 16, zero = 16, bits = 5;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        const std::uint8_t* run = span + g / 2 * sizeof(Block) + offsetof(Block, qs) + 16 * (g % 2);
        return middle_swapped(lookup(e2m1_codes, nibbles(run)));
    }
    static Scales factors(const std::uint8_t* span) {
        alignas(64) float f[16];
        for (int g = 0; g < 16; ++g) {
            const int e4m3 = span[g / 4 * sizeof(Block) + g % 4], exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
            const float unit = as_float(std::uint32_t(127 - 11 + (exponent ? exponent : 1)) << 23);
            f[g] = e4m3 == 0x7f ? 0.0f : unit * float(exponent ? 8 + mantissa : mantissa);
        }
        return load_scales(f);
    }
};

}  // namespace SLM_NAMESPACE
