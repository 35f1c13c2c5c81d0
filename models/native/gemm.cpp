// The matrix kernel: x times packed panels, six rows by sixteen outputs in registers.
#include "gemm.h"

namespace {

struct Bf16 {
    static constexpr int bytes = 2;
    static SSD_INLINE void widen(const char* p, f32x8& lo, f32x8& hi) {
        u32x8 w = load_bits8(p);
        lo = (f32x8)(w << 16);
        hi = (f32x8)(w & 0xffff0000u);
    }
};

struct F32 {
    static constexpr int bytes = 4;
    static SSD_INLINE void widen(const char* p, f32x8& lo, f32x8& hi) {
        lo = load8((const float*)p);
        hi = load8((const float*)p + 8);
    }
};

// acc[r][p] = sum over k of x[r, k] * panel p, for R rows and P neighbouring panels from w on.
// Meanwhile the same number of panels from `next` on is prefetched (pass w's own end or w).
template <class W, int R, int P>
static SSD_INLINE void micro(const float* x, int64_t ldx, const char* w, int64_t k,
                             const char* next, f32x8 (&acc)[R][P][2]) {
    constexpr int step = kPanel * W::bytes;
    constexpr int64_t ahead = 1536;
    const int64_t stride = k * step;
    f32x8 a[R][P][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) a[r][p][0] = a[r][p][1] = splat(0.0f);
    auto one = [&](int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            f32x8 lo, hi;
            W::widen(w + p * stride + i * step, lo, hi);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                f32x8 v = splat(x[r * ldx + i]);
                a[r][p][0] = fma8(v, lo, a[r][p][0]);
                a[r][p][1] = fma8(v, hi, a[r][p][1]);
            }
        }
    };
    constexpr int unroll = 64 / step > 1 ? 64 / step : 1;  // one cache line a panel
    int64_t i = 0;
    for (; i + unroll <= k; i += unroll) {
        const int64_t at = i * step + ahead;
        const char* base = at < stride ? w + at : next + (at - stride);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) __builtin_prefetch(base + p * stride);
#pragma GCC unroll 8
        for (int u = 0; u < unroll; u++) one(i + u);
    }
    for (; i < k; i++) one(i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            acc[r][p][0] = a[r][p][0];
            acc[r][p][1] = a[r][p][1];
        }
}

// Panels the micro kernel handles together for R rows (enough chains to hide the FMA latency).
template <int R>
constexpr int kPanelsFor = R == 1 ? 4 : R <= 3 ? 2 : 1;

// Rows are cut into even blocks of at most six; a block of panels stays in cache for all of them.
template <class W>
struct Sweep {
    const float* x;
    int64_t ldx;
    const Packed& w;
    const Emit& emit;

    template <int R, int P>
    SSD_INLINE void tile(int64_t row, int64_t panel, int64_t next) const {
        f32x8 acc[R][P][2];
        const int64_t bytes = w.k * kPanel * W::bytes;
        micro<W, R, P>(x + row * ldx, ldx, w.data + panel * bytes, w.k, w.data + next * bytes, acc);
        emit.tile(row, R, panel, P, &acc[0][0][0]);
    }

    // R rows from `row` on, panels [begin, end); `next`: the panels wanted after these.
    template <int R>
    __attribute__((noinline)) void rows(int64_t row, int64_t begin, int64_t end,
                                        int64_t next) const {
        constexpr int P = kPanelsFor<R>;
        int64_t p = begin;
        for (; p + P <= end; p += P) tile<R, P>(row, p, p + P < end ? p + P : next);
        for (; p < end; p++) tile<R, 1>(row, p, p + 1 < end ? p + 1 : next);
    }

    void any_rows(int count, int64_t row, int64_t begin, int64_t end, int64_t next) const {
        switch (count) {
            case 1: return rows<1>(row, begin, end, next);
            case 2: return rows<2>(row, begin, end, next);
            case 3: return rows<3>(row, begin, end, next);
            case 4: return rows<4>(row, begin, end, next);
            case 5: return rows<5>(row, begin, end, next);
            default: return rows<6>(row, begin, end, next);
        }
    }

    void run(int64_t m, int64_t begin, int64_t end) const {
        if (m <= 0 || begin >= end) return;
        const int64_t fit = (int64_t)(256 << 10) / (4 * w.k);  // rows of x that stay in cache
        const int64_t chunk = fit < 24 ? 24 : fit / kMaxRows * kMaxRows;
        for (int64_t top = 0; top < m; top += chunk) {
            const int64_t here = m - top < chunk ? m - top : chunk;
            const int64_t blocks = (here + kMaxRows - 1) / kMaxRows;
            const int64_t group = blocks == 1 ? end - begin : 2;
            for (int64_t p = begin; p < end; p += group) {
                const int64_t q = p + group < end ? p + group : end;
                for (int64_t b = 0; b < blocks; b++) {
                    const int64_t r0 = here * b / blocks, r1 = here * (b + 1) / blocks;
                    const int64_t next = b + 1 < blocks ? p : q < end ? q : p;
                    any_rows((int)(r1 - r0), top + r0, p, q, next);
                }
            }
        }
    }
};

}  // namespace

void sweep(const Packed& w, const float* x, int64_t ldx, int64_t m, int64_t begin, int64_t end,
           const Emit& emit) {
    if (w.bf16)
        Sweep<Bf16>{x, ldx, w, emit}.run(m, begin, end);
    else
        Sweep<F32>{x, ldx, w, emit}.run(m, begin, end);
}
