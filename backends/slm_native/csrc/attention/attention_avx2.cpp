// Attention and recurrent kernels of one instruction set, in its namespace; see simd/README.md.
#include "kernels.h"

#define SLM_NAMESPACE slm::avx2::attending
#include "simd/avx2.h"

#include "matmul/quantize.inc"
#include "matmul/rows.inc"
#include "matmul/floats.inc"
#include "matmul/tiles.inc"
#include "attention/kv_types.inc"
#include "simd/exponential.inc"
#include "attention/attention.inc"
#include "layers/recurrent.inc"

namespace SLM_NAMESPACE {

const AttentionKernels kernels = {8, 192, few_work, many_work<OnVectors>, few, many<OnVectors>, encode, decode};

}  // namespace SLM_NAMESPACE
