// Work is cut into parts; one thread runs them all in place, several share an OpenMP region.
#pragma once
#include <cstdint>
#if defined(_OPENMP)
#include <omp.h>
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
