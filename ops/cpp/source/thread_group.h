// The threads that compute one step together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace penstock {

// Polls of a waiting thread before it sleeps: a few milliseconds, mostly spent in `yield`. If another process takes a
// thread's core for a moment, the thread continues sooner from a yield than from a sleep. With fewer polls, threads
// would sleep between kernels, many times per step.
constexpr int SPINS = 40000;

// Number of polls between two yields; they take 50 to 200 ns. Without yields, a polling thread could occupy the core
// that the thread it waits for needs: another member of the group, the event loop, or a client.
constexpr int SPINS_PER_YIELD = 4;

// Waits a moment between two polls; `spins` is the number of polls so far.
inline void pause(int spins) {
    if (spins % SPINS_PER_YIELD == SPINS_PER_YIELD - 1) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// The progress of a group is one atomic word. From the lowest bits on, it contains: the number of members that have
// arrived at the end of the part; the number of members; the index of the part of the node, below 64 (barriers divide a
// node into parts); and the number of nodes since the start.
constexpr int COUNT_BITS = 10, PART_BITS = 6;
constexpr int MAX_THREADS = (1 << COUNT_BITS) - 1;
constexpr uint64_t ONE_ARRIVED = 1, ONE_MEMBER = uint64_t{1} << COUNT_BITS, ONE_PART = ONE_MEMBER << COUNT_BITS,
                   ONE_NODE = ONE_PART << PART_BITS;

inline uint64_t parts_of(uint64_t progress) { return progress / ONE_PART; }
inline uint64_t node_of(uint64_t progress) { return progress / ONE_NODE; }

// The lower half is the number of tasks taken. The upper half is the part to which this number belongs; in any other
// part the number is 0.
struct Taken {
    alignas(64) std::atomic<uint64_t> count{0};
};

// Data that the threads of a group share.
struct GroupState {
    explicit GroupState(int size) : taken(size) {}

    std::vector<Taken> taken;  // tasks taken from each thread's share
    Taken next;
    alignas(64) std::atomic<uint64_t> progress{ONE_NODE};
    // number of changes of the part in `progress`; sleeping threads wait for a change of this number
    alignas(64) std::atomic<uint32_t> changes{0};
};

// One thread's view of its group. Tasks are taken dynamically, so a thread whose core is busy with other work does
// fewer tasks, even of its own share. Threads wait only for members that have joined the same node. If the event loop
// or a grammar's masks occupy a thread's core between two nodes, the group does not wait for this thread. The thread
// later joins the node that the group then computes.
class ThreadGroup {
public:
    ThreadGroup(int rank, int size, GroupState& state) : rank(rank), size(size), state_(state) {}

    const int rank;
    const int size;

    // Takes the next `count` tasks since the last barrier, and returns the number of the first. The caller must stop if
    // this number is beyond the last task.
    int64_t take(int64_t count = 1) { return take(state_.next, count); }

    // Calls work(i) for every i below `count`, each on one thread. In every call, a thread starts with the same share
    // of the tasks, because its cache contains what it wrote for them. Then it takes tasks from the shares of other
    // threads. May be called only once between two barriers.
    template <class Work>
    void share(int64_t count, const Work& work) {
        for (int turn = 0; turn < size; turn++) {
            const int owner = (rank + turn) % size;
            const int64_t begin = (count * owner + size - 1) / size, end = (count * (owner + 1) + size - 1) / size;
            Taken& taken = state_.taken[owner];
            while (true) {
                const int64_t left = end - begin - num_taken(taken);
                // portions are small at the end, because other threads wait for the last one
                const int64_t portion = std::clamp<int64_t>(left / 8, 1, PORTION);
                const int64_t first = begin + take(taken, portion);
                if (first >= end) break;
                for (int64_t i = first; i < std::min(first + portion, end); i++) work(i);
            }
        }
    }

    // Waits for all members. Afterwards, task numbers start at 0 again, and all members see each other's writes.
    void barrier() {
        if (!arrive(false)) wait_until_past(part_ * ONE_PART);
        part_++;
    }

    // Becomes a member of the node in `progress`. Returns false if the group is past the first part of this node.
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

    // Ends this thread's work on the node, and waits for the other members.
    void leave() {
        if (!arrive(true)) wait_until_past(part_ * ONE_PART);
    }

    // Waits until the group is in another part than in `progress`. Polls `changes`, because every arriving thread
    // writes `progress`.
    void wait_until_past(uint64_t progress) const {
        for (int spins = 0;;) {
            const uint32_t before = state_.changes.load(std::memory_order_seq_cst);
            if (parts_of(state_.progress.load(std::memory_order_seq_cst)) != parts_of(progress)) return;
            while (spins < SPINS && state_.changes.load(std::memory_order_acquire) == before) pause(spins++);
            state_.changes.wait(before, std::memory_order_seq_cst);
        }
    }

private:
    static constexpr int64_t PORTION = 4;  // maximum number of tasks taken at once
    static constexpr int TAKEN_BITS = 32;

    int64_t num_taken(const Taken& taken) const {
        const uint64_t seen = taken.count.load(std::memory_order_relaxed);
        return seen >> TAKEN_BITS == uint32_t(part_) ? uint32_t(seen) : 0;
    }

    // Only members call it. All members are in the same part, so `taken` cannot be reset during the call.
    int64_t take(Taken& taken, int64_t count) {
        const uint64_t none = uint64_t{uint32_t(part_)} << TAKEN_BITS;
        uint64_t seen = taken.count.load(std::memory_order_relaxed);
        while (seen >> TAKEN_BITS != uint32_t(part_))
            if (taken.count.compare_exchange_weak(seen, none + count, std::memory_order_relaxed)) return 0;
        return uint32_t(taken.count.fetch_add(count, std::memory_order_relaxed));
    }

    // Records the arrival of this thread. Returns whether it was the last member; then the next part or node begins.
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
            state_.changes.fetch_add(1, std::memory_order_seq_cst);  // before notify_all checks for sleeping threads
            state_.changes.notify_all();
        }
        return is_last;
    }

    GroupState& state_;
    uint64_t part_ = 0;  // the part in which this thread is, counted from the start
};

}  // namespace penstock
