// Tensors with a row for each event, layer and head: [E, L, heads, ...].
#pragma once

#include "host.h"

namespace kvpolicy {

// Checks that `rows` has the events and layers of `like`, `heads` heads, and each row's
// numbers side by side.
inline void check_heads(const char* name, const Tensor& rows, ScalarType type,
                        int64_t dims, const Tensor& like, int64_t heads) {
  check(name, rows, type, dims);
  STD_TORCH_CHECK(rows.size(0) == like.size(0) && rows.size(1) == like.size(1) &&
                      rows.size(2) == heads,
                  name, ": expected ", like.size(0), " events, ", like.size(1),
                  " layers and ", heads, " heads");
  STD_TORCH_CHECK(rows.dim() != 4 || rows.stride(3) == 1 || rows.size(3) <= 1, name,
                  ": expected each row's numbers side by side");
}

// Where the row of an event, layer and head begins.
inline int64_t place(const Tensor& rows, int64_t event, int64_t layer, int64_t head) {
  return event * rows.stride(0) + layer * rows.stride(1) + head * rows.stride(2);
}

// Checks that lengths [E, L, H] are of 0 to `num_tokens` tokens.
inline void check_lengths(const Tensor& lengths, int64_t num_tokens) {
  const int64_t layers = lengths.size(1), heads = lengths.size(2);
  const int64_t* all = lengths.const_data_ptr<int64_t>();
  for (int64_t index = 0; index < lengths.size(0) * layers * heads; ++index) {
    const int64_t length = all[place(lengths, index / heads / layers,
                                     index / heads % layers, index % heads)];
    STD_TORCH_CHECK(0 <= length && length <= num_tokens, "lengths: expected 0 to ",
                    num_tokens, ", got ", length);
  }
}

}  // namespace kvpolicy
