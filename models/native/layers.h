// Row-wise operations of a decoder layer; each row is computed on its own, in one fixed order.
#pragma once
#include <cmath>

#include "vec.h"

// Scale that brings x [n] to unit root mean square.
static inline float inverse_rms(const float* x, int64_t n, float eps) {
    f32x8 s[2] = {splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        f32x8 a = load8(x + i), b = load8(x + i + 8);
        s[0] = fma8(a, a, s[0]);
        s[1] = fma8(b, b, s[1]);
    }
    float sum = sum8(s[0] + s[1]);
    for (; i < n; i++) sum = __builtin_fmaf(x[i], x[i], sum);
    return 1.0f / std::sqrt(sum / (float)n + eps);
}

static inline void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, float* y) {
    const float scale = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i++) y[i] = weight[i] * (x[i] * scale);
}

// y[i] = silu(gate[i]) * up[i]
static inline void silu_mul_row(const float* gate, const float* up, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) store8(y + i, silu8(load8(gate + i)) * load8(up + i));
    if (i < n) {
        f32x8 g = splat(0.0f);
        for (int j = 0; i + j < n; j++) g[j] = gate[i + j];
        g = silu8(g);
        for (int j = 0; i + j < n; j++) y[i + j] = g[j] * up[i + j];
    }
}

// Rotates one head (halves x1, x2): (x1 cos - x2 sin, x2 cos + x1 sin). y may be x.
static inline void rope_row(const float* x, const float* cos, const float* sin, int64_t half, float* y) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        const float as = a * sin[i], bs = b * sin[i];
        y[i] = __builtin_fmaf(a, cos[i], -bs);
        y[i + half] = __builtin_fmaf(b, cos[i], as);
    }
}

// Shape of one layer's attention.
struct Heads {
    int64_t heads, kv_heads, dim;
};

// What rope needs besides the token.
struct Rotary {
    const float* cos;  // [positions, dim / 2]
    const float* sin;
    const float* q_norm;  // [dim] or null
    const float* k_norm;
    float eps;
};

// One token: splits qkv, norms and rotates q and k, stores k and v at the token's slot.
static inline void rope_and_store_row(const float* qkv, const Heads& h, const Rotary& rotary,
                                      int64_t position, int64_t slot, float* q, float* k_cache,
                                      float* v_cache) {
    const int64_t d = h.dim, half = d / 2;
    const float* cos = rotary.cos + position * half;
    const float* sin = rotary.sin + position * half;
    auto head = [&](const float* x, const float* norm, float* y) {
        if (norm) {
            rms_norm_row(x, norm, d, rotary.eps, y);
            x = y;
        }
        rope_row(x, cos, sin, half, y);
    };
    for (int64_t i = 0; i < h.heads; i++) head(qkv + i * d, rotary.q_norm, q + i * d);
    float* k = k_cache + slot * h.kv_heads * d;
    float* v = v_cache + slot * h.kv_heads * d;
    for (int64_t i = 0; i < h.kv_heads; i++) head(qkv + (h.heads + i) * d, rotary.k_norm, k + i * d);
    std::memcpy(v, qkv + (h.heads + h.kv_heads) * d, sizeof(float) * h.kv_heads * d);
}
