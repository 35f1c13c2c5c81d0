// Counter-based Gumbel noise: a pure function of (row key, token id).
#pragma once
#include "vec.h"

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// splitmix64's counters key + (i + 1) golden of tokens i = t, t + 1, t + 4, t + 5.
static SSD_INLINE u64x4 counters4(uint64_t key, int64_t t) {
    return u64x4{kGolden, 2 * kGolden, 5 * kGolden, 6 * kGolden} + (key + (uint64_t)t * kGolden);
}

// The upper 32 bits of the hashes of tokens t..t+7, from counters4(key, t). A last step, which can
// change bit 0 alone, is left out.
static SSD_INLINE u32x8 raw_hash8(u64x4 counters) {
    u64x4 a = counters, b = counters + 2 * kGolden;
    a = product4(a ^ (a >> 30), 0xBF58476D1CE4E5B9ull);
    b = product4(b ^ (b >> 30), 0xBF58476D1CE4E5B9ull);
    return upper_products8(a ^ (a >> 27), b ^ (b >> 27), 0x94D049BB133111EBull);
}

// The last step: z ^= z >> 31, seen from the upper half.
static SSD_INLINE u32x8 finish_hash8(u32x8 raw) { return raw ^ (raw >> 31); }

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

static SSD_INLINE f32x8 gumbel8(uint64_t key, int64_t t) {
    return gumbel_of(uniform8(finish_hash8(raw_hash8(counters4(key, t)))));
}

constexpr float kGumbelMax = 22.9f;  // -log(2^-33) and a little

// Which tokens of these raw hashes may have noise above `deficit`: all that do, few that do not.
// g = -log(-log(1 - u)) > d implies u < e^-d, and e^-d is at most its chord between powers of two,
// which is what the bits of a float are when read as fixed point. The slack of 1e-4 in d exceeds
// all rounding together: of the score, of d (relative 2^-24; d < 23), of the noise (2e-6) and here
// (2e-5). A NaN counts as a large deficit.
static SSD_INLINE i32x8 may_exceed8(u32x8 raw, f32x8 deficit) {
    constexpr float one = 1 << 23, log2_e = 1.44269504f;  // one power of two; 2^30 has exponent 157
    f32x8 bits = fma8(deficit, splat(-one * log2_e), splat(one * (157.0f + 1e-4f * log2_e)));
    bits = min8(max8(bits, splat(0.0f)), splat(one * 157.5f));
    const f32x8 limit = (f32x8)__builtin_convertvector(bits, i32x8);  // of hashes in units of 2^-30
    return (i32x8)(raw >> 2) <= __builtin_convertvector(limit, i32x8);
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
