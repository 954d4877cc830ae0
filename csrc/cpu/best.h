// The order of tokens of kernels/ranking.py: higher score first, NaN and minus infinity
// last, ties to the later position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "host.h"
#include "numbers.h"

namespace kvpolicy {

// Numbers whose order is that of scores and positions, no two of a row equal.
using ShortRank = uint64_t;
using LongRank = unsigned __int128;

// As many bits as the scores need; rows have less than 2^32 tokens.
template <typename Number>
using RankOf = std::conditional_t<sizeof(Number) == 8, LongRank, ShortRank>;

template <typename Rank, typename Bits, typename Float>
Rank rank_of_bits(Float score, int64_t position) {
  if (score != score) score = -__builtin_inf();
  score += 0;  // turns -0.0 into 0.0
  Bits bits;
  memcpy(&bits, &score, sizeof(bits));
  constexpr int kWidth = 8 * sizeof(Bits);
  bits ^= bits >> (kWidth - 1) ? ~Bits{0} : Bits{1} << (kWidth - 1);
  return Rank{bits} << kWidth | static_cast<Bits>(position);
}

inline ShortRank rank_of(float score, int64_t position) {
  return rank_of_bits<ShortRank, uint32_t>(score, position);
}

inline LongRank rank_of(double score, int64_t position) {
  return rank_of_bits<LongRank, uint64_t>(score, position);
}

inline int64_t position_of(ShortRank rank) { return static_cast<uint32_t>(rank); }

inline int64_t position_of(LongRank rank) { return static_cast<uint64_t>(rank); }

// Marks the tokens of the `count` highest of the ranks [begin, end), which it reorders.
template <typename Rank>
void mark_best(Rank* begin, Rank* end, int64_t count, bool* marked) {
  if (count <= 0) return;
  if (count < end - begin) {
    std::nth_element(begin, begin + count - 1, end, std::greater<Rank>());
    end = begin + count;
  }
  for (; begin < end; ++begin) marked[position_of(*begin)] = true;
}

// Calls run(Number{}), where Number is the type of the scores.
template <typename Run>
void with_type_of(const Tensor& score, const Run& run) {
  switch (score.scalar_type()) {
    case ScalarType::Half:
      return run(Half{});
    case ScalarType::BFloat16:
      return run(BFloat16{});
    case ScalarType::Float:
      return run(float{});
    case ScalarType::Double:
      return run(double{});
    default:
      STD_TORCH_CHECK(false, "score: expected floating point");
  }
}

}  // namespace kvpolicy
