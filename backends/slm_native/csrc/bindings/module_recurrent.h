// Python bindings of recurrent layers.
#pragma once

#include "bindings/handles.h"

namespace slm::python { void bind_recurrent(nb::module_& module); }  // namespace slm::python
