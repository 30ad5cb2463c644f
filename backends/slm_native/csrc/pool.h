// A thread pool that divides the tasks of one call.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace slm {

// The time that workers saved in recent calls, minus the time that they cost. After a loss, calls run without workers
// for a while; each loss that soon follows another makes this time four times as long. One long delay after calls that
// saved time is no loss: idle machines have such delays, too, when the system moves a thread or the host of a virtual
// machine takes a core for a moment.
class WorkerBalance {
public:
    using Time = std::chrono::steady_clock::time_point;
    using Duration = std::chrono::steady_clock::duration;

    // Whether a call that begins now runs without workers.
    bool is_alone(Time begin) const { return begin < alone_until_; }

    // Notes a call with workers, and the time that it would have taken without them.
    void note(Time begin, Time end, Duration alone);

private:
    Time alone_until_{};
    Duration saved_{0}, rest_{0};
};

// Runs tasks 0 .. n - 1 on the calling thread and on workers. One call owns the pool at a time. A call that finds it
// busy runs its tasks alone: callers neither wait for each other nor oversubscribe the cores. After a call, workers
// spin for a while, because the next step of a model follows within microseconds; then they sleep.
//
// On a busy machine the system takes the core from a worker for milliseconds. So the caller waits only for workers that
// are running a task; it spins briefly, then sleeps, which leaves its core to the worker. If workers cost more time
// than they saved, the next calls run alone for a while; see WorkerBalance.
class Pool {
public:
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int n_threads() const { return n_threads_; }

    // Runs task(i) for each i in 0 .. n - 1, in any order and in parallel. Returns when all are done. Rethrows the
    // exception of a task. Sleeping workers are woken at once, or, if all tasks together are `short_work`, only if the
    // first task shows that they take longer than waking a worker.
    template <class Task>
    void run(std::size_t n, const Task& task, bool short_work = false) {
        run(n, [](const void* context, std::size_t i) { (*static_cast<const Task*>(context))(i); }, &task, short_work);
    }

    // The pool of n_threads threads, which all callers in this process share. After a fork, the child starts its own
    // workers in its first call. Throws std::system_error if the system refuses to create threads.
    static std::shared_ptr<Pool> shared(int n_threads);

private:
    using Call = void (*)(const void* context, std::size_t i);

    using Time = WorkerBalance::Time;
    using Duration = WorkerBalance::Duration;
    struct State;
    // The time to wake workers, and the mean time of a task that the caller ran: 0 if it ran none.
    struct CallerTasks { Duration waking, mean; };

    explicit Pool(int n_threads);
    void run(std::size_t n, Call call, const void* context, bool short_work);
    void start_workers();
    void stop_workers();
    void start_after_fork();
    void forget_workers();
    static void forget_all_workers();
    static void work(State& state, std::uint64_t seen);  // `seen`: number of finished rounds
    static bool enter(State& state, std::uint64_t round);
    static void leave(State& state);
    static bool take_task(State& state);
    static Duration wake_workers(State& state);
    static CallerTasks run_caller_tasks(State& state, Time begin, bool short_work);
    static void wait_for_workers(State& state);

    int n_threads_;
    std::unique_ptr<State> state_;
    std::vector<std::thread> workers_;  // guarded by State::taken
};

}  // namespace slm
