// Checks MoE layers against a reference in double precision.
#pragma once

#include "isa.h"

namespace slm {

// Runs one token and many, with float and quantized weights, on n_threads threads; prints failures to standard output.
bool check_moe(Isa isa, int n_threads);

}  // namespace slm
