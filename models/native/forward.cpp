// A whole forward pass in one call: the same kernels, without a call per operation.
#include "attention.h"
#include "gemm.h"
#include "layers.h"
#include "threads.h"

struct Layer {
    const float* input_norm;
    const Packed* qkv;
    const float* qkv_bias;  // every bias may be null
    const float* q_norm;    // null without per-head norms
    const float* k_norm;
    const Packed* o;
    const float* o_bias;
    const float* post_norm;
    const Packed* gate_up;
    const float* gate_up_bias;
    const Packed* down;
    const float* down_bias;
    float* k_cache;
    float* v_cache;
};

struct Model {
    const Layer* layers;
    int64_t count, hidden, intermediate;
    Heads heads;
    const float* cos;  // [positions, dim / 2]
    const float* sin;
    const float* norm;
    float eps, scale;
};

namespace {

// Below this many floats each thread norms all rows for itself rather than wait for the others.
constexpr int64_t kRepeatNorm = 16384;

// One thread's walk through the layers. x [rows, hidden] is the residual stream.
struct Walk {
    const Model& m;
    const Batch& b;
    Meeting& meeting;
    float* x;
    int64_t rows;
    int part, parts;
    float *normed, *qkv, *q, *mixed, *gate_up, *act, *picked;

    // `scratch` holds ssd_forward_scratch floats, `stream` the embedded tokens.
    Walk(const Model& model, const Batch& batch, Meeting& threads, float* stream, float* scratch,
         int p, int n)
        : m(model), b(batch), meeting(threads), x(stream), rows(batch.tokens), part(p), parts(n) {
        const int64_t t = b.tokens, d = m.heads.dim;
        normed = scratch + (repeats() ? part * t * m.hidden : 0);
        qkv = scratch + parts * t * m.hidden;
        q = qkv + t * (m.heads.heads + 2 * m.heads.kv_heads) * d;
        mixed = q + t * m.heads.heads * d;
        gate_up = mixed + t * m.heads.heads * d;
        act = gate_up + t * 2 * m.intermediate;
        picked = act + t * m.intermediate;
    }

    bool repeats() const { return b.tokens * m.hidden <= kRepeatNorm; }

    void meet() const { meeting.wait(parts); }

    void norm(const float* weight) const {
        const Range mine = repeats() ? Range{0, rows} : share(rows, part, parts);
        for (int64_t t = mine.begin; t < mine.end; t++)
            rms_norm_row(x + t * m.hidden, weight, m.hidden, m.eps, normed + t * m.hidden);
        if (!repeats()) meet();
    }

    void linear(const Packed& w, const float* in, const float* bias, const float* residual,
                float* y) const {
        const Range r = share(w.panels(), part, parts);
        sweep(w, in, w.k, rows, r.begin, r.end, LinearOut(w, bias, residual, w.n, y, w.n));
    }

    // act = silu(gate) * up; a thread activates the columns it computed where panels allow.
    void mlp_in(const Layer& l) const {
        const Packed& w = *l.gate_up;
        const int64_t wide = m.intermediate;
        if (wide % kPanel) {
            linear(w, normed, l.gate_up_bias, nullptr, gate_up);
            meet();
            const Range mine = share(rows, part, parts);
            for (int64_t t = mine.begin; t < mine.end; t++)
                silu_mul_row(gate_up + t * 2 * wide, gate_up + t * 2 * wide + wide, wide,
                             act + t * wide);
            return;
        }
        const int64_t half = wide / kPanel;
        const Range r = share(half, part, parts);
        const LinearOut out(w, l.gate_up_bias, nullptr, 0, gate_up, w.n);
        sweep(w, normed, w.k, rows, r.begin, r.end, out);
        sweep(w, normed, w.k, rows, half + r.begin, half + r.end, out);
        const int64_t c = r.begin * kPanel, count = (r.end - r.begin) * kPanel;
        for (int64_t t = 0; t < rows; t++)
            silu_mul_row(gate_up + t * 2 * wide + c, gate_up + t * 2 * wide + wide + c, count,
                         act + t * wide + c);
    }

    // K and V of all tokens to the cache, q aside.
    void store(const Layer& l) const {
        norm(l.input_norm);
        linear(*l.qkv, normed, l.qkv_bias, nullptr, qkv);
        meet();
        const Rotary rotary{m.cos, m.sin, l.q_norm, l.k_norm, m.eps};
        const Range mine = share(rows, part, parts);
        for (int64_t t = mine.begin; t < mine.end; t++)
            rope_and_store_row(qkv + t * l.qkv->n, m.heads, rotary, b.positions[t], b.slots[t],
                               q + t * m.heads.heads * m.heads.dim, l.k_cache, l.v_cache);
        meet();
    }

    void attend(const Layer& l) const {
        attention_part(q, l.k_cache, l.v_cache, m.heads, b, m.scale, mixed, part, parts);
        meet();
    }

    void finish(const Layer& l) const {
        linear(*l.o, mixed, l.o_bias, x, x);
        meet();
        norm(l.post_norm);
        mlp_in(l);
        meet();
        linear(*l.down, act, l.down_bias, x, x);
        meet();
    }

    // Go on with `count` rows of x and mixed only, which become rows 0, 1, ...
    void pick(const int64_t* wanted, int64_t count) {
        const int64_t width = m.heads.heads * m.heads.dim;
        if (count == rows) return;
        const Range mine = share(count, part, parts);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            std::memcpy(picked + i * m.hidden, x + wanted[i] * m.hidden, sizeof(float) * m.hidden);
            std::memcpy(picked + b.tokens * m.hidden + i * width, mixed + wanted[i] * width,
                        sizeof(float) * width);
        }
        x = picked;
        mixed = picked + b.tokens * m.hidden;
        rows = count;
        meet();
    }

    void run(const int64_t* wanted, int64_t count, float* out) {
        for (int64_t i = 0; i < m.count; i++) {
            const Layer& l = m.layers[i];
            const bool last = i + 1 == m.count;
            store(l);
            if (last && count == 0) return;
            attend(l);
            if (last) pick(wanted, count);
            finish(l);
        }
        const Range mine = share(rows, part, parts);
        for (int64_t t = mine.begin; t < mine.end; t++)
            rms_norm_row(x + t * m.hidden, m.norm, m.hidden, m.eps, out + t * m.hidden);
    }
};

}  // namespace

extern "C" {

// Floats of scratch that ssd_forward needs.
int64_t ssd_forward_scratch(const Model* m, int64_t tokens, int threads) {
    const int64_t heads = 4 * m->heads.heads + 2 * m->heads.kv_heads;
    return tokens * (((threads > 1 ? threads : 1) + 1) * m->hidden + heads * m->heads.dim +
                     3 * m->intermediate);
}

// x [tokens, hidden]: embedded tokens, overwritten; out [count, hidden]: normed last hidden states
// of tokens `wanted`. The last layer computes nothing for other tokens after their K and V.
void ssd_forward(const Model* m, const Batch* b, float* x, const int64_t* wanted, int64_t count,
                 float* out, float* scratch, int threads) {
    Meeting meeting;
    parallel(threads, [&](int part, int parts) {
        Walk walk(*m, *b, meeting, x, scratch, part, parts);
        walk.run(wanted, count, out);
    });
}
}
