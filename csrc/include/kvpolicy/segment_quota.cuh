// Marks the best tokens of each group of a row, up to the group's quota.
#pragma once

#include <kvpolicy/radix_select.cuh>

namespace kvpolicy {

constexpr int kQuotaGroups = 32;  // groups searched at a time

template <typename Bits>
struct Picks {
  Rows<const Bits> score;      // [R, T]
  Rows<const int64_t> group;   // [R, T]; values outside 0..S-1 mean no group
  Rows<const int64_t> quotas;  // [R, S]
  Rows<bool> marked;           // [R, T], output
  int32_t num_tokens;          // T
  int32_t num_groups;          // S
};

template <typename Bits>
struct PickRow {
  const Bits* score;
  const int64_t* groups;
  const int64_t* quotas;
  bool* marked;
  int32_t num_tokens;
  int32_t num_groups;

  __device__ bool is_kept(int32_t) const { return false; }
  __device__ int32_t group(int32_t at) const {
    const int64_t own = groups[at];
    return own >= 0 && own < num_groups ? static_cast<int32_t>(own) : kNobody;
  }
  __device__ int32_t quota(int32_t of) const {
    const int64_t within = min(max(quotas[of], int64_t{0}), int64_t{num_tokens});
    return static_cast<int32_t>(within);
  }
};

// Marks the tokens of row blockIdx.x.
template <typename Type>
__global__ void __launch_bounds__(kSelectThreads)
    mark_by_quota(Picks<typename Type::Bits> rows) {
  __shared__ Search<typename Type::Rank, kQuotaGroups> search;
  const int64_t index = blockIdx.x;
  const PickRow<typename Type::Bits> row{rows.score[index],  rows.group[index],
                                         rows.quotas[index], rows.marked[index],
                                         rows.num_tokens,    rows.num_groups};
  mark_best<Type, kQuotaGroups>(row, search);
}

}  // namespace kvpolicy
