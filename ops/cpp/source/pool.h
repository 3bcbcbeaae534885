// Threads that wait for steps. OpenMP's would spin for milliseconds after each one, on the core that the event loop
// needs; these look for a moment and sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "step.h"

namespace penstock {

constexpr int IDLE_SPINS = 2000;  // before a thread without work sleeps, some hundred us at most

class Pool {
public:
    explicit Pool(int size) : size_(size), state_(size) {
        for (int rank = 1; rank < size; rank++) threads_.emplace_back([this, rank] { work(rank); });
    }

    ~Pool() {
        nodes_ = nullptr;
        wake();
        for (auto& thread : threads_) thread.join();
    }

    // Runs the nodes one after the other on all threads, this one among them; returns when all is done.
    void run(const GraphNode* nodes, int64_t count, const Step* step) {
        if (count == 0) return;  // without a barrier, threads would still look at it when the next call comes
        nodes_ = nodes;
        count_ = count;
        step_ = step;
        if (size_ > 1) wake();
        run_as(0);
    }

private:
    void wake() {
        round_.fetch_add(1, std::memory_order_seq_cst);  // before notify_all looks for who sleeps
        round_.notify_all();
    }

    void run_as(int rank) {
        ThreadGroup threads(rank, size_, state_);
        const GraphNode* nodes = nodes_;
        const Step* step = step_;
        for (int64_t i = 0, count = count_; i < count; i++) {
            nodes[i].kernel(nodes[i].operands, *step, threads);
            threads.barrier();
        }
    }

    void work(int rank) {
        for (uint32_t seen = 0;; seen++) {
            for (int spins = 0; spins < IDLE_SPINS && round_.load(std::memory_order_acquire) == seen; spins++) pause(spins);
            round_.wait(seen, std::memory_order_seq_cst);
            if (!nodes_) return;
            run_as(rank);
        }
    }

    const int size_;
    const GraphNode* nodes_ = nullptr;
    int64_t count_ = 0;
    const Step* step_ = nullptr;
    GroupState state_;
    std::atomic<uint32_t> round_{0};
    std::vector<std::thread> threads_;
};

}  // namespace penstock
