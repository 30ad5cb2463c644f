// The kernels of one instruction set: see simd/README.md.
#include "kernels.h"

#define SLM_NAMESPACE slm::scalar
#include "simd/scalar.h"

#include "formats/all.h"
#include "quantize.inc"
#include "rows.inc"
#include "floats.inc"
#include "float_rows.inc"
#include "dequantize.inc"
#include "exponential.inc"
#include "steps.inc"
#include "groups.inc"
#include "tiles.inc"
#include "table.inc"
