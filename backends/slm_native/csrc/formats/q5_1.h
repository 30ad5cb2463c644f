// Q5_1: 32 weights of scale * q + min; codes as in Q5_0.
#pragma once

#include "formats/q5_0.h"

namespace SLM_NAMESPACE {

struct Q5_1 {
    using Block = BlockQ5_1;
    static constexpr int type = 7, block = 32, groups = 8, zero = 0, bits = 5;
    static constexpr bool has_min = true;

    static Codes codes(const std::uint8_t* span, int g) { return five_bits(reinterpret_cast<const Block*>(span) + g); }
    static Scales factors(const std::uint8_t* span) {
        return halves_and_minus<sizeof(Block)>(span, span + offsetof(Block, m));
    }
};

}  // namespace SLM_NAMESPACE
