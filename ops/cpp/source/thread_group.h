// The threads that compute one step together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace penstock {

// Before a waiting thread sleeps: milliseconds, of which it offers most to others. Whoever takes a thread's core for a
// moment (the event loop, a client on the same machine) gives it back sooner than a sleeper is woken, and between two
// kernels that would happen many times a step.
constexpr int SPINS = 40000;

// Between offers of the core to others, 50 to 200 ns. Without them a thread would look, for as long as the system lets
// it, for what another cannot do that waits for this very core: the rest of the group, the loop, or a client.
constexpr int SPINS_PER_YIELD = 4;

// Between one look and the next of a thread that has looked so many times.
inline void pause(int spins) {
    if (spins % SPINS_PER_YIELD == SPINS_PER_YIELD - 1) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// How much of one thread's share of some work is taken. Two, used by turns: one is made ready while the other is in use.
struct Taken {
    alignas(64) std::atomic<int64_t> count[2]{0, 0};
};

// What the threads of a group share.
struct GroupState {
    explicit GroupState(int size) : taken(size) {}

    std::vector<Taken> taken;
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int32_t> arrived{0};
    alignas(64) std::atomic<uint32_t> round{0};
};

// One thread's view of its group. Work is taken: a thread whose core is busy elsewhere does less of it, also of what is
// its own at first.
class ThreadGroup {
public:
    ThreadGroup(int rank, int size, GroupState& state)
        : rank(rank), size(size), state_(state), round_(state.round.load(std::memory_order_acquire)) {}

    const int rank;
    const int size;

    // The first of `count` tasks that nobody has taken since the last barrier; beyond the last one, stop.
    int64_t take(int64_t count = 1) { return state_.next.fetch_add(count, std::memory_order_relaxed); }

    // Calls work(i) for every i below `count`, each on one thread: what this thread gets first is always the same part
    // of them, so that it finds in its cache what it wrote there; then it takes from others. Once between two barriers.
    template <class Work>
    void share(int64_t count, const Work& work) {
        for (int turn = 0; turn < size; turn++) {
            const int owner = (rank + turn) % size;
            const int64_t begin = (count * owner + size - 1) / size, end = (count * (owner + 1) + size - 1) / size;
            std::atomic<int64_t>& taken = state_.taken[owner].count[round_ & 1];
            while (true) {
                const int64_t left = end - begin - taken.load(std::memory_order_relaxed);
                const int64_t portion = std::clamp<int64_t>(left / 8, 1, PORTION);  // few at the end: others wait for it
                const int64_t first = begin + taken.fetch_add(portion, std::memory_order_relaxed);
                if (first >= end) break;
                for (int64_t i = first; i < std::min(first + portion, end); i++) work(i);
            }
        }
    }

    // Wait for all threads; afterwards tasks are counted from 0 again, and all see what all have written.
    void barrier() {
        state_.taken[rank].count[++round_ & 1].store(0, std::memory_order_relaxed);  // not in use since the last one
        if (size == 1) {
            state_.next.store(0, std::memory_order_relaxed);
            state_.round.store(round_, std::memory_order_relaxed);
            return;
        }
        if (state_.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            state_.next.store(0, std::memory_order_relaxed);
            state_.arrived.store(0, std::memory_order_relaxed);
            state_.round.store(round_, std::memory_order_seq_cst);  // before notify_all looks for who sleeps
            state_.round.notify_all();
            return;
        }
        for (int spins = 0; spins < SPINS; spins++) {
            if (state_.round.load(std::memory_order_acquire) == round_) return;
            pause(spins);
        }
        state_.round.wait(round_ - 1, std::memory_order_seq_cst);
    }

private:
    static constexpr int64_t PORTION = 4;  // taken at once, at most

    GroupState& state_;
    uint32_t round_;  // how many barriers this thread has passed
};

}  // namespace penstock
