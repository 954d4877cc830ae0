// Host code shared by the operators that mark tokens by score.
#pragma once

#include <kvpolicy/radix_select.cuh>

#include "host.h"

namespace kvpolicy {

template <typename Number>
Rows<const Number> read_rows(const Tensor& rows) {
  return {static_cast<const Number*>(rows.const_data_ptr()), rows.stride(0)};
}

inline Rows<bool> write_marks(Tensor& marked) {
  return {marked.mutable_data_ptr<bool>(), marked.stride(0)};
}

// Calls launch(Type{}), where Type is the Format of the scores' dtype.
template <typename Launch>
void with_format_of(const Tensor& score, const Launch& launch) {
  switch (score.scalar_type()) {
    case ScalarType::Half:
      return launch(Float16{});
    case ScalarType::BFloat16:
      return launch(BFloat16{});
    case ScalarType::Float:
      return launch(Float32{});
    case ScalarType::Double:
      return launch(Float64{});
    default:
      STD_TORCH_CHECK(false, "score: expected floating point");
  }
}

}  // namespace kvpolicy
