// Python bindings of layers with a state.
#pragma once

#include "bindings/handles.h"

namespace slm::python { void bind_states(nb::module_& module); }  // namespace slm::python
