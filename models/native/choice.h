// The best or the n best noised scores of a row, from its logits in blocks.
#pragma once
#include <cmath>

#include "noise.h"

constexpr int kMaxTop = 64;
constexpr float kLowest = -INFINITY;

// The highest score.
struct Best {
    float value = kLowest;
    int64_t index = 0;

    float floor() const { return value; }

    SSD_INLINE void keep(int64_t t, float s) {
        if (s > value) value = s, index = t;  // ties keep the lower, earlier id
    }
};

// The n highest scores, highest first, equal ones by rising id; places not taken yet hold -inf.
class Top {
  public:
    explicit Top(int n) : n_(n), blocks_((n + 7) / 8) {
        for (float& v : values_) v = kLowest;
        for (int32_t& i : indices_) i = -1;
        values_[7] = INFINITY;  // stands before the first place
    }

    float floor() const { return values_[kFirst + n_ - 1]; }
    const float* values() const { return values_ + kFirst; }
    const int32_t* indices() const { return indices_ + kFirst; }

    // All that is lower moves on by one place; ties keep the lower, earlier id before.
    void keep(int64_t t, float s) {
        const f32x8 score = splat(s);
        const i32x8 token = (i32x8){} + (int32_t)t;
        for (int at = kFirst + 8 * (blocks_ - 1); at >= kFirst; at -= 8) {
            const f32x8 here = load8(values_ + at), before = load8(values_ + at - 1);
            const i32x8 here_id = (i32x8)load_bits8(indices_ + at);
            const i32x8 before_id = (i32x8)load_bits8(indices_ + at - 1);
            const i32x8 stays = here >= score, follows = before >= score;
            store8(values_ + at, select8(stays, here, select8(follows, score, before)));
            const i32x8 id = stays ? here_id : follows ? token : before_id;
            std::memcpy(indices_ + at, &id, sizeof id);
        }
    }

  private:
    static constexpr int kFirst = 8;
    int n_, blocks_;
    float values_[kFirst + kMaxTop];
    int32_t indices_[kFirst + kMaxTop];
};

// Offers a row's logits, by rising token id, to what `Kept` (Best or Top) holds. Noise is a pure
// function of (key, token), so a token whose hash is too high for its logit is passed over without
// computing its noise; that is nearly all of them. The others wait until there are eight to take
// logarithms of, in order. Meanwhile the floor is stale: too low, never too high.
template <class Kept>
class Choice {
  public:
    template <class... Arguments>
    explicit Choice(const RowNoise& row, Arguments... arguments) : row_(row), kept_(arguments...) {}

    // Tokens t..t+8N-1, of which the first `count` exist. Scores that are NaN or -inf are ignored.
    template <int N>
    SSD_INLINE void offer(const f32x8* logits, int64_t t, int64_t count) {
        f32x8 score[N], top = splat(kLowest);
        for (int i = 0; i < N; i++) {
            score[i] = logits[i] * row_.scale;
            top = max8(score[i], top);
        }
        if (!row_.noisy) {
            if (any8(top > splat(kept_.floor()))) keep_block<N>(score, t, count);
            return;
        }
        const f32x8 deficit = kept_.floor() - top;
        if (!any8(deficit < splat(kGumbelMax))) return;
        const u64x4 counters = counters4(row_.key, t);
        u32x8 raw[N];
        u32x8 least = raw[0] = raw_hash8(counters);
        for (int i = 1; i < N; i++)
            least = min8(raw[i] = raw_hash8(counters + 8 * i * kGolden), least);
        if (any8(may_exceed8(least, deficit))) wait_block<N>(score, raw, t, count);
    }

    const Kept& finish() {
        settle();
        return kept_;
    }

  private:
    // lane(j) for the bits of `lanes` below `count`.
    template <class Lane>
    static SSD_INLINE void each(uint32_t lanes, int64_t count, const Lane& lane) {
        if (count < 32) lanes &= (1u << count) - 1;
        for (; lanes; lanes &= lanes - 1) lane(__builtin_ctz(lanes));
    }

    template <int N>
    __attribute__((noinline)) void keep_block(const f32x8* score, int64_t t, int64_t count) {
        static_assert(N <= 4);
        uint32_t lanes = 0;
        for (int i = 0; i < N; i++) lanes |= lanes8(score[i] > splat(kept_.floor())) << (8 * i);
        each(lanes, count, [&](int j) { kept_.keep(t + j, score[j / 8][j % 8]); });
    }

    template <int N>
    __attribute__((noinline)) void wait_block(const f32x8* score, const u32x8* raw, int64_t t,
                                              int64_t count) {
        static_assert(N <= 4);
        uint32_t lanes = 0;
        for (int i = 0; i < N; i++)
            lanes |= lanes8(may_exceed8(raw[i], kept_.floor() - score[i])) << (8 * i);
        each(lanes, count, [&](int j) {
            scores_[waiting_] = score[j / 8][j % 8];
            hashes_[waiting_] = raw[j / 8][j % 8];
            tokens_[waiting_] = t + j;
            if (++waiting_ == 8) settle();
        });
    }

    __attribute__((noinline)) void settle() {
        const f32x8 g = gumbel_of(uniform8(finish_hash8(load_bits8(hashes_))));
        store8(scores_, load8(scores_) + g);
        each(lanes8(load8(scores_) > splat(kept_.floor())), waiting_,
             [&](int j) { kept_.keep(tokens_[j], scores_[j]); });
        waiting_ = 0;
    }

    RowNoise row_;
    Kept kept_;
    int waiting_ = 0;
    float scores_[8] = {};
    uint32_t hashes_[8] = {};
    int64_t tokens_[8] = {};
};
