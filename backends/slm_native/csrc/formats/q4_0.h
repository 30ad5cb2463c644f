// Q4_0: 32 weights of scale * (q - 8); byte j holds weight j and, in its high nibble, weight j + 16.
#pragma once

namespace SLM_NAMESPACE {

struct Q4_0 {
    using Block = BlockQ4_0;
    static constexpr int type = 2, block = 32, groups = 8, zero = 8, bits = 4;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        return nibbles(span + g * sizeof(Block) + offsetof(Block, qs));
    }
    static Scales factors(const std::uint8_t* span) { return halves<sizeof(Block)>(span); }
};

}  // namespace SLM_NAMESPACE
