// Q4_1: 32 weights of scale * q + min; nibbles as in Q4_0.
#pragma once

namespace SLM_NAMESPACE {

struct Q4_1 {
    using Block = BlockQ4_1;
    static constexpr int type = 3, block = 32, groups = 8, zero = 0, bits = 4;
    static constexpr bool has_min = true;

    static Codes codes(const std::uint8_t* span, int g) {
        return nibbles(span + g * sizeof(Block) + offsetof(Block, qs));
    }
    static Scales factors(const std::uint8_t* span) {
        return halves_and_minus<sizeof(Block)>(span, span + offsetof(Block, m));
    }
};

}  // namespace SLM_NAMESPACE
