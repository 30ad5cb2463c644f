// Attention and the KV cache, shared among threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace slm {

// Bytes of a token of one head in each plane, 0 where there is no such plane.
void token_bytes(KvType type, std::size_t head_dim, std::size_t (&bytes)[most_planes]);

// Which of the layers that share a page, and its sizes.
struct KvPlace { std::size_t n_layers, layer, n_kv_heads, head_dim; };

// A layer of pages [n_pages][page_bytes] as slm_native/kv/store.py lays them out; where `in_keys`, keys are the values, too.
// Throws std::invalid_argument where the sizes do not make a page.
KvLayer layer_of(std::uint8_t* pages, std::size_t n_pages, std::size_t page_bytes, KvType keys, KvType values,
                 bool in_keys, const KvPlace& place);

// The queries of one sequence; see Run in slm_native/kv/cache.py.
struct Run {
    const std::int32_t *tokens, *pages;
    std::size_t n_tokens, n_held;
    bool both_ways = false;
};

// out[t] = attention of q[t], both [T][H][D]; H is a multiple of the layer's heads.
void attend(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, const std::vector<Run>& runs,
            const Scoring& scoring, std::size_t n_heads, const float* q, float* out);

// What some query heads of one sequence have of their own: values, and keys or null, [n_heads][held tokens][width].
struct OwnHeads {
    const float *keys, *values;
    std::size_t first_head, n_heads, key_width, value_width;
};

// The same for one sequence with these heads' own: their rows of out [T][H][value_width], of q [T][H][D or key_width].
void attend_with(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, const Run& run, const Scoring& scoring,
                 std::size_t n_heads, const float* q, const OwnHeads& own, float* out);

// The key [D] at a position of a sequence, of one of the layer's heads.
void read(const IsaKernels& kernels, const KvLayer& layer, const std::int32_t* pages, std::size_t position,
          std::size_t head, float* to);

// Stores keys and values [T][K][D] of T tokens in their pages and slots.
void write(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, std::size_t n_tokens, const std::int64_t* pages,
           const std::int64_t* slots, const float* k, const float* v);

}  // namespace slm
