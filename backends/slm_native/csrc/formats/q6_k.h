// Q6_K: 16 groups of 16 weights, scale * s * (q - 32); the low four and the high two bits are in separate fields.
#pragma once

namespace SLM_NAMESPACE {

struct Q6_K {
    using Block = BlockQ6_K;
    static constexpr int type = 14, block = 256, groups = 16, zero = 32, bits = 6;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        const int part = g / 4, run = g % 4;  // 128 weights are four runs of 32
        const Codes low = field(load(span + 64 * part + 32 * (run % 2)), 4 * (run / 2), 15);
        return either(low, field(load(span + offsetof(Block, qh) + 32 * part), 2 * run - 4, 0x30));
    }
    static Scales factors(const std::uint8_t* span) {
        return scaled_signed(load_16(span + offsetof(Block, scales)), half(read16(span + offsetof(Block, d))));
    }
};

}  // namespace SLM_NAMESPACE
