// Paged attention over a trunk (block table) and a suffix (slots), one query at a time.
//
// A query's visible positions are numbered from 0, trunk first, and taken in blocks of 32 with an
// online softmax: the arithmetic depends on the number of positions and their K and V only, not on
// where they are stored, what else is in the batch, or how many threads there are.
#pragma once
#include <cmath>
#include <vector>

#include "layers.h"
#include "threads.h"

constexpr int kKeys = 32;   // positions of one softmax step
constexpr int kGroup = 8;   // tokens that share the keys a thread has in cache

// The fields of ForwardBatch that attention and rope read.
struct Batch {
    int64_t tokens;
    const int64_t* positions;
    const int64_t* slots;
    const int32_t* seqs;
    const int32_t* block_tables;
    int64_t table_width;
    const int32_t* context_lens;
    const int64_t* suffix_slots;  // int64 [tokens, suffix_width] or null
    const int32_t* suffix_lens;
    int64_t suffix_width;
    int64_t block_size;

    int64_t visible(int64_t t) const { return context_lens[t] + (suffix_lens ? suffix_lens[t] : 0); }

    int64_t slot(int64_t t, int64_t i) const {
        const int64_t trunk = context_lens[t];
        if (i >= trunk) return suffix_slots[t * suffix_width + i - trunk];
        const int64_t block = block_tables[seqs[t] * table_width + i / block_size];
        return block * block_size + i % block_size;
    }
};

// Scores of one query head against the keys at k[0..31] (pointers past the end repeat a valid one).
static inline void score_keys(const float* q, const float* const* k, int64_t dim, float scale,
                              float* scores) {
    const int64_t whole = dim / 8 * 8;
    for (int j = 0; j < kKeys; j += 8) {
        f32x8 a[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) a[i] = splat(0.0f);
        for (int64_t c = 0; c < whole; c += 8) {
            const f32x8 v = load8(q + c);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) a[i] = fma8(v, load8(k[j + i] + c), a[i]);
        }
        f32x8 s = sums_of8(a);
        for (int64_t c = whole; c < dim; c++)
            for (int i = 0; i < 8; i++) s[i] = __builtin_fmaf(q[c], k[j + i][c], s[i]);
        store8(scores + j, s * scale);
    }
}

// out = out * keep + sum over j < count of p[j] v[j], for N * 8 dimensions from c on.
template <int N>
static SSD_INLINE void mix_values(const float* p, const float* const* v, int count, float keep,
                                  int64_t c, float* out) {
    f32x8 a[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) a[i] = load8(out + c + i * 8) * keep;
    for (int j = 0; j < count; j++) {
        const f32x8 w = splat(p[j]);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) a[i] = fma8(w, load8(v[j] + c + i * 8), a[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) store8(out + c + i * 8, a[i]);
}

struct Softmax {
    float top = -INFINITY, sum = 0.0f;
};

// One softmax step of one query head; out [dim] is the running weighted sum of values.
static inline void attend_keys(const float* q, const float* const* k, const float* const* v,
                               int count, int64_t dim, float scale, Softmax& state, float* out) {
    float s[kKeys];
    score_keys(q, k, dim, scale, s);
    for (int j = count; j < kKeys; j++) s[j] = -INFINITY;
    f32x8 high = load8(s);
    for (int j = 8; j < kKeys; j += 8) high = max8(load8(s + j), high);
    float top = maximum8(high);
    top = state.top > top ? state.top : top;
    f32x8 sum = splat(0.0f);
    for (int j = 0; j < kKeys; j += 8) {
        f32x8 x = load8(s + j);
        f32x8 p = select8(x > splat(-INFINITY), exp8(x - top), splat(0.0f));
        store8(s + j, p);
        sum += p;
    }
    const float keep = exp8(splat(state.top - top))[0];
    state.sum = __builtin_fmaf(state.sum, keep, sum8(sum));
    state.top = top;
    int64_t c = 0;
    for (; c + 64 <= dim; c += 64) mix_values<8>(s, v, count, keep, c, out);
    for (; c + 32 <= dim; c += 32) mix_values<4>(s, v, count, keep, c, out);
    for (; c + 8 <= dim; c += 8) mix_values<1>(s, v, count, keep, c, out);
    for (; c < dim; c++) {
        float a = out[c] * keep;
        for (int j = 0; j < count; j++) a = __builtin_fmaf(s[j], v[j][c], a);
        out[c] = a;
    }
}

// One KV head for tokens [begin, end).
static inline void attend_group(const float* q, const float* k_cache, const float* v_cache,
                                const Heads& h, const Batch& b, float scale, int64_t kv,
                                int64_t begin, int64_t end, Softmax* state, float* out) {
    const int64_t d = h.dim, per = h.heads / h.kv_heads, width = h.heads * d, row = h.kv_heads * d;
    int64_t longest = 0;
    for (int64_t t = begin; t < end; t++) {
        if (b.visible(t) > longest) longest = b.visible(t);
        std::memset(out + t * width + kv * per * d, 0, sizeof(float) * per * d);
    }
    for (int64_t i = 0; i < (end - begin) * per; i++) state[i] = Softmax();
    for (int64_t start = 0; start < longest; start += kKeys)
        for (int64_t t = begin; t < end; t++) {
            const int64_t left = b.visible(t) - start;
            if (left <= 0) continue;
            const int count = left < kKeys ? (int)left : kKeys;
            const float *k[kKeys], *v[kKeys];
            for (int j = 0; j < kKeys; j++) {
                const int64_t at = b.slot(t, start + (j < count ? j : count - 1)) * row + kv * d;
                k[j] = k_cache + at;
                v[j] = v_cache + at;
            }
            for (int64_t g = 0; g < per; g++) {
                const int64_t at = t * width + (kv * per + g) * d;
                attend_keys(q + at, k, v, count, d, scale, state[(t - begin) * per + g], out + at);
            }
        }
    for (int64_t t = begin; t < end; t++)
        for (int64_t g = 0; g < per; g++) {
            const float sum = state[(t - begin) * per + g].sum;
            const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
            float* y = out + t * width + (kv * per + g) * d;
            for (int64_t i = 0; i < d; i++) y[i] *= inverse;
        }
}

// This part's share of all (token group, KV head) pairs, dealt out in turn.
static inline void attention_part(const float* q, const float* k_cache, const float* v_cache,
                                  const Heads& h, const Batch& b, float scale, float* out, int part,
                                  int parts) {
    int64_t group = kGroup;
    if (parts > 1) {
        const int64_t even = (b.tokens * h.kv_heads + 2 * parts - 1) / (2 * parts);
        group = even < kGroup ? even : kGroup;
    }
    const int64_t groups = (b.tokens + group - 1) / group;
    std::vector<Softmax> state((size_t)(group * (h.heads / h.kv_heads)));
    for (int64_t task = part; task < groups * h.kv_heads; task += parts) {
        const int64_t begin = task / h.kv_heads * group;
        const int64_t end = begin + group < b.tokens ? begin + group : b.tokens;
        attend_group(q, k_cache, v_cache, h, b, scale, task % h.kv_heads, begin, end, state.data(),
                     out);
    }
}
