// A thread pool that divides the tasks of one call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace slm {

// Runs tasks 0 .. n - 1 on the calling thread and on workers. One call owns the pool at a time. A call that finds it
// busy runs its tasks alone: callers neither wait for each other nor oversubscribe the cores. After a call, workers
// spin for a while, because the next step of a model follows within microseconds; then they sleep.
class Pool {
public:
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int n_threads() const { return n_threads_; }

    // Runs task(i) for each i in 0 .. n - 1, in any order and in parallel. Returns when all are done. Rethrows the
    // exception of a task.
    template <class Task>
    void run(std::size_t n, const Task& task) {
        run(n, [](const void* context, std::size_t i) { (*static_cast<const Task*>(context))(i); }, &task);
    }

    // The pool of n_threads threads, which all callers in this process share. After a fork, the child starts its own
    // workers in its first call. Throws std::system_error if the system refuses to create threads.
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
    static void work(State& state, unsigned seen);  // `seen`: number of finished rounds
    static void take_tasks(State& state);

    int n_threads_;
    std::unique_ptr<State> state_;
    std::vector<std::thread> workers_;  // guarded by State::taken
};

}  // namespace slm
