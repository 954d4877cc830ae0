// Code shared by the operators: PyTorch's stable interface, and tensor checks.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace kvpolicy {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Checks that `tensor` lies on the CPU and has a dtype and a number of dimensions.
inline void check(const char* name, const Tensor& tensor, ScalarType type,
                  int64_t dims) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, ": expected it on a CPU");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, ": expected another dtype");
  STD_TORCH_CHECK(tensor.dim() == dims, name, ": expected ", dims, " dimensions");
}

// Rows of a matrix, at any distance from each other.
template <typename Number>
struct Rows {
  Number* first;
  int64_t distance;

  Number* operator[](int64_t row) const { return first + row * distance; }
};

// Checks that `rows` is [count, columns] with each row's numbers side by side.
inline void check_rows(const char* name, const Tensor& rows, ScalarType type,
                       int64_t count, int64_t columns) {
  check(name, rows, type, 2);
  STD_TORCH_CHECK(rows.size(0) == count && rows.size(1) == columns, name, ": expected ",
                  count, " rows of ", columns);
  STD_TORCH_CHECK(rows.stride(1) == 1 || columns <= 1, name,
                  ": expected each row's numbers side by side");
}

template <typename Number>
Rows<const Number> read(const Tensor& rows) {
  return {static_cast<const Number*>(rows.const_data_ptr()), rows.stride(0)};
}

template <typename Number>
Rows<Number> write(const Tensor& rows) {
  return {static_cast<Number*>(rows.mutable_data_ptr()), rows.stride(0)};
}

}  // namespace kvpolicy
