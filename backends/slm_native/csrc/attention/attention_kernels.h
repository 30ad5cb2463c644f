// Attention over pages of the KV cache: what crosses between sharing it among threads and computing it. Plain data and
// declarations only: included by all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slm {

constexpr std::size_t page_tokens = 64;

// How keys or values are stored: slm_native/kv/codecs.py, which says what the planes are. From q8_0 on, in blocks of 32.
enum class KvType { f32, f16, bf16, q8_0, q5_0, q4_0 };

constexpr std::size_t n_kv_types = 6, most_planes = 3;

// Keys or values of one layer. A plane is [n_pages][K][64][...], of each page's part `page_bytes` apart.
struct KvPlanes {
    KvType type;
    std::uint8_t* at[most_planes];        // numbers or codes; scales; fifth bits
    std::size_t head_bytes[most_planes];  // of one head of one page
};

struct KvLayer {
    KvPlanes keys, values;
    std::size_t n_pages, page_bytes, n_kv_heads, head_dim;
};

// Planes of one head of one page, or of a token in it.
struct Slice { const std::uint8_t* at[most_planes]; };

constexpr std::size_t no_span = std::size_t(1) << 32;    // more than there are positions, too
constexpr std::size_t no_window = std::size_t(1) << 32;  // more than there are positions

// What is done with scores; see Scoring in slm_native/kernels/kernelset.py. Positions are exact as float32, up to 2 ** 24.
struct Scoring {
    float scale;
    float softcap;        // 0: none
    std::size_t window;   // none: no_window
    const float* slopes;  // [H] or null
    const float* sinks;   // [H] or null
};

// Queries of one sequence, at adjacent positions, which share a head of keys and values; a row is a query and a query
// head, those of one token side by side. `many` takes keys and values from elsewhere, too, of one query head then.
struct Queries {
    const KvLayer* layer;
    const Scoring* scoring;
    const std::int32_t* pages;   // of the sequence
    const float* q;              // [T][H][key_dim]
    float* out;                  // [T][H][value_dim]
    const std::int32_t* tokens;  // which of the T they are
    std::size_t n_tokens, position, n_heads, kv_head, group;
    std::size_t first_head;      // of the query heads
    const float *keys, *values;  // [positions][key_dim] and [value_dim] in the place of those in pages; or null
    std::size_t key_dim;         // and of a row of `q`; D where keys are in pages
    std::size_t value_dim;       // and of a row of `out`, likewise
    std::size_t span;  // the first position of tokens that all see each other; no_span where each sees those up to it
    std::size_t begin, end;  // positions looked at; whole pages but for the last
};

// Softmaxes over some of the positions: for each row its largest score, its sum of weights, and D sums of values.
constexpr std::size_t partial_extra = 2;

struct AttentionKernels {
    std::size_t most_rows_few, most_rows_many;
    std::size_t (*few_work)(std::size_t n_rows, std::size_t head_dim);  // floats that `few` needs
    std::size_t (*many_work)(std::size_t n_rows, std::size_t widest);   // of head_dim, key_dim and value_dim
    // A few rows: keys and values are read as they are stored. Writes partial softmaxes [n_rows][D + 2].
    void (*few)(const Queries& queries, float* work, float* partial);
    // Many rows: pages are expanded to float32 and multiplied out of cache. Writes `out`.
    void (*many)(const Queries& queries, float* work);
    // D numbers as they are stored.
    void (*encode)(KvType type, const float* x, std::size_t head_dim, std::uint8_t* const* to);
    // D numbers that are stored, planes at one token's.
    void (*decode)(KvType type, const Slice& from, std::size_t head_dim, float* to);
};

}  // namespace slm
