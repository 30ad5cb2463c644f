// Attention and state spaces of one instruction set, in a namespace beside that of its other kernels: see simd/README.md.
#include "kernels.h"

#define SLM_NAMESPACE slm::avx512::attending
#include "simd/avx512.h"

#include "quantize.inc"
#include "rows.inc"
#include "floats.inc"
#include "tiles.inc"
#include "kv_types.inc"
#include "exponential.inc"
#include "attention.inc"
#include "states.inc"

namespace SLM_NAMESPACE {

const AttentionKernels kernels = {8, 96, few_work, many_work<OnVectors>, few, many<OnVectors>, encode, decode};

}  // namespace SLM_NAMESPACE
