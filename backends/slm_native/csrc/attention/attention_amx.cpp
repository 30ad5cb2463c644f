// Attention for AVX-512 with a matrix unit, which computes many rows.
#include "kernels.h"

#if defined(SLM_PLAIN_TILES)
#define SLM_NAMESPACE slm::amx_plain::attending
#else
#define SLM_NAMESPACE slm::amx::attending
#endif
#include "simd/avx512.h"

#include "matmul/tile_unit.h"
#include "matmul/quantize.inc"
#include "matmul/rows.inc"
#include "matmul/floats.inc"
#include "matmul/tiles.inc"
#include "attention/kv_types.inc"
#include "simd/exponential.inc"
#include "attention/attention.inc"
#include "attention/attention_tiles.inc"

namespace SLM_NAMESPACE {

namespace {

// Keys or values in float32 keep their precision: vectors multiply them.
void many_on_either(const Queries& queries, float* work) {
    const KvLayer& layer = *queries.layer;
    const bool is_exact = layer.keys.type == KvType::f32 || layer.values.type == KvType::f32;
    return is_exact ? many<OnVectors>(queries, work) : many<OnTiles>(queries, work);
}

constexpr std::size_t most_rows = 128;

}  // namespace

const AttentionKernels kernels = {8, most_rows, few_work, many_work<OnTiles>, few, many_on_either, encode, decode};

}  // namespace SLM_NAMESPACE
