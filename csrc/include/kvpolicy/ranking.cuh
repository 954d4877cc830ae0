// Marks the must-keep tokens of each row and the best others, up to a total budget.
#pragma once

#include <kvpolicy/radix_select.cuh>

namespace kvpolicy {

template <typename Bits>
struct TopK {
  Rows<const Bits> score;      // [R, T]
  Rows<const bool> must_keep;  // [R, T]
  Rows<const bool> valid;      // [R, T]
  Rows<bool> marked;           // [R, T], output
  const int64_t* budgets;      // [R]; null if all rows have the same budget
  int64_t budget;              // of every row, if budgets is null
  int32_t num_tokens;          // T
};

template <typename Bits>
struct TopKRow {
  static constexpr int32_t num_groups = 1;
  const Bits* score;
  const bool* must_keep;
  const bool* valid;
  bool* marked;
  int32_t num_tokens;
  int32_t missing;  // tokens to select besides the must-keep ones

  __device__ bool is_kept(int32_t at) const { return must_keep[at] && valid[at]; }
  __device__ int32_t group(int32_t at) const {
    return valid[at] && !must_keep[at] ? 0 : kNobody;
  }
  __device__ int32_t quota(int32_t) const { return missing; }
};

// Marks the tokens of row blockIdx.x.
template <typename Type>
__global__ void __launch_bounds__(kSelectThreads)
    mark_top_k(TopK<typename Type::Bits> rows) {
  __shared__ Search<typename Type::Rank, 1> search;
  const int64_t index = blockIdx.x;
  TopKRow<typename Type::Bits> row{rows.score[index],  rows.must_keep[index],
                                   rows.valid[index],  rows.marked[index],
                                   rows.num_tokens,    0};
  int32_t kept = 0;
  for (int32_t first = 0; first < row.num_tokens; first += kSelectThreads) {
    const int32_t at = first + threadIdx.x;
    kept += __syncthreads_count(at < row.num_tokens && row.is_kept(at));
  }
  const int64_t budget = rows.budgets == nullptr ? rows.budget : rows.budgets[index];
  // Clamping to 0..T does not change the result and makes the budget fit into int32.
  const int64_t within = min(max(budget, int64_t{0}), int64_t{row.num_tokens});
  row.missing = static_cast<int32_t>(within) - kept;
  mark_best<Type, 1>(row, search);
}

}  // namespace kvpolicy
