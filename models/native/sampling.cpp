// Gumbel-max sampling: noise rows, noised argmax and top-n of logits, the fused head.
#include <vector>

#include "choice.h"
#include "gemm.h"
#include "threads.h"

namespace {

SSD_INLINE f32x8 load_some(const float* p, int64_t count) {
    if (count >= 8) return load8(p);
    f32x8 v = splat(kLowest);
    for (int j = 0; j < count; j++) v[j] = p[j];
    return v;
}

template <class Kept>
SSD_INLINE void offer_row(Choice<Kept>& choice, const float* logits, int64_t v) {
    constexpr int N = 4;
    int64_t t = 0;
    for (; t + 8 * N <= v; t += 8 * N) {
        f32x8 block[N];
        for (int i = 0; i < N; i++) block[i] = load8(logits + t + 8 * i);
        choice.template offer<N>(block, t, 8 * N);
    }
    for (; t < v; t += 8) {
        const f32x8 rest = load_some(logits + t, v - t);
        choice.template offer<1>(&rest, t, v - t);
    }
}

// Epilogue of the head: panels of logits go to each row's choice.
struct HeadOut final : Emit {
    Choice<Best>* choice;
    int64_t n;

    HeadOut(Choice<Best>* choices, int64_t vocabulary) : choice(choices), n(vocabulary) {}

    void tile(int64_t row, int rows, int64_t panel, int panels, const f32x8* acc) const override {
        for (int64_t r = row; r < row + rows; r++, acc += 2 * panels) {
            const int64_t t = panel * kPanel;
            int p = 0;
            for (; p + 2 <= panels; p += 2)
                choice[r].offer<4>(acc + 2 * p, t + p * kPanel, n - t - p * kPanel);
            if (p < panels) choice[r].offer<2>(acc + 2 * p, t + p * kPanel, n - t - p * kPanel);
        }
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

// Row-wise top-1 of x W^T scaled and noised, without storing the logits. inverse_temperature and
// keys may be null (greedy).
void ssd_head_argmax(const Packed* w, const float* x, int64_t ldx, int64_t m,
                     const float* inverse_temperature, const uint64_t* keys, float* values,
                     int64_t* indices, int threads) {
    if (threads < 1) threads = 1;
    std::vector<Choice<Best>> choices;
    choices.reserve((size_t)threads * m);
    for (int part = 0; part < threads; part++)
        for (int64_t r = 0; r < m; r++)
            choices.emplace_back(RowNoise::of(inverse_temperature, keys, r));
    parallel(threads, [&](int part, int parts) {
        const Range range = share(w->panels(), part, parts);
        const HeadOut out(choices.data() + (int64_t)part * m, w->n);
        sweep(*w, x, ldx, m, range.begin, range.end, out);
    });
    for (int64_t r = 0; r < m; r++) {
        Best best;
        for (int part = 0; part < threads; part++) {
            const Best& b = choices[part * m + r].finish();
            best.keep(b.index, b.value);
        }
        values[r] = best.value, indices[r] = best.index;
    }
}

// Row-wise top-1 of logits [m, v] (rows ld apart).
void ssd_noised_argmax(const float* logits, int64_t ld, int64_t m, int64_t v,
                       const float* inverse_temperature, const uint64_t* keys, float* values,
                       int64_t* indices, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m, part, parts);
        for (int64_t r = range.begin; r < range.end; r++) {
            Choice<Best> choice(RowNoise::of(inverse_temperature, keys, r));
            offer_row(choice, logits + r * ld, v);
            const Best& b = choice.finish();
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
            Choice<Top> choice(RowNoise::of(inverse_temperature, keys, r), (int)n);
            offer_row(choice, logits + r * ld, v);
            const Top& top = choice.finish();
            for (int64_t i = 0; i < n; i++) {
                values[r * n + i] = top.values()[i];
                indices[r * n + i] = top.indices()[i];
            }
        }
    });
}
}
