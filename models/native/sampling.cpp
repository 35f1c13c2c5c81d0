// Gumbel-max sampling: noise rows, noised argmax and top-n of logits, the fused head, softmax sums.
#include <cmath>
#include <vector>

#include "gemm.h"
#include "noise.h"
#include "threads.h"

namespace {

constexpr int kMaxTop = 64;
constexpr float kLowest = -INFINITY;

struct Best {
    float value = kLowest;
    int64_t index = 0;
    SSD_INLINE void keep(int64_t t, float s) {
        if (s > value) value = s, index = t;  // ties keep the lower, earlier id
    }
};

SSD_INLINE f32x8 load_some(const float* p, int64_t count) {
    if (count >= 8) return load8(p);
    f32x8 v = splat(kLowest);
    for (int j = 0; j < count; j++) v[j] = p[j];
    return v;
}

// Epilogue of the head: panels of logits go to each row's running best, and to `logits` if given.
struct HeadOut final : Emit {
    const RowNoise* noise;
    Best* best;
    int64_t n;
    float* logits;

    HeadOut(const RowNoise* rows, Best* bests, int64_t vocabulary, float* out)
        : noise(rows), best(bests), n(vocabulary), logits(out) {}

    void tile(int64_t row, int rows, int64_t panel, int panels, const f32x8* acc) const override {
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < 2 * panels; p++)
                offer(row + r, panel * kPanel + p * 8, acc[r * panels * 2 + p]);
    }

    SSD_INLINE void offer(int64_t r, int64_t t, f32x8 v) const {
        if (t >= n) return;
        const int64_t count = n - t < 8 ? n - t : 8;
        if (logits) {
            if (count == 8)
                store8(logits + r * n + t, v);
            else
                for (int j = 0; j < count; j++) logits[r * n + t + j] = v[j];
        }
        Best& b = best[r];
        offer8(noise[r], v, t, count, b.value, [&](int64_t i, float s) { b.keep(i, s); });
    }
};

struct Top {
    int n, used = 0;
    float value[kMaxTop];
    int64_t index[kMaxTop];

    float floor() const { return used < n ? kLowest : value[n - 1]; }

    void keep(int64_t t, float s) {
        if (!(s > floor())) return;
        int at = used < n ? used++ : n - 1;
        for (; at > 0 && s > value[at - 1]; at--) value[at] = value[at - 1], index[at] = index[at - 1];
        value[at] = s, index[at] = t;
    }
};

}  // namespace

extern "C" {

// out [m, v]: noise of tokens 0..v-1 for each key.
void ssd_gumbel_rows(const uint64_t* keys, int64_t m, int64_t v, float* out, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m * ((v + 7) / 8), part, parts);
        for (int64_t i = range.begin; i < range.end; i++) {
            const int64_t row = i / ((v + 7) / 8), t = i % ((v + 7) / 8) * 8;
            f32x8 g = gumbel8(keys[row], t);
            if (t + 8 <= v)
                store8(out + row * v + t, g);
            else
                for (int j = 0; t + j < v; j++) out[row * v + t + j] = g[j];
        }
    });
}

// Row-wise top-1 of x W^T scaled and noised, without the logits unless `logits` [m, n] is given.
// inverse_temperature and keys may be null (greedy).
void ssd_head_argmax(const Packed* w, const float* x, int64_t ldx, int64_t m,
                     const float* inverse_temperature, const uint64_t* keys, float* values,
                     int64_t* indices, float* logits, int threads) {
    std::vector<RowNoise> rows(m);
    for (int64_t r = 0; r < m; r++) rows[r] = RowNoise::of(inverse_temperature, keys, r);
    if (threads < 1) threads = 1;
    std::vector<Best> best((size_t)threads * m);
    parallel(threads, [&](int part, int parts) {
        const Range range = share(w->panels(), part, parts);
        const HeadOut out(rows.data(), best.data() + (int64_t)part * m, w->n, logits);
        sweep(*w, x, ldx, m, range.begin, range.end, out);
    });
    for (int64_t r = 0; r < m; r++) {
        Best b = best[r];
        for (int part = 1; part < threads; part++) b.keep(best[part * m + r].index, best[part * m + r].value);
        values[r] = b.value, indices[r] = b.index;
    }
}

// Row-wise top-1 of logits [m, v] (rows ld apart).
void ssd_noised_argmax(const float* logits, int64_t ld, int64_t m, int64_t v,
                       const float* inverse_temperature, const uint64_t* keys, float* values,
                       int64_t* indices, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m, part, parts);
        for (int64_t r = range.begin; r < range.end; r++) {
            const RowNoise noise = RowNoise::of(inverse_temperature, keys, r);
            Best b;
            for (int64_t t = 0; t < v; t += 8)
                offer8(noise, load_some(logits + r * ld + t, v - t), t, v - t, b.value,
                       [&](int64_t i, float s) { b.keep(i, s); });
            values[r] = b.value, indices[r] = b.index;
        }
    });
}

// Row-wise n highest scores, highest first, equal ones by rising id; n <= 64. Places beyond the
// number of scores above -inf hold -inf and id -1.
void ssd_noised_topk(const float* logits, int64_t ld, int64_t m, int64_t v, int64_t n,
                     const float* inverse_temperature, const uint64_t* keys, float* values,
                     int64_t* indices, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m, part, parts);
        for (int64_t r = range.begin; r < range.end; r++) {
            const RowNoise noise = RowNoise::of(inverse_temperature, keys, r);
            Top top;
            top.n = (int)n;
            for (int64_t t = 0; t < v; t += 8)
                offer8(noise, load_some(logits + r * ld + t, v - t), t, v - t, top.floor(),
                       [&](int64_t i, float s) { top.keep(i, s); });
            for (int64_t i = 0; i < n; i++) {
                values[r * n + i] = i < top.used ? top.value[i] : kLowest;
                indices[r * n + i] = i < top.used ? top.index[i] : -1;
            }
        }
    });
}

// Per row: max and log-sum-exp of logits * scale[r].
void ssd_row_logsumexp(const float* logits, int64_t ld, int64_t m, int64_t v, const float* scale,
                       float* maxima, float* sums, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m, part, parts);
        for (int64_t r = range.begin; r < range.end; r++) {
            const float* p = logits + r * ld;
            f32x8 high = splat(kLowest);
            for (int64_t t = 0; t < v; t += 8) high = max8(load_some(p + t, v - t) * scale[r], high);
            const float top = maximum8(high);
            f32x8 sum[4] = {splat(0), splat(0), splat(0), splat(0)};
            if (top > kLowest)
                for (int64_t t = 0; t < v; t += 8) {
                    f32x8 s = load_some(p + t, v - t) * scale[r] - top;
                    sum[t / 8 % 4] += select8(s > splat(-87.0f), exp8(s), splat(0.0f));
                }
            maxima[r] = top;
            sums[r] = top + std::log(sum8((sum[0] + sum[1]) + (sum[2] + sum[3])));
        }
    });
}
}
