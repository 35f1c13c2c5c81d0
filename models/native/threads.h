// Work is cut into parts; one thread runs them all in place, several share an OpenMP region.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct Range {
    int64_t begin, end;
};

// The part-th of `parts` even shares of [0, total).
static inline Range share(int64_t total, int part, int parts) {
    return {total * part / parts, total * (part + 1) / parts};
}

// body(part, parts) on each thread; no region is entered for one thread.
template <class Body>
static inline void parallel(int threads, const Body& body) {
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    body(0, 1);
}

// Where the threads of a region wait for each other. They spin for some 20 us, then sleep: a thread
// that waits for one that was preempted must give its core away, or both lose a time slice.
class Meeting {
  public:
    void wait(int parts) {
        if (parts <= 1) return;
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            phase_.notify_all();
            return;
        }
        for (int spin = 0; spin < kSpins; spin++) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            relax();
        }
        while (phase_.load(std::memory_order_acquire) == phase) phase_.wait(phase);
    }

  private:
    static constexpr int kSpins = 1000;

    static void relax() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};
