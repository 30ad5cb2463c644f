// Q8_0 (ggml type 8): 32 weights of scale * quant.
//
// Declarations and plain data only: an inline function here would be compiled into files with different instruction
// sets, and the linker would keep one copy of it for all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../isa.h"

namespace slm::q8_0 {

constexpr std::size_t block_size = 32;

#pragma pack(push, 1)
struct Block {
    std::uint16_t scale;  // IEEE half precision
    std::int8_t quants[block_size];
};
#pragma pack(pop)
static_assert(sizeof(Block) == 34 && alignof(Block) == 1);

// y = x @ weights.T with float32 products and sums.
//   weights [n_out][n_blocks]  rows of blocks, at any address
//   x       [n_tokens][n_blocks * block_size]
//   y       [n_tokens][n_out]
// A sum runs over 8 lanes, each adding four products per block before the block's scale is applied: at most
// n_blocks + 9 roundings lie between a product and the result.
using Matmul = void(const Block* weights, std::size_t n_out, std::size_t n_blocks, const float* x,
                    std::size_t n_tokens, float* y);

Matmul matmul_scalar;
Matmul matmul_avx2;

Matmul* matmul_for(Isa isa);  // an available one

}  // namespace slm::q8_0
