#include "tests/check_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pool.h"

namespace slm {

namespace {

constexpr int n_rounds = 3000;

bool fail(const char* what) {
    std::fprintf(stderr, "pool: %s\n", what);
    return false;
}

// Each task waits until all have begun, so they need a thread each. The pool is new: no earlier call was delayed.
bool all_threads_take_part(Pool& pool) {
    const int n_threads = pool.n_threads();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // most likely the workers sleep, and have to be woken
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    std::atomic<int> n_begun{0}, n_met{0};
    pool.run(std::size_t(n_threads), [&](std::size_t) {
        ++n_begun;
        while (n_begun < n_threads && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
        n_met += n_begun == n_threads;
    });
    return n_met == n_threads || fail("a thread ran no task");
}

bool every_task_runs_once(Pool& pool) {
    for (int round = 0; round < n_rounds; ++round) {
        std::vector<int> n_runs(1 + std::size_t(round) % 37);
        // A pause now and then, so that workers fall asleep.
        if (round % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        pool.run(n_runs.size(), [&](std::size_t i) { ++n_runs[i]; }, round % 3 == 0);
        if (std::any_of(n_runs.begin(), n_runs.end(), [](int n) { return n != 1; }))
            return fail("a task did not run once");
    }
    return true;
}

bool an_exception_reaches_the_caller(Pool& pool) {
    try {
        pool.run(20, [](std::size_t i) {
            if (i == 7) throw std::runtime_error("task 7");
        });
    } catch (const std::runtime_error&) {
        return true;
    }
    return fail("an exception was lost");
}

}  // namespace

bool check_pool(int n_threads) {
    const auto pool = Pool::shared(n_threads);
    return all_threads_take_part(*pool) && every_task_runs_once(*pool) && an_exception_reaches_the_caller(*pool);
}

}  // namespace slm
