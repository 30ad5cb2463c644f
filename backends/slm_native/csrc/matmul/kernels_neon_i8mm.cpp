// NEON with i8mm: products of panels with many rows of activations, two rows by two rows per instruction.
#include "kernels.h"

#define SLM_NAMESPACE slm::neon_i8mm
#include "simd/neon_i8mm.h"

#include "formats/all.h"
#include "matmul/quantize.inc"
#include "matmul/rows.inc"
#include "matmul/pairs.inc"
#include "matmul/tiles.inc"

namespace SLM_NAMESPACE {

decltype(FormatKernels::tiles) tiles_of(int type) {
#define SLM_CASE(F) \
    if (type == F::type) return tiles<PanelKind<F::groups, F::has_min, wide<F>, together<F::bits>>>;
    SLM_FORMATS(SLM_CASE)
#undef SLM_CASE
    return nullptr;
}

}  // namespace SLM_NAMESPACE
