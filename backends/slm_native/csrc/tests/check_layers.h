// Checks whole layers against a reference in double precision.
#pragma once

#include "isa.h"

namespace slm {

// Runs a prompt and single steps with every KV type on n_threads threads; prints failures to standard output.
bool check_layers(Isa isa, int n_threads);

}  // namespace slm
