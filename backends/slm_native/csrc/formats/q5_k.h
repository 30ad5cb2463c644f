// Q5_K: as Q4_K; bit i of byte j of `qh` is the fifth bit of weight 32 i + j.
#pragma once

namespace SLM_NAMESPACE {

struct Q5_K {
    using Block = BlockQ5_K;
    static constexpr int type = 13, block = 256, groups = 8, zero = 0, bits = 5;
    static constexpr bool has_min = true;

    static Codes codes(const std::uint8_t* span, int g) {
        const Codes low = field(load(span + offsetof(Block, qs) + 32 * (g / 2)), 4 * (g % 2), 15);
        return either(low, field(load(span + offsetof(Block, qh)), g - 4, 16));
    }
    static Scales factors(const std::uint8_t* span) {
        return six_bit_factors(span + offsetof(Block, scales), half(read16(span)),
                               half(read16(span + offsetof(Block, dmin))));
    }
};

}  // namespace SLM_NAMESPACE
