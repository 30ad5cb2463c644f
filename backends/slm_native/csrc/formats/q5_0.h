// Q5_0: 32 weights of scale * (q - 16); nibbles as in Q4_0, the fifth bits in a word.
#pragma once

namespace SLM_NAMESPACE {

// The codes of a block of Q5_0 or Q5_1.
template <class Block>
inline Codes five_bits(const Block* block) {
    return either(nibbles(block->qs), flags<16>(read32(block->qh)));
}

struct Q5_0 {
    using Block = BlockQ5_0;
    static constexpr int type = 6, block = 32, groups = 8, zero = 16, bits = 5;
    static constexpr bool has_min = false;

    static Codes codes(const std::uint8_t* span, int g) { return five_bits(reinterpret_cast<const Block*>(span) + g); }
    static Scales factors(const std::uint8_t* span) { return halves<sizeof(Block)>(span); }
};

}  // namespace SLM_NAMESPACE
