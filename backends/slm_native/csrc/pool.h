// A pool of threads that share the tasks of one call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace slm {

// Runs tasks 0 .. n - 1 on the calling thread and the pool's own. One call has the pool at a time; a call that finds
// it taken runs its tasks alone, so that two callers neither wait for each other nor crowd the cores. Workers spin for
// a while after each call, as the next step of a model follows within microseconds, and then sleep.
class Pool {
public:
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int n_threads() const { return n_threads_; }

    // `task(i)` for each i in 0 .. n - 1, in any order, several at once; returns when all are done, or throws
    // what one of them threw.
    template <class Task>
    void run(std::size_t n, const Task& task) {
        run(n, [](const void* context, std::size_t i) { (*static_cast<const Task*>(context))(i); }, &task);
    }

    // The pool that everybody in this process shares who computes with so many threads. A forked child's has threads of
    // its own from its first call on. Throws std::system_error where the system gives no more threads.
    static std::shared_ptr<Pool> shared(int n_threads);

private:
    using Call = void (*)(const void* context, std::size_t i);

    struct State;

    explicit Pool(int n_threads);
    void run(std::size_t n, Call call, const void* context);
    void start_workers();
    void stop_workers();
    void start_after_fork();
    void forget_workers();
    static void forget_all_workers();
    static void work(State& state, unsigned seen);  // `seen` rounds are over
    static void take_tasks(State& state);

    int n_threads_;
    std::unique_ptr<State> state_;
    std::vector<std::thread> workers_;  // of whoever has taken the pool
};

}  // namespace slm
