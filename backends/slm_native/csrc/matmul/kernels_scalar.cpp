// The kernels of one instruction set: see simd/README.md.
#include "kernels.h"

#define SLM_NAMESPACE slm::scalar
#include "simd/scalar.h"

#include "formats/all.h"
#include "matmul/quantize.inc"
#include "matmul/rows.inc"
#include "matmul/floats.inc"
#include "matmul/float_rows.inc"
#include "matmul/dequantize.inc"
#include "simd/exponential.inc"
#include "layers/steps.inc"
#include "matmul/groups.inc"
#include "matmul/tiles.inc"
#include "matmul/table.inc"
