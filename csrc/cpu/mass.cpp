// Turns the window's attention into mass: smooths it over neighbours, normalises it, and
// mixes in the moving average. Each number is rounded as in kernels/window_usage.py and
// kernels/segment_quota.py, in the same order.
#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "best.h"

// Where a CPU could fuse them, a product is still rounded before it is added.
#pragma GCC optimize("fp-contract=off")

namespace {

using namespace kvpolicy;

constexpr double kMassEps = 1e-12;
constexpr double kUnits = 4294967296.0;     // 2^32, of a row's largest value
constexpr double kWhole = 6755399441055744.0;  // 1.5 * 2^52: the sum has no fraction

void check_counts(const char* name, const Tensor& counts, int64_t rows) {
  check(name, counts, ScalarType::Long, 1);
  STD_TORCH_CHECK(counts.size(0) == rows && counts.is_contiguous(), name, ": expected ",
                  rows, " contiguous entries");
}

// pooled = means of `kernel` neighbours among the older tokens; the newest get the
// highest of them, or zero.
void pooled_usage(Tensor pooled, Tensor usage, Tensor lengths, Tensor window,
                  int64_t kernel, bool pads) {
  const int64_t rows = usage.size(0), tokens = usage.size(1), half = kernel / 2;
  check_rows("pooled", pooled, ScalarType::Float, rows, tokens);
  check_rows("usage", usage, ScalarType::Float, rows, tokens);
  check_counts("lengths", lengths, rows);
  check_counts("window", window, rows);
  const auto means = write<float>(pooled);
  const auto usages = read<float>(usage);
  const int64_t* held = lengths.const_data_ptr<int64_t>();
  const int64_t* newest = window.const_data_ptr<int64_t>();
  torch::stable::parallel_for(0, rows, 1, [&](int64_t row, int64_t end) {
    std::vector<float> padded(tokens + kernel, 0.0f);
    for (; row < end; ++row) {
      float* mean = means[row];
      const int64_t length = std::min(held[row], tokens);
      const int64_t older = std::clamp<int64_t>(held[row] - newest[row], 0, tokens);
      std::fill(padded.begin(), padded.end(), 0.0f);
      std::copy(usages[row], usages[row] + older, padded.begin() + half);
      std::fill(mean, mean + tokens, 0.0f);
      for (int64_t k = 0; k < kernel; ++k)
        for (int64_t t = 0; t < older; ++t) mean[t] += padded[t + k];
      for (int64_t t = 0; t < older; ++t) mean[t] /= static_cast<float>(kernel);
      if (!pads) continue;
      float highest = older < tokens ? 0.0f : -__builtin_inff();
      for (int64_t t = 0; t < older; ++t)
        highest = mean[t] > highest || mean[t] != mean[t] ? mean[t] : highest;
      std::fill(mean + older, mean + std::max(older, length), highest);
    }
  });
}

// Scales a row's values to sum 1, in place: shifted by a little, rounded to a fraction
// of the largest, and added up, which is exact in any order.
void normalise(double* values, int64_t length) {
  constexpr int64_t kAtOnce = 4;
  double highest[kAtOnce] = {}, totals[kAtOnce] = {};
  for (int64_t t = 0; t < length; ++t) {
    double value = values[t] > 0 ? values[t] : 0;  // NaN is not
    value = value < __builtin_inf() ? value : __FLT_MAX__;
    values[t] = value + kMassEps;
  }
  for (int64_t t = 0; t < length; ++t)
    highest[t % kAtOnce] = std::max(highest[t % kAtOnce], values[t]);
  const double most = *std::max_element(highest, highest + kAtOnce);
  for (int64_t t = 0; t < length; ++t) {
    values[t] = (values[t] / most * kUnits + kWhole) - kWhole;
    totals[t % kAtOnce] += values[t];
  }
  const double total = std::accumulate(totals, totals + kAtOnce, 0.0);
  for (int64_t t = 0; t < length; ++t) values[t] /= total;
}

// mass = mix * usage + (1 - mix) * average, where updated = average = decay * credit +
// (1 - decay) * usage; usage and average count normalised.
void credited_mass(Tensor mass, Tensor updated, Tensor usage, Tensor lengths,
                   std::optional<Tensor> credit, double decay, double mix) {
  const int64_t rows = usage.size(0), tokens = usage.size(1);
  check_rows("mass", mass, ScalarType::Double, rows, tokens);
  check_rows("updated", updated, ScalarType::Float, rows, tokens);
  check_rows("usage", usage, usage.scalar_type(), rows, tokens);
  check_counts("lengths", lengths, rows);
  if (credit.has_value())
    check_rows("credit", *credit, credit->scalar_type(), rows, tokens);
  const auto masses = write<double>(mass);
  const auto averages = write<float>(updated);
  const int64_t* held = lengths.const_data_ptr<int64_t>();
  with_type_of(usage, [&](auto zero) {
    const auto usages = read<decltype(zero)>(usage);
    with_type_of(credit.value_or(usage), [&](auto old_zero) {
      using Old = decltype(old_zero);
      const auto credits = credit.has_value() ? read<Old>(*credit) : Rows<const Old>{};
      torch::stable::parallel_for(0, rows, 1, [&](int64_t row, int64_t end) {
        std::vector<double> past(tokens);
        for (; row < end; ++row) {
          const int64_t length = std::clamp<int64_t>(held[row], 0, tokens);
          double* own = masses[row];
          float* average = averages[row];
          for (int64_t t = 0; t < length; ++t) own[t] = to_float(usages[row][t]);
          std::fill(own + length, own + tokens, 0.0);
          std::fill(average + length, average + tokens, 0.0f);
          normalise(own, length);
          for (int64_t t = 0; t < length; ++t) {
            past[t] = (1 - decay) * own[t];
            if (credit.has_value()) past[t] = decay * to_float(credits[row][t]) + past[t];
            average[t] = static_cast<float>(past[t]);
          }
          if (!credit.has_value()) continue;
          normalise(past.data(), length);
          for (int64_t t = 0; t < length; ++t)
            own[t] = mix * own[t] + (1 - mix) * past[t];
        }
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("credited_mass", TORCH_BOX(&credited_mass));
  library.impl("pooled_usage", TORCH_BOX(&pooled_usage));
}
