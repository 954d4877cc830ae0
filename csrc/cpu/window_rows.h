// Window attention of one KV head, for each kind of CPU; see window_usage.cpp.
namespace kvpolicy::KVPOLICY_CPU {

#include "vectors.h"
#include "panels.h"

constexpr int kRows = kLanes == 16 ? 8 : 6;  // queries at a time: as registers allow

// Floats that usage_of_head needs for as many tokens.
static int64_t scratch_size(const Head& head, int64_t length) {
  return padded(length) * (head.size + kRows + head.group) + kRows * head.size;
}

// Which query a row is of: rows are those of the first query head, oldest first, then
// those of the next.
struct Row {
  int64_t head, step;
};

static inline Row row_of(const Head& head, int64_t index) {
  return {index / head.used, head.window - head.used + index % head.used};
}

// Copies queries of rows from `first` on to [channels / kWidth, kRows], zero past the
// last.
template <typename Number>
static void pack_queries(const Head& head, int64_t first, float* rows) {
  using Own = Product<Number>;
  const Number* queries[kRows];
  int64_t count = 0;
  for (; count < kRows; ++count) {
    const Row row = row_of(head, first + count);
    if (row.head >= head.group) break;
    queries[count] = static_cast<const Number*>(head.queries) +
                     row.head * head.head_stride + row.step * head.step_stride;
  }
  const int64_t width = (head.size + Own::kWidth - 1) / Own::kWidth;
  if (count < kRows) memset(rows, 0, width * kRows * sizeof(float));
  for (int64_t d = 0; d < head.size; d += Own::kWidth, rows += kRows) {
    const bool is_pair = d + 1 < head.size;
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = Own::pack(queries[i], head.query_stride, is_pair);
      queries[i] += Own::kWidth * head.query_stride;
    }
  }
}

// NaN is left out, and infinity is the largest number, so that it takes the whole row.
static inline Floats clean(Floats logit) {
  const Floats highest = Floats{} + __FLT_MAX__, none = Floats{} - __builtin_inff();
  logit = logit > highest ? highest : logit;
  return logit == logit ? logit : none;
}

// Writes logits of kRows queries over all keys to [kRows, tokens]; returns the largest.
template <typename Number>
static void logits_of_rows(const Head& head, const float* rows, const float* panels,
                           const int64_t* newest, float* logits, float* largest) {
  using Own = Product<Number>;
  const int64_t end = padded(head.length);
  const int64_t width = (head.size + Own::kWidth - 1) / Own::kWidth;
  const Floats none = Floats{} - __builtin_inff();
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Floats most[kRows];
  for (int i = 0; i < kRows; ++i) most[i] = none;
  for (int64_t token = 0; token < end; token += kPanel) {
    const float* panel = panels + token * width;
    Floats sum[kRows][2] = {};
    for (int64_t d = 0; d < width; ++d) {
      const Floats left = load(panel + d * kPanel);
      const Floats right = load(panel + d * kPanel + kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const float query = rows[d * kRows + i];
        sum[i][0] = Own::add(sum[i][0], left, query);
        sum[i][1] = Own::add(sum[i][1], right, query);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const int64_t first = token + half * kLanes;
        const Ints seen = lane <= (int32_t)(newest[i] - first);
        const Floats logit = seen ? clean(sum[i][half] * head.scale) : none;
        most[i] = logit > most[i] ? logit : most[i];
        store(logits + i * end + first, logit);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    largest[i] = -__FLT_MAX__;  // a row that shows nothing has no finite maximum
    for (int j = 0; j < kLanes; ++j)
      if (most[i][j] > largest[i]) largest[i] = most[i][j];
  }
}

// Turns a row of logits into weights, in place; returns one over the sum of them and the
// sink's. The sum is carried in float64, two vectors at a time.
static float weigh_row(float* logits, int64_t end, float largest, float sink) {
  largest = sink > largest ? sink : largest;
  const Floats least = Floats{} + kLeastLogit, none = Floats{};
  const Floats no_weight = Floats{} + kNoWeight;
  Doubles sums = {};
  for (int64_t token = 0; token < end; token += kPanel) {
    Floats both = none;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* place = logits + token + half * kLanes;
      const Floats logit = load(place) - largest;
      Floats weight = exp_below_one(logit > least ? logit : least);
      weight = weight > no_weight ? weight : none;
      store(place, weight);
      both += weight;
    }
    sums += __builtin_convertvector(both, Doubles);
  }
  double total = std::exp((double)sink - largest);
  for (int j = 0; j < kLanes; ++j) total += sums[j];
  return 1.0f / (float)(total > 1 ? total : 1.0);
}

template <typename Number>
static void usage_of_head_as(const Head& head, float* scratch) {
  const int64_t end = padded(head.length), num_rows = head.group * head.used;
  float* panels = scratch;
  float* logits = panels + end * head.size;
  float* sums = logits + end * kRows;
  float* rows = sums + end * head.group;
  pack_keys<Number, Product<Number>>(head, panels);
  memset(sums, 0, end * head.group * sizeof(float));
  for (int64_t first = 0; first < num_rows; first += kRows) {
    int64_t newest[kRows];
    float largest[kRows];
    for (int i = 0; i < kRows; ++i)
      newest[i] = head.length - head.window + row_of(head, first + i).step;
    pack_queries<Number>(head, first, rows);
    logits_of_rows<Number>(head, rows, panels, newest, logits, largest);
    for (int64_t i = 0; i < kRows && first + i < num_rows; ++i) {
      const Row row = row_of(head, first + i);
      float* weights = logits + i * end;
      float* sum = sums + row.head * end;
      const float sink = head.sinks ? head.sinks[row.head] : -__builtin_inff();
      const float share = weigh_row(weights, end, largest[i], sink);
      for (int64_t token = 0; token < end; token += kLanes)
        store(sum + token, load(sum + token) + load(weights + token) * share);
      if (row.step < head.window - 1) continue;
      float* last = head.last + row.head * head.result_stride;
      for (int64_t token = 0; token < head.length; ++token)
        last[token] = weights[token] * share;
    }
  }
  for (int64_t group = 0; group < head.group; ++group) {
    float* mean = head.mean + group * head.result_stride;
    for (int64_t token = 0; token < head.length; ++token)
      mean[token] = sums[group * end + token] / (float)head.used;
  }
}

static void usage_of_head(const Head& head, ScalarType type, float* scratch) {
  if (type == ScalarType::Float) return usage_of_head_as<float>(head, scratch);
  if (type == ScalarType::Half) return usage_of_head_as<Half>(head, scratch);
  return usage_of_head_as<BFloat16>(head, scratch);
}

}  // namespace kvpolicy::KVPOLICY_CPU
