// Q8_0: 32 weights of scale * q, q signed: codes are q + 128.
#pragma once

namespace SLM_NAMESPACE {

struct Q8_0 {
    using Block = BlockQ8_0;
    static constexpr int type = 8, block = 32, groups = 8, zero = 128, bits = 8;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) {
        return flipped(load(span + g * sizeof(Block) + offsetof(Block, qs)));
    }
    static Scales factors(const std::uint8_t* span) { return halves<sizeof(Block)>(span); }
};

}  // namespace SLM_NAMESPACE
