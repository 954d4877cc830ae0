// Marks the best tokens of each group of a row: one thread block per row, no sorting.
//
// A token's rank is an integer: its score, mapped so that the order is preserved, then
// its position. Ranks are unique; of equal scores the later position wins. The cut is
// the lowest rank that is selected. It is found one digit at a time, highest digit
// first: a histogram over the tokens that match the cut so far gives the next digit.
// Only integers are added, so the result does not depend on the order of threads.
//
// Source: radix selection (Alabi et al., Fast k-selection algorithms for graphics
// processing units, 2012).
#pragma once

#include <cstdint>

namespace kvpolicy {

constexpr int kSelectThreads = 512;
constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kPositionBits = 32;
constexpr int32_t kNobody = -1;  // group of tokens that do not compete

// A matrix with contiguous rows.
template <typename Number>
struct Rows {
  Number* first;
  int64_t distance;  // row stride, in numbers

  __device__ Number* operator[](int64_t row) const { return first + row * distance; }
};

// A floating-point type, described by its bit layout.
template <typename Unsigned, Unsigned kInfinityBits, typename RankBits>
struct Format {
  using Bits = Unsigned;
  using Rank = RankBits;  // wide enough for a score's key followed by a position
  static constexpr int kBits = 8 * sizeof(Bits);
  static constexpr Bits kSign = Bits{1} << (kBits - 1);
  static constexpr Bits kInfinity = kInfinityBits;
};
using Float16 = Format<uint16_t, 0x7C00, uint64_t>;
using BFloat16 = Format<uint16_t, 0x7F80, uint64_t>;
using Float32 = Format<uint32_t, 0x7F800000, uint64_t>;
using Float64 = Format<uint64_t, 0x7FF0000000000000, unsigned __int128>;

// Returns the rank of a token; higher is better. NaN counts as minus infinity and -0.0
// as 0.0.
template <typename Type>
__device__ inline typename Type::Rank rank_of(typename Type::Bits bits,
                                              int32_t position) {
  using Bits = typename Type::Bits;
  const Bits magnitude = bits & static_cast<Bits>(~Type::kSign);
  if (magnitude > Type::kInfinity) bits = Type::kSign | Type::kInfinity;
  if (magnitude == 0) bits = 0;
  const Bits key = (bits & Type::kSign) ? ~bits : bits | Type::kSign;
  return typename Type::Rank{key} << kPositionBits | static_cast<uint32_t>(position);
}

// State of the search over the kGroups groups that are searched at a time.
template <typename Rank, int kGroups>
struct Search {
  int32_t counts[kGroups][kDigits];  // tokens that match the cut so far, by next digit
  Rank cuts[kGroups];                // the digits of each cut that are known so far
  int32_t missing[kGroups];  // matching tokens still to select; 0: the cut is final
};

// Finds the next digit of a cut with one warp: the highest digit that selects enough
// tokens. The digit stays 0 if there are too few tokens. Clears the counts.
template <typename Rank>
__device__ inline void settle_digit(int32_t* counts, int shift, Rank* cut,
                                    int32_t* missing) {
  constexpr int kOwn = kDigits / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  int32_t* own = counts + lane * kOwn;
  int32_t sum = 0;
  for (int digit = 0; digit < kOwn; ++digit) sum += own[digit];
  int32_t above = sum;  // tokens with a digit of this lane or of a later lane
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int32_t later = __shfl_down_sync(kAllLanes, above, step);
    if (lane + step < kWarpSize) above += later;
  }
  int32_t left = *missing - (above - sum);
  __syncwarp();  // every lane has read *missing before one lane writes it
  if (left > 0 && left <= sum) {
    int digit = kOwn - 1;
    for (; own[digit] < left; --digit) left -= own[digit];
    *cut |= static_cast<Rank>(lane * kOwn + digit) << shift;
    *missing = own[digit] == left ? 0 : left;
  }
  for (int digit = 0; digit < kOwn; ++digit) own[digit] = 0;
  __syncwarp();
}

// Finds the cuts of kGroups groups from `first` on. All threads of the block call it.
template <typename Type, int kGroups, typename Row>
__device__ void find_cuts(const Row& row, int32_t first,
                          Search<typename Type::Rank, kGroups>& search) {
  using Rank = typename Type::Rank;
  for (int own = threadIdx.x; own < kGroups; own += kSelectThreads) {
    const int32_t group = first + own;
    const int32_t quota = group < row.num_groups ? row.quota(group) : 0;
    search.missing[own] = quota;
    search.cuts[own] = quota > 0 ? Rank{0} : ~Rank{0};
  }
  __syncthreads();
  constexpr int kTop = Type::kBits + kPositionBits - kDigitBits;
  for (int shift = kTop; shift >= 0; shift -= kDigitBits) {
    // This digit is 0 in every position.
    if (shift < kPositionBits && (row.num_tokens - 1) >> shift == 0) continue;
    for (int32_t at = threadIdx.x; at < row.num_tokens; at += kSelectThreads) {
      const int32_t own = row.group(at) - first;
      if (own < 0 || own >= kGroups || search.missing[own] <= 0) continue;
      // The token matches the cut so far if only the digit at `shift` is nonzero here.
      const Rank digit = (rank_of<Type>(row.score[at], at) ^ search.cuts[own]) >> shift;
      if (digit < kDigits) atomicAdd(&search.counts[own][static_cast<int>(digit)], 1);
    }
    __syncthreads();
    bool is_open = false;
    for (int own = threadIdx.x / kWarpSize; own < kGroups;
         own += kSelectThreads / kWarpSize) {
      if (search.missing[own] <= 0) continue;
      settle_digit(search.counts[own], shift, &search.cuts[own], &search.missing[own]);
      is_open |= search.missing[own] > 0;
    }
    if (!__syncthreads_or(is_open)) return;
  }
}

// Marks the best tokens of each group, up to its quota, and the tokens to keep anyway.
//
// Row has num_tokens, num_groups, score[position], marked[position], quota(group),
// group(position), which may return kNobody, and is_kept(position), which is false for
// tokens of a group.
template <typename Type, int kGroups, typename Row>
__device__ void mark_best(const Row& row,
                          Search<typename Type::Rank, kGroups>& search) {
  for (int digit = threadIdx.x; digit < kGroups * kDigits; digit += kSelectThreads) {
    search.counts[digit / kDigits][digit % kDigits] = 0;
  }
  int32_t first = 0;
  do {
    find_cuts<Type, kGroups>(row, first, search);
    for (int32_t at = threadIdx.x; at < row.num_tokens; at += kSelectThreads) {
      const int32_t own = row.group(at) - first;
      if (own >= 0 && own < kGroups) {
        row.marked[at] = rank_of<Type>(row.score[at], at) >= search.cuts[own];
      } else if (first == 0) {
        row.marked[at] = row.is_kept(at);  // later passes overwrite later groups
      }
    }
    __syncthreads();  // all threads have read these cuts
    first += kGroups;
  } while (first < row.num_groups);
}

}  // namespace kvpolicy
