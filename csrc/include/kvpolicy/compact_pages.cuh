// Moves tokens between slots of a pool of keys or values, as raw bytes.
//
// Vector is the type of one memory access: an unsigned integer, uint2 or uint4.
#pragma once

#include <cstdint>

namespace kvpolicy {

constexpr int kLanes = 8;  // adjacent threads per token, one Vector each
constexpr int kThreads = 256;
constexpr int kTokens = kThreads / kLanes;  // tokens per pass
constexpr int kPasses = 4;                  // passes per tile

struct Moves {
  char* slots;            // first slot of the pool
  int64_t distance;       // bytes between the starts of two slots
  int64_t token_bytes;    // bytes to move per token
  const int64_t* source;  // [count] slot of each kept token, ascending within a row
  const int64_t* dest;    // [count] destination slot
  const bool* in_place;   // [count] whether the page stays in its row; null: all do
  char* scratch;          // [count, token_bytes]; null without in_place
  int64_t count;
};

// Returns the byte offset of this thread's Vector within a token.
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

// Moves the kept tokens of row blockIdx.x tile by tile, from its start to its end.
//
// The sources of a row ascend in the order of its page list, and no destination is
// after its source. So a tile overwrites only slots that this tile or an earlier one
// reads, never slots that a later tile reads.
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    move_in_place(Moves moves, const int64_t* first) {
  int64_t start = first[blockIdx.x];
  const int64_t end = first[blockIdx.x + 1];
  // Slot 0 never holds a kept token: a row whose first source is slot 0 is padding.
  if (start >= end || moves.source[start] == 0) return;

  const int64_t column = column_of_thread<Vector>();
  const bool has_column = column < moves.token_bytes;
  for (; start < end; start += kTokens * kPasses) {
    int64_t source[kPasses] = {}, dest[kPasses] = {};  // equal if the token stays
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
    // Every read of the tile finishes before its first write. One barrier per tile is
    // enough: a thread that is ahead only reads sources of the next tile, which no tile
    // so far overwrites, and waits here before it writes.
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (source[pass] == dest[pass]) continue;
      *at<Vector>(moves.slots, dest[pass], moves.distance, column) = tokens[pass];
    }
  }
}

// Copies the tokens that change pages, into scratch or back from it.
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
