// Attention and the KV cache, with work divided among threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace slm {

// Bytes per plane for one head of one token; 0 for planes that the type does not have.
void token_bytes(KvType type, std::size_t head_dim, std::size_t (&bytes)[most_planes]);

// The index and sizes of a layer on pages of several layers.
struct KvLayout { std::size_t n_layers, layer, n_kv_heads, head_dim; };

// A layer of pages [n_pages][page_bytes], in the layout of slm_native/kv/store.py. With `in_keys`, the values are the
// keys. Throws std::invalid_argument if the sizes do not add up to a page.
KvLayer layer_of(std::uint8_t* pages, std::size_t n_pages, std::size_t page_bytes, KvType keys, KvType values,
                 bool in_keys, const KvLayout& layout);

// The queries of one sequence; see Run in slm_native/kv/plan.py.
struct Run {
    const std::int32_t *tokens, *pages;
    std::size_t n_tokens, n_held;
    bool bidirectional = false;
};

// out[t] = attention of q[t], both [T][H][D]; H is a multiple of the layer's KV heads.
void attend(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, const std::vector<Run>& runs,
            const Scoring& scoring, std::size_t n_heads, const float* q, float* out);

// Values, and keys or null, that were expanded from latents for some query heads of one sequence:
// [n_heads][held tokens][width].
struct ExpandedHeads {
    const float *keys, *values;
    std::size_t first_head, n_heads, key_width, value_width;
};

// Attention of some heads of one sequence with expanded keys or values: q is [T][H][D or key_width], out
// [T][H][value_width].
void attend_expanded(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, const Run& run,
                     const Scoring& scoring, std::size_t n_heads, const float* q, const ExpandedHeads& expanded,
                     float* out);

// Reads the key [D] of one KV head at a position of a sequence.
void read(const IsaKernels& kernels, const KvLayer& layer, const std::int32_t* pages, std::size_t position,
          std::size_t head, float* to);

// Writes keys and values [T][K][D] of T tokens to their pages and slots.
void write(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, std::size_t n_tokens, const std::int64_t* pages,
           const std::int64_t* slots, const float* k, const float* v);

}  // namespace slm
