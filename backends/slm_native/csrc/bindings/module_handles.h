// Python bindings of handles.
#pragma once

#include "bindings/handles.h"

namespace slm::python { void bind_handles(nb::module_& module); }  // namespace slm::python
