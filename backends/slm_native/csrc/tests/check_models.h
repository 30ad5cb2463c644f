// Models of a few layers with random weights, which between them have whatever a layer can have.
#pragma once

#include <memory>
#include <vector>

#include "tests/reference_layers.h"

namespace slm {

struct NamedModel {
    const char* name;
    std::unique_ptr<Model> model;
    bool rounds;  // keys and values may be rounded: results do not jump then, and differ by not much more
};

std::vector<NamedModel> models_of(const IsaKernels& kernels);

std::vector<float> random_floats(std::size_t n, unsigned seed, float scale);

}  // namespace slm
