// Checks of the thread pool.
#pragma once

namespace slm {

// Whether every task runs once, all threads take part, and the exception of a task reaches the caller.
bool check_pool(int n_threads);

}  // namespace slm
