// The softmax of the loss on a CPU: losses of a chunk's rows, and the gradient of their sum to the
// logits, written over the logits. Logits are (V, R): the rows of one vocabulary entry are
// contiguous, and sums over the vocabulary run down columns, 16 at a time.
//
// Built by lm/softmax.py; lm/loss.py has the same in torch operations.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// Partial sums over so many parts of the vocabulary, added in order: the result does not depend on
// the number of threads.
constexpr int kParts = 16;
// What stays in the first cache between the maximum and the sum: 32 entries of 128 rows.
constexpr int64_t kEntries = 32;
constexpr int64_t kRows = 128;

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, Bf16* to) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x for x <= 0, to 2 units in the last place; 0 below the smallest normal number.
// Source: Cephes, exp2f.c.
inline float exponential(float x) {
  float y = x * 1.44269504f;
  float whole = std::nearbyint(y);
  float part = y - whole;
  float power = 1.535336188319500e-4f;
  power = power * part + 1.339887440266574e-3f;
  power = power * part + 9.618437357674640e-3f;
  power = power * part + 5.550332471162809e-2f;
  power = power * part + 2.402264791363012e-1f;
  power = power * part + 6.931472028550421e-1f;
  power = power * part + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &power, 4);
  bits += static_cast<int32_t>(static_cast<uint32_t>(static_cast<int32_t>(whole)) << 23);
  std::memcpy(&power, &bits, 4);
  return y < -126.0f ? 0.0f : power;
}

// Largest logit of each row in entries from..end of the vocabulary, and the sum of exponentials.
template <typename T>
void part_sums(const T* __restrict x, int64_t from, int64_t end, int64_t rows,
               float* __restrict tops, float* __restrict sums) {
  for (int64_t r = 0; r < rows; r++) {
    tops[r] = -INFINITY;
    sums[r] = 0;
  }
  for (int64_t v0 = from; v0 < end; v0 += kEntries) {
    int64_t v1 = v0 + kEntries < end ? v0 + kEntries : end;
    for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
      int64_t n = rows - r0 < kRows ? rows - r0 : kRows;
      float top[kRows], sum[kRows];
      for (int64_t r = 0; r < n; r++) top[r] = tops[r0 + r];
      for (int64_t v = v0; v < v1; v++) {
        const T* __restrict row = x + v * rows + r0;
        for (int64_t r = 0; r < n; r++) {
          float logit = widen(row[r]);
          top[r] = logit > top[r] ? logit : top[r];
        }
      }
      for (int64_t r = 0; r < n; r++) {
        sum[r] = sums[r0 + r] * exponential(tops[r0 + r] - top[r]);
        tops[r0 + r] = top[r];
      }
      for (int64_t v = v0; v < v1; v++) {
        const T* __restrict row = x + v * rows + r0;
        for (int64_t r = 0; r < n; r++) sum[r] += exponential(widen(row[r]) - top[r]);
      }
      for (int64_t r = 0; r < n; r++) sums[r0 + r] = sum[r];
    }
  }
}

// x (V, R) in and out; target (R), below 0 where ignored; loss (R); room for 2 * kParts + 1 rows.
template <typename T>
void softmax(T* __restrict x, const int64_t* __restrict target, float* __restrict loss,
             float* __restrict room, int64_t vocab, int64_t rows, int threads) {
  float* __restrict log_sums = room + 2 * kParts * rows;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int part = 0; part < kParts; part++) {
      float* tops = room + 2 * part * rows;
      part_sums(x, vocab * part / kParts, vocab * (part + 1) / kParts, rows, tops, tops + rows);
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      float top = -INFINITY, sum = 0;
      for (int part = 0; part < kParts; part++) {
        float other = room[2 * part * rows + r];
        top = other > top || other != other ? other : top;
      }
      for (int part = 0; part < kParts; part++) {
        sum += room[(2 * part + 1) * rows + r] * std::exp(room[2 * part * rows + r] - top);
      }
      bool real = target[r] >= 0;
      // The difference first: of a confident row it is 0, and what counts is in the logarithm.
      loss[r] = real ? std::log(sum) + (top - widen(x[target[r] * rows + r])) : 0.0f;
      log_sums[r] = real ? top + std::log(sum) : INFINITY;  // e^(x - inf) is 0
    }
#pragma omp for schedule(static)
    for (int64_t v = 0; v < vocab; v++) {
      T* __restrict row = x + v * rows;
      for (int64_t r = 0; r < rows; r++) narrow(exponential(widen(row[r]) - log_sums[r]), row + r);
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      // p - 1 without its cancellation.
      if (target[r] >= 0) narrow(std::expm1(-loss[r]), x + target[r] * rows + r);
    }
  }
}

}  // namespace

extern "C" void softmax_bf16(void* x, const int64_t* target, float* loss, float* room,
                             int64_t vocab, int64_t rows, int threads) {
  softmax(static_cast<Bf16*>(x), target, loss, room, vocab, rows, threads);
}

extern "C" void softmax_fp32(void* x, const int64_t* target, float* loss, float* room,
                             int64_t vocab, int64_t rows, int threads) {
  softmax(static_cast<float*>(x), target, loss, room, vocab, rows, threads);
}

extern "C" int64_t room_rows() { return 2 * kParts + 1; }
