// The threads that compute one step together.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace penstock {

// Before a waiting thread sleeps: 300 to 800 us. Whoever takes a thread's core for a moment (the event loop, a client on
// the same machine) gives it back sooner than a sleeper is woken, and between two kernels that would happen many times
// a step.
constexpr int SPINS = 40000;

// Between offers of the core to others, some 5 us. Without them a thread would look, for as long as the system lets it,
// for what another cannot do that waits for this very core: the rest of the team, or the loop.
constexpr int SPINS_PER_YIELD = 256;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// What the threads of a team share.
struct Meeting {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int32_t> arrived{0};
    alignas(64) std::atomic<int32_t> round{0};
};

// One thread's view of its team. Work is taken, not dealt: a thread whose core is busy elsewhere takes less of it.
class Team {
public:
    Team(int rank, int size, Meeting& meeting) : rank(rank), size(size), meeting_(meeting) {}

    const int rank;
    const int size;

    // The first of `count` tasks that nobody has taken since the last barrier; beyond the last one, stop.
    int64_t take(int64_t count = 1) { return meeting_.next.fetch_add(count, std::memory_order_relaxed); }

    // Wait for all threads; afterwards tasks are counted from 0 again, and all see what all have written.
    void barrier() {
        if (size == 1) {
            meeting_.next.store(0, std::memory_order_relaxed);
            return;
        }
        const int32_t round = meeting_.round.load(std::memory_order_acquire);
        if (meeting_.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            meeting_.next.store(0, std::memory_order_relaxed);
            meeting_.arrived.store(0, std::memory_order_relaxed);
            meeting_.round.store(round + 1, std::memory_order_release);
            meeting_.round.notify_all();
            return;
        }
        for (int spins = 0; spins < SPINS; spins++) {
            if (meeting_.round.load(std::memory_order_acquire) != round) return;
            if (spins % SPINS_PER_YIELD == SPINS_PER_YIELD - 1)
                std::this_thread::yield();
            else
                pause();
        }
        meeting_.round.wait(round, std::memory_order_acquire);
    }

private:
    Meeting& meeting_;
};

}  // namespace penstock
