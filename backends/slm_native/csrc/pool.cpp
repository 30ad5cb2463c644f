#include "pool.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <algorithm>
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

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr auto worker_spin = microseconds(100);  // before a worker sleeps
constexpr auto caller_spin = microseconds(200);  // before a caller that waits for workers sleeps
constexpr auto waking_pays = microseconds(20);   // waking a worker takes 5 to 10 us
// On a busy machine the system takes a core from a worker for one to four milliseconds. A balance below -most_lost is a
// loss. Savings are capped at most_saved, so that a few such delays use them up.
constexpr WorkerBalance::Duration most_lost = milliseconds(1), most_saved = milliseconds(10);
constexpr WorkerBalance::Duration least_rest = milliseconds(10), longest_rest = milliseconds(640);
constexpr int polls_per_clock = 64;  // polls of a flag per read of the clock

// `gate`: the round, whether workers may enter it, and the number of workers in it.
constexpr std::uint64_t one_round = 1 << 17, open = 1 << 16, inside = open - 1;

std::uint64_t round_of(std::uint64_t gate) { return gate / one_round; }

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void WorkerBalance::note(Time begin, Time end, Duration alone) {
    saved_ = std::min(saved_ + alone - (end - begin), most_saved);
    if (saved_ >= -most_lost) return;
    const bool again = begin - alone_until_ < rest_;
    rest_ = again ? std::min(4 * rest_, longest_rest) : least_rest;
    alone_until_ = end + rest_;
    saved_ = {};
}

struct Pool::State {
    std::atomic<bool> taken{false};
    // The running call: written before the gate opens, read by workers inside.
    Call call = nullptr;
    const void* context = nullptr;
    std::size_t n = 0;
    alignas(64) std::atomic<std::size_t> next{0};  // the next task to take
    alignas(64) std::atomic<std::uint64_t> gate{0};
    alignas(64) std::atomic<int> n_asleep{0};  // workers
    std::atomic<bool> caller_asleep{false};
    std::atomic<bool> stopping{false};
    std::mutex mutex;
    std::condition_variable wake, all_left;
    std::exception_ptr error;  // the first exception of this call's tasks; guarded by `mutex`
    WorkerBalance balance;     // of the thread that has `taken` the pool
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
        workers_.emplace_back([state = state_.get(), round = round_of(state_->gate.load())] { work(*state, round); });
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

void Pool::run(std::size_t n, Call call, const void* context, bool short_work) {
    State& state = *state_;
    const auto run_alone = [&] {
        for (std::size_t i = 0; i < n; ++i) call(context, i);
    };
    if (n < 2 || n_threads_ < 2 || state.taken.exchange(true, std::memory_order_acquire)) return run_alone();
    const Time begin = Clock::now();
    if (state.balance.is_alone(begin)) {
        state.taken.store(false, std::memory_order_release);
        return run_alone();
    }
    if (workers_.empty()) start_after_fork();
    state.call = call, state.context = context, state.n = n;
    state.next.store(0, std::memory_order_relaxed);
    const std::uint64_t round = round_of(state.gate.load(std::memory_order_relaxed)) + 1;
    state.gate.store(round * one_round | open, std::memory_order_seq_cst);
    const CallerTasks caller = run_caller_tasks(state, begin, short_work);
    if (state.gate.fetch_and(~open, std::memory_order_acq_rel) & inside) wait_for_workers(state);
    const Time end = Clock::now();
    // If workers took all tasks, most likely one ran on the caller's core. Then they cost the time of waking them.
    const Duration alone = caller.mean.count() ? caller.mean * std::int64_t(n) : end - begin - caller.waking;
    state.balance.note(begin, end, alone);
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

// Returns the time that it took.
Pool::Duration Pool::wake_workers(State& state) {
    if (state.n_asleep.exchange(0, std::memory_order_seq_cst) == 0) return {};
    const Time begin = Clock::now();
    {
        std::lock_guard lock(state.mutex);
        state.wake.notify_all();
    }
    return Clock::now() - begin;
}

Pool::CallerTasks Pool::run_caller_tasks(State& state, Time begin, bool short_work) {
    Duration waking = short_work ? Duration{} : wake_workers(state);
    std::size_t n_run = 0;
    while (take_task(state))
        if (++n_run == 1 && short_work && state.n_asleep.load(std::memory_order_relaxed)) {
            const std::size_t n_taken = std::min(state.next.load(std::memory_order_relaxed), state.n);
            if ((Clock::now() - begin) * (state.n - n_taken) > waking_pays) waking = wake_workers(state);
        }
    const Duration mean = n_run ? (Clock::now() - begin - waking) / std::int64_t(n_run) : Duration{};
    return {waking, mean};
}

bool Pool::take_task(State& state) {
    const std::size_t i = state.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= state.n) return false;
    try {
        state.call(state.context, i);
    } catch (...) {  // e.g. bad_alloc: an exception that leaves the worker's function would terminate the process
        std::lock_guard lock(state.mutex);
        if (!state.error) state.error = std::current_exception();
    }
    return true;
}

void Pool::wait_for_workers(State& state) {
    const auto working = [&state] { return (state.gate.load(std::memory_order_seq_cst) & inside) != 0; };
    const auto begin = Clock::now();
    for (int polls = 1; working(); ++polls) {
        relax();
        if (polls % polls_per_clock || Clock::now() - begin < caller_spin) continue;
        std::unique_lock lock(state.mutex);
        state.caller_asleep.store(true, std::memory_order_seq_cst);
        state.all_left.wait(lock, [&] { return !working(); });
        state.caller_asleep.store(false, std::memory_order_relaxed);
    }
}

void Pool::work(State& state, std::uint64_t seen) {
    for (;;) {
        const auto next_round = [&] { return round_of(state.gate.load(std::memory_order_seq_cst)) != seen; };
        const auto until = Clock::now() + worker_spin;
        for (int polls = 1; !next_round(); ++polls) {
            relax();
            if (polls % polls_per_clock || Clock::now() < until) continue;
            std::unique_lock lock(state.mutex);
            state.n_asleep.fetch_add(1, std::memory_order_seq_cst);
            state.wake.wait(lock, [&] { return state.stopping || next_round(); });
            if (state.stopping) return;
        }
        seen = round_of(state.gate.load(std::memory_order_acquire));
        if (!enter(state, seen)) continue;
        while (take_task(state)) {}
        leave(state);
    }
}

// Adds this worker to those inside, unless the round is over.
bool Pool::enter(State& state, std::uint64_t round) {
    std::uint64_t gate = state.gate.load(std::memory_order_relaxed);
    while (round_of(gate) == round && gate & open)
        if (state.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
    return false;
}

void Pool::leave(State& state) {
    const std::uint64_t gate = state.gate.fetch_sub(1, std::memory_order_seq_cst);
    if ((gate & inside) > 1 || !state.caller_asleep.load(std::memory_order_seq_cst)) return;
    std::lock_guard lock(state.mutex);
    state.all_left.notify_one();
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
#if !defined(_WIN32)  // Windows has no fork
    static const int prepared =
        pthread_atfork([] { pools().mutex.lock(); }, [] { pools().mutex.unlock(); }, forget_all_workers);
    if (prepared != 0) throw std::bad_alloc();
#endif
    std::lock_guard lock(pools().mutex);
    std::weak_ptr<Pool>& known = pools().by_size[n_threads];
    std::shared_ptr<Pool> pool = known.lock();
    if (!pool) known = pool = std::shared_ptr<Pool>(new Pool(n_threads));
    return pool;
}

}  // namespace slm
