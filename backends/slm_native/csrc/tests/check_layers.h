// Whole layers against a plain computation in double precision.
#pragma once

#include "isa.h"

namespace slm {

// Every KV type, a prompt and steps after it, on so many threads; says what is wrong on standard output.
bool check_layers(Isa isa, int n_threads);

}  // namespace slm
