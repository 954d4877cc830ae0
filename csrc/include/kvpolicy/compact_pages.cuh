// Moves tokens between slots of a pool of keys or values, as plain bytes.
//
// Vector is what one access moves: an unsigned integer type, or uint2 or uint4.
#pragma once

#include <cstdint>

namespace kvpolicy {

constexpr int kLanes = 8;  // threads side by side on one token, each with one Vector
constexpr int kThreads = 256;
constexpr int kTokens = kThreads / kLanes;  // of a pass
constexpr int kPasses = 4;                  // of a tile

struct Moves {
  char* slots;            // first slot of the pool
  int64_t distance;       // bytes between two slots
  int64_t token_bytes;    // bytes to move of each token
  const int64_t* source;  // [count] slot of each survivor, ascending within a row
  const int64_t* dest;    // [count] slot it goes to
  const bool* in_place;   // [count] the page stays in its row's list; null where all do
  char* scratch;          // [count, token_bytes]; null without in_place
  int64_t count;
};

// Bytes into a token at which this thread's Vector lies.
template <typename Vector>
__device__ inline int64_t column_of_thread() {
  const int64_t lane = threadIdx.x % kLanes;
  return (int64_t{blockIdx.y} * kLanes + lane) * sizeof(Vector);
}

template <typename Vector>
__device__ inline Vector* at(char* tokens, int64_t index, int64_t distance,
                             int64_t column) {
  return reinterpret_cast<Vector*>(tokens + index * distance + column);
}

// Walks the survivors of row blockIdx.x towards its end, a tile of them at a time.
//
// A row's sources ascend in the order of its page list, and each destination is at or
// before its source. Whatever a tile overwrites is therefore a source of this tile or
// of an earlier one, never of a later one.
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    move_in_place(Moves moves, const int64_t* first) {
  int64_t start = first[blockIdx.x];
  const int64_t end = first[blockIdx.x + 1];
  // No survivor lies in slot 0: in a row that begins there, none exists.
  if (start >= end || moves.source[start] == 0) return;

  const int64_t column = column_of_thread<Vector>();
  const bool has_column = column < moves.token_bytes;
  for (; start < end; start += kTokens * kPasses) {
    int64_t source[kPasses] = {}, dest[kPasses] = {};  // equal where nothing moves
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int64_t move = start + pass * kTokens + threadIdx.x / kLanes;
      if (!has_column || move >= end) continue;
      source[pass] = moves.source[move];
      dest[pass] = moves.dest[move];
      if (moves.in_place != nullptr && !moves.in_place[move]) {
        dest[pass] = source[pass];
      }
    }
    Vector tokens[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (source[pass] == dest[pass]) continue;
      tokens[pass] = *at<Vector>(moves.slots, source[pass], moves.distance, column);
    }
    // The barrier orders every read of the tile before its first write. One is enough:
    // a thread that runs ahead reads sources of the next tile, which nobody has
    // overwritten, and waits here before it writes.
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (source[pass] == dest[pass]) continue;
      *at<Vector>(moves.slots, dest[pass], moves.distance, column) = tokens[pass];
    }
  }
}

// Reads into scratch, or writes from it, what changes pages.
template <typename Vector, bool kToScratch>
__global__ void __launch_bounds__(kThreads) copy_changed(Moves moves) {
  const int64_t move = int64_t{blockIdx.x} * kTokens + threadIdx.x / kLanes;
  const int64_t column = column_of_thread<Vector>();
  if (move >= moves.count || column >= moves.token_bytes) return;
  const int64_t source = moves.source[move], dest = moves.dest[move];
  if (moves.in_place[move] || source == dest) return;

  Vector* place = at<Vector>(moves.scratch, move, moves.token_bytes, column);
  if constexpr (kToScratch) {
    *place = *at<Vector>(moves.slots, source, moves.distance, column);
  } else {
    *at<Vector>(moves.slots, dest, moves.distance, column) = *place;
  }
}

}  // namespace kvpolicy
