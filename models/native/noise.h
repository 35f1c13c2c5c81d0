// Counter-based Gumbel noise: a pure function of (row key, token id).
#pragma once
#include "vec.h"

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// splitmix64 of counters key + (t + 1) golden for tokens t..t+7; the upper 32 bits of each hash.
static SSD_INLINE u32x8 hash8(uint64_t key, int64_t t) {
    const uint64_t z0 = key + (uint64_t)(t + 1) * kGolden;
    u64x4 a = {z0, z0 + kGolden, z0 + 2 * kGolden, z0 + 3 * kGolden};
    u64x4 b = a + 4 * kGolden;
    a = (a ^ (a >> 30)) * 0xBF58476D1CE4E5B9ull;
    b = (b ^ (b >> 30)) * 0xBF58476D1CE4E5B9ull;
    a = (a ^ (a >> 27)) * 0x94D049BB133111EBull;
    b = (b ^ (b >> 27)) * 0x94D049BB133111EBull;
    u32x8 high = (u32x8)SSD_SHUFFLE((i32x8)a, (i32x8)b, 1, 3, 5, 7, 9, 11, 13, 15);
    return high ^ (high >> 31);  // z ^= z >> 31, seen from the upper half
}

// Hash to (0, 1): min((float(h) + 1/2) 2^-32, 1 - 2^-24).
static SSD_INLINE f32x8 uniform8(u32x8 h) {
    f32x8 high = __builtin_convertvector((i32x8)(h >> 16), f32x8);
    f32x8 low = __builtin_convertvector((i32x8)(h & 0xffffu), f32x8);
    f32x8 u = fma8(high, splat(65536.0f), low);  // exact before its one rounding
    u = (u + 0.5f) * 2.3283064365386963e-10f;
    const f32x8 top = splat(0.999999940395355224609375f);
    return select8(u < top, u, top);
}

static SSD_INLINE f32x8 gumbel_of(f32x8 u) { return -log8(neg_log1p_neg8(u)); }

static SSD_INLINE f32x8 gumbel8(uint64_t key, int64_t t) { return gumbel_of(uniform8(hash8(key, t))); }

// Never below gumbel_of(u): -log(-log(1 - u)) <= -log(u) <= (1 - exponent of u) log 2.
static SSD_INLINE f32x8 gumbel_bound(f32x8 u) {
    f32x8 e = __builtin_convertvector(127 - ((i32x8)u >> 23), f32x8);
    return fma8(e, splat(0.6931473f), splat(1e-4f));
}

// What turns logits into scores: score = logit * scale (+ noise of token id).
struct RowNoise {
    uint64_t key;
    float scale;
    bool noisy;

    // inverse_temperature 0 means greedy: plain logits.
    static RowNoise of(const float* inverse_temperature, const uint64_t* keys, int64_t row) {
        const float s = inverse_temperature ? inverse_temperature[row] : 0.0f;
        if (s == 0.0f || !keys) return {0, s == 0.0f ? 1.0f : s, false};
        return {keys[row], s, true};
    }
};

constexpr float kGumbelMax = 22.9f;  // -log(2^-33) and a little

// Offers tokens t..t+7 with these logits to `keep(token, score)` if any scores above `floor`;
// only the first `count` lanes exist. Noise is hashed, and logarithms taken, only where they
// could matter. `floor` may be stale (too low), never too high.
template <class Keep>
static SSD_INLINE void offer8(const RowNoise& row, f32x8 logits, int64_t t, int64_t count,
                              float floor, const Keep& keep) {
    f32x8 score = logits * row.scale;
    if (row.noisy) {
        if (!any8(score + kGumbelMax > splat(floor))) return;
        f32x8 u = uniform8(hash8(row.key, t));
        if (!any8(score + gumbel_bound(u) > splat(floor))) return;
        score += gumbel_of(u);
    }
    if (!any8(score > splat(floor))) return;
    for (int j = 0; j < 8 && j < count; j++) keep(t + j, score[j]);
}
