// The order of tokens of kernels/ranking.py: higher score first, NaN and minus infinity
// last, ties to the later position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>

#include "host.h"
#include "numbers.h"

namespace kvpolicy {

// Numbers whose order is that of scores and positions, no two of a row equal.
using Rank = unsigned __int128;

inline Rank rank_of(double score, int64_t position) {
  if (score != score) score = -__builtin_inf();
  score += 0.0;  // turns -0.0 into 0.0
  uint64_t bits;
  memcpy(&bits, &score, sizeof(bits));
  bits ^= bits >> 63 ? ~uint64_t{0} : uint64_t{1} << 63;
  return Rank{bits} << 64 | static_cast<uint64_t>(position);
}

// Marks the tokens of the `count` highest of the ranks [begin, end), which it reorders.
inline void mark_best(Rank* begin, Rank* end, int64_t count, bool* marked) {
  if (count <= 0) return;
  if (count < end - begin) {
    std::nth_element(begin, begin + count - 1, end, std::greater<Rank>());
    end = begin + count;
  }
  for (; begin < end; ++begin) marked[static_cast<uint64_t>(*begin)] = true;
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
