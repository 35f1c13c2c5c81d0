// C entry points of the row-wise operations.
#include "layers.h"
#include "threads.h"

extern "C" {

void ssd_rms_norm(const float* x, int64_t ldx, int64_t m, int64_t n, const float* weight, float eps,
                  float* y, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m, part, parts);
        for (int64_t r = range.begin; r < range.end; r++)
            rms_norm_row(x + r * ldx, weight, n, eps, y + r * n);
    });
}

// sum = x + residual, y = norm(sum)
void ssd_add_rms_norm(const float* x, int64_t ldx, const float* residual, int64_t ldr, int64_t m,
                      int64_t n, const float* weight, float eps, float* y, float* sum, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m, part, parts);
        for (int64_t r = range.begin; r < range.end; r++) {
            for (int64_t i = 0; i < n; i++) sum[r * n + i] = x[r * ldx + i] + residual[r * ldr + i];
            rms_norm_row(sum + r * n, weight, n, eps, y + r * n);
        }
    });
}

void ssd_silu_mul(const float* gate_up, int64_t ldx, int64_t m, int64_t n, float* y, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m, part, parts);
        for (int64_t r = range.begin; r < range.end; r++)
            silu_mul_row(gate_up + r * ldx, gate_up + r * ldx + n, n, y + r * n);
    });
}

// Rows of table [v, n] (bf16 as uint16, or float32), widened; zeros where an index is out of range.
void ssd_embed(const void* table, int64_t bf16, int64_t v, int64_t n, const int64_t* tokens,
               int64_t m, float* y) {
    for (int64_t r = 0; r < m; r++) {
        const int64_t t = tokens[r];
        float* out = y + r * n;
        if (t < 0 || t >= v)
            std::memset(out, 0, sizeof(float) * n);
        else if (bf16)
            for (int64_t i = 0; i < n; i++) out[i] = bf16_to_f32(((const uint16_t*)table)[t * n + i]);
        else
            std::memcpy(out, (const float*)table + t * n, sizeof(float) * n);
    }
}

void ssd_rope_and_store(const float* qkv, int64_t ldx, int64_t m, const Heads* heads,
                        const Rotary* rotary, const int64_t* positions, const int64_t* slots,
                        float* q, float* k_cache, float* v_cache, int threads) {
    parallel(threads, [&](int part, int parts) {
        const Range range = share(m, part, parts);
        for (int64_t r = range.begin; r < range.end; r++)
            rope_and_store_row(qkv + r * ldx, *heads, *rotary, positions[r], slots[r],
                               q + r * heads->heads * heads->dim, k_cache, v_cache);
    });
}
}
