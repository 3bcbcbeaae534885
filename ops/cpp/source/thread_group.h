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

// How far a group has come, in one word that changes in one step. From the lowest bits on: members that have arrived at
// the end of the part, members, the part of the node (between two barriers, fewer than 64) and nodes since the start.
constexpr int COUNT_BITS = 10, PART_BITS = 6;
constexpr int MAX_THREADS = (1 << COUNT_BITS) - 1;
constexpr uint64_t ONE_ARRIVED = 1, ONE_MEMBER = uint64_t{1} << COUNT_BITS, ONE_PART = ONE_MEMBER << COUNT_BITS,
                   ONE_NODE = ONE_PART << PART_BITS;

inline uint64_t parts_of(uint64_t progress) { return progress / ONE_PART; }
inline uint64_t node_of(uint64_t progress) { return progress / ONE_NODE; }

// How much of some work is taken, in the lower half; the upper one says in which part, and in others nothing is.
struct Taken {
    alignas(64) std::atomic<uint64_t> count{0};
};

// What the threads of a group share.
struct GroupState {
    explicit GroupState(int size) : taken(size) {}

    std::vector<Taken> taken;  // of each thread's share
    Taken next;
    alignas(64) std::atomic<uint64_t> progress{ONE_NODE};
    alignas(64) std::atomic<uint32_t> changes{0};  // of `progress` from one part to the next, for those who sleep
};

// One thread's view of its group. Work is taken: a thread whose core is busy elsewhere does less of it, also of what is
// its own at first. Threads wait for those only that have joined the same node: one whose core the event loop or the
// masks of grammars have taken between two nodes is not waited for, and joins the node at which it finds the others.
class ThreadGroup {
public:
    ThreadGroup(int rank, int size, GroupState& state) : rank(rank), size(size), state_(state) {}

    const int rank;
    const int size;

    // The first of `count` tasks that nobody has taken since the last barrier; beyond the last one, stop.
    int64_t take(int64_t count = 1) { return take(state_.next, count); }

    // Calls work(i) for every i below `count`, each on one thread: what this thread gets first is always the same part
    // of them, so that it finds in its cache what it wrote there; then it takes from others. Once between two barriers.
    template <class Work>
    void share(int64_t count, const Work& work) {
        for (int turn = 0; turn < size; turn++) {
            const int owner = (rank + turn) % size;
            const int64_t begin = (count * owner + size - 1) / size, end = (count * (owner + 1) + size - 1) / size;
            Taken& taken = state_.taken[owner];
            while (true) {
                const int64_t left = end - begin - num_taken(taken);
                const int64_t portion = std::clamp<int64_t>(left / 8, 1, PORTION);  // few at the end: others wait for it
                const int64_t first = begin + take(taken, portion);
                if (first >= end) break;
                for (int64_t i = first; i < std::min(first + portion, end); i++) work(i);
            }
        }
    }

    // Wait for all members; afterwards tasks are counted from 0 again, and all see what all have written.
    void barrier() {
        if (!arrive(false)) wait_until_past(part_ * ONE_PART);
        part_++;
    }

    // Become a member of the node that `progress` tells of; false where that has come beyond its first part.
    bool join(uint64_t progress) {
        const uint64_t part = parts_of(progress);
        if (part * ONE_PART != node_of(progress) * ONE_NODE) return false;
        while (parts_of(progress) == part)
            if (state_.progress.compare_exchange_weak(progress, progress + ONE_MEMBER, std::memory_order_acq_rel)) {
                part_ = part;
                return true;
            }
        return false;
    }

    // This thread's part of the node is done. Wait for the other members.
    void leave() {
        if (!arrive(true)) wait_until_past(part_ * ONE_PART);
    }

    // Until the group is in another part than it was then. Looks at `changes`: `progress` is written by all who arrive.
    void wait_until_past(uint64_t progress) const {
        for (int spins = 0;;) {
            const uint32_t before = state_.changes.load(std::memory_order_seq_cst);
            if (parts_of(state_.progress.load(std::memory_order_seq_cst)) != parts_of(progress)) return;
            while (spins < SPINS && state_.changes.load(std::memory_order_acquire) == before) pause(spins++);
            state_.changes.wait(before, std::memory_order_seq_cst);
        }
    }

private:
    static constexpr int64_t PORTION = 4;  // taken at once, at most
    static constexpr int TAKEN_BITS = 32;

    int64_t num_taken(const Taken& taken) const {
        const uint64_t seen = taken.count.load(std::memory_order_relaxed);
        return seen >> TAKEN_BITS == uint32_t(part_) ? uint32_t(seen) : 0;
    }

    // Only members come here, and none of them is in another part, so what is valid stays so.
    int64_t take(Taken& taken, int64_t count) {
        const uint64_t none = uint64_t{uint32_t(part_)} << TAKEN_BITS;
        uint64_t seen = taken.count.load(std::memory_order_relaxed);
        while (seen >> TAKEN_BITS != uint32_t(part_))
            if (taken.count.compare_exchange_weak(seen, none + count, std::memory_order_relaxed)) return 0;
        return uint32_t(taken.count.fetch_add(count, std::memory_order_relaxed));
    }

    // Whether this was the last member, and the group goes on to the next part, or node.
    bool arrive(bool leaves) {
        uint64_t seen = state_.progress.load(std::memory_order_relaxed), next;
        bool is_last = false;
        do {
            const uint64_t members = seen / ONE_MEMBER % ONE_MEMBER, arrived = seen % ONE_MEMBER;
            is_last = arrived + 1 == members;
            next = !is_last ? seen + ONE_ARRIVED
                   : leaves ? (node_of(seen) + 1) * ONE_NODE
                            : (parts_of(seen) + 1) * ONE_PART + members * ONE_MEMBER;
        } while (!state_.progress.compare_exchange_weak(seen, next, std::memory_order_seq_cst));
        if (is_last && size > 1) {
            state_.changes.fetch_add(1, std::memory_order_seq_cst);  // before notify_all looks for who sleeps
            state_.changes.notify_all();
        }
        return is_last;
    }

    GroupState& state_;
    uint64_t part_ = 0;  // the one that this thread is in, counted from the start
};

}  // namespace penstock
