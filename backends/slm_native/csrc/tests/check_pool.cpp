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

// Each task waits until all tasks have begun, so each needs its own thread. The pool is new: no earlier call was
// delayed.
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

// A call with 1 ms of tasks on two threads that waits `delay` for a worker. Returns whether it ran with workers.
bool call_at(WorkerBalance& balance, WorkerBalance::Time& now, std::chrono::microseconds delay) {
    const std::chrono::microseconds alone(1000);
    const auto begin = now;
    const bool with_workers = !balance.is_alone(begin);
    now += with_workers ? alone / 2 + delay : alone;
    if (with_workers) balance.note(begin, now, alone);
    return with_workers;
}

int n_with_workers(int n_calls, int calls_per_delay, std::chrono::microseconds delay) {
    WorkerBalance balance;
    WorkerBalance::Time now = std::chrono::steady_clock::now();
    int n_with = 0;
    for (int i = 0; i < n_calls; ++i)
        n_with += call_at(balance, now, i % calls_per_delay ? std::chrono::microseconds(0) : delay);
    return n_with;
}

// Occasional delays do not matter, even if they are long compared with their call. If most calls are delayed, because
// other programs use the core, calls run without workers.
bool workers_rest_if_they_cost_more_than_they_save() {
    using std::chrono::milliseconds;
    WorkerBalance balance;
    WorkerBalance::Time now = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) call_at(balance, now, milliseconds(0));
    if (n_with_workers(1000, 20, milliseconds(1)) != 1000 || n_with_workers(1000, 1000, milliseconds(1)) != 1000)
        return fail("workers rest, though they save ten times the time that they cost");
    if (!call_at(balance, now, milliseconds(4)) || !call_at(balance, now, milliseconds(0)))
        return fail("one delay outweighs many calls without");
    if (n_with_workers(1000, 1, milliseconds(3)) > 20)
        return fail("workers go on, though they cost more than they save");
    int n_delayed = 0;
    while (call_at(balance, now, milliseconds(4))) ++n_delayed;
    if (n_delayed > 4) return fail("a machine that gets busy is not noticed");
    now += milliseconds(11);
    if (!call_at(balance, now, milliseconds(0))) return fail("the first rest takes longer than 10 ms");
    return true;
}

}  // namespace

bool check_pool(int n_threads) {
    if (!workers_rest_if_they_cost_more_than_they_save()) return false;
    const auto pool = Pool::shared(n_threads);
    return all_threads_take_part(*pool) && every_task_runs_once(*pool) && an_exception_reaches_the_caller(*pool);
}

}  // namespace slm
