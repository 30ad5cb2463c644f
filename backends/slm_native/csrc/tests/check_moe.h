// Layers of experts against a plain computation in double precision.
#pragma once

#include "isa.h"

namespace slm {

// One token and many, of floats and of packed weights, on so many threads; says what is wrong on standard output.
bool check_mixtures(Isa isa, int n_threads);

}  // namespace slm
