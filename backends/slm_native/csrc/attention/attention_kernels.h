// The interface between attention.cpp, which divides work among threads, and the attention kernels of an instruction
// set. Only plain data and declarations: all instruction sets include this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slm {

constexpr std::size_t page_tokens = 64;

// Number format of keys or values; slm_native/kv/codecs.py defines the planes. From q8_0 on, blocks have 32 values.
enum class KvType { f32, f16, bf16, q8_0, q6_0, q5_0, q4_0 };

constexpr std::size_t n_kv_types = 7, most_planes = 3;

// Keys or values of one layer. A plane is [n_pages][K][64][...]; its parts on two pages are `page_bytes` apart.
struct KvPlanes {
    KvType type;
    std::uint8_t* at[most_planes];        // numbers or codes; scales; bits above the fourth
    std::size_t head_bytes[most_planes];  // of one head of one page
};

struct KvLayer {
    KvPlanes keys, values;
    std::size_t n_pages, page_bytes, n_kv_heads, head_dim;
};

// Planes of one head of one page, or of a token in it.
struct Slice { const std::uint8_t* at[most_planes]; };

constexpr std::size_t no_block = std::size_t(1) << 32;   // more than the number of positions
constexpr std::size_t no_window = std::size_t(1) << 32;  // more than the number of positions

// Factor and mask of scores; see Scoring in slm_native/kernels/parameters.py. Positions up to 2 ** 24 are exact in
// float32.
struct Scoring {
    float scale;
    float softcap;        // 0: none
    std::size_t window;   // none: no_window
    const float* slopes;  // [H] or null
    const float* sinks;   // [H] or null
};

// Queries of one sequence, at adjacent positions, that share a KV head. A row is one query head of one query; the rows
// of one token are adjacent. Only `many` accepts expanded keys and values, of one query head.
struct Queries {
    const KvLayer* layer;
    const Scoring* scoring;
    const std::int32_t* pages;   // of the sequence
    const float* q;              // [T][H][key_dim]
    float* out;                  // [T][H][value_dim]
    const std::int32_t* tokens;  // indices in the batch
    std::size_t n_tokens, position, n_heads, kv_head, group;
    std::size_t first_head;      // first query head
    const float *keys, *values;  // expanded [positions][key_dim] and [value_dim], in place of pages; or null
    std::size_t key_dim;         // also the width of a row of `q`; D if keys are on pages
    std::size_t value_dim;       // also the width of a row of `out`; D if values are on pages
    std::size_t block_begin;     // first position of the bidirectional block; no_block if attention is causal
    std::size_t begin, end;      // positions to attend to; whole pages except the last
};

// The partial softmax of a row: its largest score, the sum of its weights, D weighted sums of values.
constexpr std::size_t partial_extra = 2;

struct AttentionKernels {
    std::size_t most_rows_few, most_rows_many;
    std::size_t (*few_work)(std::size_t n_rows, std::size_t head_dim);  // floats that `few` needs
    std::size_t (*many_work)(std::size_t n_rows, std::size_t widest);   // of head_dim, key_dim and value_dim
    // Few rows: reads keys and values as they are stored. Writes partial softmaxes [n_rows][D + 2].
    void (*few)(const Queries& queries, float* work, float* partial);
    // Many rows: dequantizes pages to float32 in cache, then multiplies. Writes `out`.
    void (*many)(const Queries& queries, float* work);
    // Stores D numbers in this type.
    void (*encode)(KvType type, const float* x, std::size_t head_dim, std::uint8_t* const* to);
    // Loads D stored numbers of one token.
    void (*decode)(KvType type, const Slice& from, std::size_t head_dim, float* to);
};

}  // namespace slm
