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

constexpr int kKeys = 64;   // positions of one softmax step
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

    // Slots of visible positions start..start+count-1 of token t.
    void slots_of(int64_t t, int64_t start, int count, int64_t* out) const {
        const int64_t trunk = context_lens[t];
        const int32_t* table = block_tables + seqs[t] * table_width;
        int64_t block = start / block_size, offset = start % block_size;
        for (int j = 0; j < count; j++) {
            if (start + j >= trunk) {
                out[j] = suffix_slots[t * suffix_width + start + j - trunk];
                continue;
            }
            out[j] = table[block] * block_size + offset;
            if (++offset == block_size) offset = 0, block++;
        }
    }
};

struct Softmax {
    float top = -INFINITY, sum = 0.0f;
};

// Scores of R query heads (q, dim apart) against `count` keys, rounded up to eights (pointers past
// the end repeat a valid one). Heads are taken together so that keys are loaded once.
template <int R>
static inline void score_keys(const float* q, const float* const* k, int count, int64_t dim,
                              float scale, float (&scores)[R][kKeys]) {
    const int64_t whole = dim / 8 * 8;
    for (int j = 0; j < count; j += 8) {
        f32x8 dots[R][8];
#pragma GCC unroll 2
        for (int half = 0; half < 8; half += 4) {
            f32x8 a[R][4];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) a[r][i] = splat(0.0f);
            const float* const* keys = k + j + half;
            for (int64_t c = 0; c < whole; c += 8) {
                f32x8 v[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) v[r] = load8(q + r * dim + c);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const f32x8 key = load8(keys[i] + c);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) a[r][i] = fma8(v[r], key, a[r][i]);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) dots[r][half + i] = a[r][i];
        }
        for (int r = 0; r < R; r++) {
            f32x8 s = sums_of8(dots[r]);
            for (int64_t c = whole; c < dim; c++)
                for (int i = 0; i < 8; i++) s[i] = __builtin_fmaf(q[r * dim + c], k[j + i][c], s[i]);
            store8(scores[r] + j, s * scale);
        }
    }
}

// Scores to weights: exponentials over the running maximum; returns what earlier sums shrink by.
static inline float weigh(float* s, int count, Softmax& state) {
    for (int j = count; j < kKeys; j++) s[j] = -INFINITY;
    f32x8 high = load8(s);
    for (int j = 8; j < kKeys; j += 8) high = max8(load8(s + j), high);
    float top = maximum8(high);
    top = state.top > top ? state.top : top;
    f32x8 sum = splat(0.0f);
    for (int j = 0; j < kKeys; j += 8) {
        const f32x8 x = load8(s + j);
        const f32x8 p = select8(x > splat(-INFINITY), exp8(x - top), splat(0.0f));
        store8(s + j, p);
        sum += p;
    }
    const float keep = exp8(splat(state.top - top))[0];
    state.sum = __builtin_fmaf(state.sum, keep, sum8(sum));
    state.top = top;
    return keep;
}

// out[r] = out[r] * keep[r] + sum over j < count of p[r][j] v[j], for N * 8 dimensions from c on.
template <int R, int N>
static SSD_INLINE void mix_values(const float (&p)[R][kKeys], const float* const* v, int count,
                                  const float* keep, int64_t dim, int64_t c, float* out) {
    f32x8 a[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) a[r][i] = load8(out + r * dim + c + i * 8) * keep[r];
    for (int j = 0; j < count; j++) {
        f32x8 w[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) w[r] = splat(p[r][j]);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const f32x8 value = load8(v[j] + c + i * 8);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) a[r][i] = fma8(w[r], value, a[r][i]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) store8(out + r * dim + c + i * 8, a[r][i]);
}

// One softmax step of R query heads; out [R, dim] are the running weighted sums of values.
template <int R>
static inline void attend_keys(const float* q, const float* const* k, const float* const* v,
                               int count, int64_t dim, float scale, Softmax* state, float* out) {
    constexpr int wide = R == 1 ? 8 : 4;
    float s[R][kKeys], keep[R];
    score_keys<R>(q, k, count, dim, scale, s);
    for (int r = 0; r < R; r++) keep[r] = weigh(s[r], count, state[r]);
    int64_t c = 0;
    for (; c + 8 * wide <= dim; c += 8 * wide) mix_values<R, wide>(s, v, count, keep, dim, c, out);
    for (; c + 8 <= dim; c += 8) mix_values<R, 1>(s, v, count, keep, dim, c, out);
    for (; c < dim; c++)
        for (int r = 0; r < R; r++) {
            float a = out[r * dim + c] * keep[r];
            for (int j = 0; j < count; j++) a = __builtin_fmaf(s[r][j], v[j][c], a);
            out[r * dim + c] = a;
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
    const float *k[kKeys], *v[kKeys];
    for (int64_t start = 0; start < longest; start += kKeys) {
        int64_t same = -1;  // sequence whose trunk k and v point to, all of this block
        for (int64_t t = begin; t < end; t++) {
            const int64_t ahead = b.visible(t) - start;
            if (ahead <= 0) continue;
            const int count = ahead < kKeys ? (int)ahead : kKeys;
            const bool trunk = start + kKeys <= b.context_lens[t];
            if (!trunk || b.seqs[t] != same) {
                int64_t slots[kKeys];
                b.slots_of(t, start, count, slots);
                for (int j = 0; j < kKeys; j++) {
                    const int64_t at = slots[j < count ? j : count - 1] * row + kv * d;
                    k[j] = k_cache + at;
                    v[j] = v_cache + at;
                }
                same = trunk ? b.seqs[t] : -1;
            }
            for (int64_t g = 0; g < per;) {
                const int64_t left = per - g, at = t * width + (kv * per + g) * d;
                Softmax* mine = state + (t - begin) * per + g;
                if (left == 3 || left > 4) {
                    attend_keys<3>(q + at, k, v, count, d, scale, mine, out + at);
                    g += 3;
                } else if (left > 1) {
                    attend_keys<2>(q + at, k, v, count, d, scale, mine, out + at);
                    g += 2;
                } else {
                    attend_keys<1>(q + at, k, v, count, d, scale, mine, out + at);
                    g += 1;
                }
            }
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
