// Packed weights and the micro kernel shared by the linear layers and the sampling head.
//
// A [N, K] matrix is stored as panels of 16 outputs. Panel p holds, for k = 0..K-1, the 16 weights
// of outputs 16p..16p+15: as 16 floats, or as 8 words whose low half is the bf16 of output j and
// whose high half that of output j + 8, so that a shift and a mask widen them. Missing outputs of
// the last panel are zero.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, ..., K-1, whatever the number of
// rows, threads or panels handled together: results are bitwise independent of the batch.
#pragma once
#include "vec.h"

constexpr int kPanel = 16;
constexpr int kMaxRows = 6;

struct Packed {
    const char* data;
    int64_t n, k;
    int64_t bf16;  // 1: bf16, 0: float32
    int64_t panels() const { return (n + kPanel - 1) / kPanel; }
    int64_t panel_bytes() const { return k * kPanel * (bf16 ? 2 : 4); }
};

// Receives finished tiles: acc[(r * panels + p) * 2 + h] holds outputs 16 (panel + p) + 8 h + lane
// of row `row + r`.
struct Emit {
    virtual void tile(int64_t row, int rows, int64_t panel, int panels, const f32x8* acc) const = 0;
};

// x W^T for rows [0, m) of x (ldx floats apart) and panels [begin, end).
void sweep(const Packed& w, const float* x, int64_t ldx, int64_t m, int64_t begin, int64_t end,
           const Emit& emit);

// y = x W^T + bias + residual (the last two optional, added in this order).
struct LinearOut final : Emit {
    const Packed& w;
    const float* bias;
    const float* residual;
    int64_t ldr;
    float* y;
    int64_t ldy;

    LinearOut(const Packed& weight, const float* b, const float* add, int64_t ld_add, float* out,
              int64_t ld_out)
        : w(weight), bias(b), residual(add), ldr(ld_add), y(out), ldy(ld_out) {}

    void tile(int64_t row, int rows, int64_t panel, int panels, const f32x8* acc) const override {
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < 2 * panels; p++)
                put(row + r, panel * kPanel + p * 8, acc[r * panels * 2 + p]);
    }

    SSD_INLINE void put(int64_t r, int64_t c, f32x8 v) const {
        if (c + 8 <= w.n) {
            if (bias) v += load8(bias + c);
            if (residual) v += load8(residual + r * ldr + c);
            store8(y + r * ldy + c, v);
            return;
        }
        for (int j = 0; c + j < w.n; j++) {
            float s = v[j];
            if (bias) s += bias[c + j];
            if (residual) s += residual[r * ldr + c + j];
            y[r * ldy + c + j] = s;
        }
    }
};
