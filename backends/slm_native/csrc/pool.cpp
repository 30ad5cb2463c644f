#include "pool.h"

#include <pthread.h>

#include <chrono>
#include <exception>
#include <map>
#include <new>
#include <system_error>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace slm {

namespace {

constexpr auto spin_time = std::chrono::microseconds(100);
constexpr int polls_a_clock = 64;  // polls of the flag for each read of the clock

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

struct Pool::State {
    std::atomic<bool> taken{false};
    // The running call: written before `round` is incremented, read after it.
    Call call = nullptr;
    const void* context = nullptr;
    std::size_t n = 0;
    alignas(64) std::atomic<std::size_t> next{0};  // the next task to take
    alignas(64) std::atomic<unsigned> round{0};    // incremented by each call
    alignas(64) std::atomic<int> n_working{0};     // workers that have not finished this round
    std::atomic<int> n_asleep{0};
    std::atomic<bool> stopping{false};
    std::mutex mutex;
    std::condition_variable wake;
    std::exception_ptr error;  // the first exception of this call's tasks; guarded by `mutex`
};

Pool::Pool(int n_threads) : n_threads_(n_threads), state_(new State) {
    try {
        start_workers();
    } catch (const std::system_error&) {
        stop_workers();
        throw;
    }
}

Pool::~Pool() { stop_workers(); }

void Pool::start_workers() {
    while (int(workers_.size()) < n_threads_ - 1)
        workers_.emplace_back([state = state_.get(), round = state_->round.load()] { work(*state, round); });
}

void Pool::stop_workers() {
    {
        std::lock_guard lock(state_->mutex);
        state_->stopping = true;
    }
    state_->wake.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
}

void Pool::forget_workers() {
    for (std::thread& worker : workers_) worker.detach();
    workers_.clear();
    // The state is leaked: a locked mutex that nobody will unlock must not be destroyed.
    [[maybe_unused]] const State* leaked = state_.release();
    state_.reset(new State);
}

void Pool::run(std::size_t n, Call call, const void* context) {
    State& state = *state_;
    if (n < 2 || n_threads_ < 2 || state.taken.exchange(true, std::memory_order_acquire)) {
        for (std::size_t i = 0; i < n; ++i) call(context, i);
        return;
    }
    if (workers_.empty()) start_after_fork();
    state.call = call, state.context = context, state.n = n;
    state.next.store(0, std::memory_order_relaxed);
    state.n_working.store(int(workers_.size()), std::memory_order_relaxed);
    state.round.fetch_add(1, std::memory_order_seq_cst);
    if (state.n_asleep.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard lock(state.mutex);
        state.wake.notify_all();
    }
    take_tasks(state);
    for (int polls = 0; state.n_working.load(std::memory_order_acquire) > 0; ++polls) {
        relax();
        if (polls > 1 << 14) std::this_thread::yield();  // let a worker without a core run
    }
    const std::exception_ptr error = std::exchange(state.error, nullptr);
    state.taken.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
}

// If the system refuses to create threads, the child runs with fewer.
void Pool::start_after_fork() {
    try {
        start_workers();
    } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
    }
}

void Pool::take_tasks(State& state) {
    for (std::size_t i; (i = state.next.fetch_add(1, std::memory_order_relaxed)) < state.n;) try {
            state.call(state.context, i);
        } catch (...) {  // e.g. bad_alloc: an exception that leaves the worker's function would terminate the process
            std::lock_guard lock(state.mutex);
            if (!state.error) state.error = std::current_exception();
        }
}

void Pool::work(State& state, unsigned seen) {
    for (;;) {
        auto until = std::chrono::steady_clock::now() + spin_time;
        for (int polls = 1; state.round.load(std::memory_order_acquire) == seen; ++polls) {
            relax();
            if (polls % polls_a_clock || std::chrono::steady_clock::now() < until) continue;
            std::unique_lock lock(state.mutex);
            state.n_asleep.fetch_add(1, std::memory_order_seq_cst);
            state.wake.wait(lock, [&] { return state.stopping || state.round.load() != seen; });
            state.n_asleep.fetch_sub(1, std::memory_order_relaxed);
            if (state.stopping) return;
        }
        ++seen;
        take_tasks(state);
        state.n_working.fetch_sub(1, std::memory_order_acq_rel);
    }
}

namespace {

struct Pools {
    std::mutex mutex;
    std::map<int, std::weak_ptr<Pool>> by_size;
};

// Never destroyed: the last pool may be released after the end of main.
Pools& pools() {
    static Pools& all = *new Pools;
    return all;
}

}  // namespace

// A forked child has one thread, which leaves the fork handlers with the lock on all pools. Here the pools get fresh
// states.
void Pool::forget_all_workers() {
    for (auto& [size, known] : pools().by_size)
        if (const std::shared_ptr<Pool> pool = known.lock()) pool->forget_workers();
    pools().mutex.unlock();
}

std::shared_ptr<Pool> Pool::shared(int n_threads) {
    static const int prepared =
        pthread_atfork([] { pools().mutex.lock(); }, [] { pools().mutex.unlock(); }, forget_all_workers);
    if (prepared != 0) throw std::bad_alloc();
    std::lock_guard lock(pools().mutex);
    std::weak_ptr<Pool>& known = pools().by_size[n_threads];
    std::shared_ptr<Pool> pool = known.lock();
    if (!pool) known = pool = std::shared_ptr<Pool>(new Pool(n_threads));
    return pool;
}

}  // namespace slm
