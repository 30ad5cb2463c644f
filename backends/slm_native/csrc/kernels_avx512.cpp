// The kernels of one instruction set: see simd/README.md.
#include "kernels.h"

#define SLM_NAMESPACE slm::avx512
#include "simd/avx512.h"

#include "formats/all.h"
#include "formats/chunks_avx512.h"
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
