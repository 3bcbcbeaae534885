// Threads that wait for steps. They poll for a moment and then sleep. OpenMP's threads would instead spin for
// milliseconds after each step, on the core that the event loop needs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "step.h"

namespace penstock {

constexpr int IDLE_SPINS = 2000;  // polls before an idle thread sleeps: at most a few hundred us

class Pool {
public:
    explicit Pool(int size) : size_(std::min(size, MAX_THREADS)), state_(size_) {
        for (int rank = 1; rank < size_; rank++) threads_.emplace_back([this, rank] { work(rank); });
    }

    ~Pool() {
        is_closed_.store(true);
        wake();
        for (auto& thread : threads_) thread.join();
    }

    // Runs the nodes in order on this thread and the pool's threads. Returns when all nodes are done.
    void run(const GraphNode* nodes, int64_t count, const Step* step) {
        if (count == 0) return;
        nodes_ = nodes;
        step_ = step;
        first_ = node_of(state_.progress.load());
        forget_old_counts();
        end_.store(first_ + count, std::memory_order_release);  // from now on, other threads may join
        if (size_ > 1) wake();
        run_as(0);
    }

private:
    static constexpr uint64_t NODES_PER_LOOK = uint64_t{1} << 24;

    void wake() {
        round_.fetch_add(1, std::memory_order_seq_cst);  // before notify_all checks for sleeping threads
        round_.notify_all();
    }

    // Resets the counts of taken tasks before the lower 32 bits of part numbers wrap around. No thread is in a node
    // now.
    void forget_old_counts() {
        if (first_ / NODES_PER_LOOK == looked_ / NODES_PER_LOOK) return;
        looked_ = first_;
        state_.next.count.store(0);
        for (Taken& taken : state_.taken) taken.count.store(0);
    }

    // Joins nodes until the run ends. The arguments of `run` are valid only while this thread is a member of a node.
    void run_as(int rank) {
        ThreadGroup threads(rank, size_, state_);
        while (true) {
            // `progress` must be read before `end_`, so that a node is never attributed to a run that has not started.
            const uint64_t progress = state_.progress.load(std::memory_order_acquire);
            const uint64_t node = node_of(progress);
            if (node == end_.load(std::memory_order_acquire)) return;
            if (!threads.join(progress)) {
                threads.wait_until_past(progress);
                continue;
            }
            const GraphNode& joined = nodes_[node - first_];
            joined.kernel(joined.operands, *step_, threads);
            threads.leave();
        }
    }

    void work(int rank) {
        for (uint32_t seen = 0;;) {
            for (int spins = 0; spins < IDLE_SPINS && round_.load(std::memory_order_acquire) == seen; spins++) pause(spins);
            round_.wait(seen, std::memory_order_seq_cst);
            seen = round_.load(std::memory_order_acquire);
            if (is_closed_.load()) return;
            run_as(rank);
        }
    }

    const int size_;
    const GraphNode* nodes_ = nullptr;  // the arguments of the current `run`
    const Step* step_ = nullptr;
    uint64_t first_ = 1;  // the number of the run's first node
    uint64_t looked_ = 0;
    GroupState state_;
    std::atomic<uint64_t> end_{1};  // the number after the last node
    std::atomic<uint32_t> round_{0};
    std::atomic<bool> is_closed_{false};
    std::vector<std::thread> threads_;
};

}  // namespace penstock
