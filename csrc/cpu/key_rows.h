// Sums over the channels of each key or value of one KV head, for each kind of CPU; see
// paged_reductions.cpp.
namespace kvpolicy::KVPOLICY_CPU {

#include "vectors.h"
#include "panels.h"

constexpr int kRows = kLanes == 16 ? 8 : 6;  // of a matrix at a time

// Floats that reduce_keys needs for as many tokens.
static int64_t key_scratch_size(const KeyRows& rows, int64_t length) {
  return padded(length) * rows.size + (rows.size + 2 * kRows) * (rows.size + kRows);
}

// Writes the length of each key to `result`. Keys are read in the order of memory: where
// the channels of a page lie side by side all of its keys add up at once.
template <typename Number>
static void norms_of_keys_as(const KeyRows& rows, float* scratch) {
  const Number* pool = static_cast<const Number*>(rows.pool);
  for (int64_t token = 0; token < rows.length; token += rows.page_size) {
    const Number* keys = pool + rows.pages[token / rows.page_size] * rows.page_stride;
    float* result = rows.result + token;
    int64_t count = rows.length - token;
    if (count > rows.page_size) count = rows.page_size;
    if (rows.slot_stride == 1) {
      for (int64_t d = 0; d < rows.size; ++d, keys += rows.key_stride)
        for (int64_t j = 0; j < count; ++j) {
          const float number = to_float(keys[j]);
          result[j] += number * number;
        }
    } else {
      for (int64_t j = 0; j < count; ++j, keys += rows.slot_stride) {
        for (int64_t d = 0; d < rows.size; ++d)
          scratch[d] = to_float(keys[d * rows.key_stride]);
        for (int64_t d = rows.size; d % kLanes; ++d) scratch[d] = 0;
        Floats sum = {};
        for (int64_t d = 0; d < rows.size; d += kLanes) {
          const Floats some = load(scratch + d);
          sum += some * some;
        }
        for (int lane = 0; lane < kLanes; ++lane) result[j] += sum[lane];
      }
    }
    for (int64_t j = 0; j < count; ++j) result[j] = __builtin_sqrtf(result[j]);
  }
}

// Packs what stands on and right of the diagonal, kRows rows side by side: of row d the
// entries from the first row of its block on. Those off the diagonal count twice.
static void pack_matrix(const float* matrix, int64_t size, float* packed) {
  for (int64_t first = 0; first < size; first += kRows)
    for (int64_t column = first; column < size; ++column)
      for (int64_t d = first; d < first + kRows; ++d) {
        const bool counts = d < size && d <= column;
        *packed++ = counts ? matrix[d * size + column] * (d < column ? 2 : 1) : 0;
      }
}

// Writes sum_d k_d (direction_d + sum_{e >= d} packed_de k_e) for each key k.
static void squares_of_panels(const KeyRows& rows, const float* panels,
                              const float* direction, const float* packed,
                              float* result) {
  for (int64_t token = 0; token < rows.length; token += kPanel) {
    const float* panel = panels + token * rows.size;
    const float* weights = packed;
    Floats value[2] = {};
    for (int64_t first = 0; first < rows.size; first += kRows) {
      Floats sum[kRows][2];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i)
        sum[i][0] = sum[i][1] = Floats{} + (first + i < rows.size ? direction[first + i] : 0);
      for (int64_t e = first; e < rows.size; ++e, weights += kRows) {
        const Floats left = load(panel + e * kPanel);
        const Floats right = load(panel + e * kPanel + kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          sum[i][0] += left * weights[i];
          sum[i][1] += right * weights[i];
        }
      }
      for (int64_t i = 0; i < kRows && first + i < rows.size; ++i) {
        const float* own = panel + (first + i) * kPanel;
        value[0] += sum[i][0] * load(own);
        value[1] += sum[i][1] * load(own + kLanes);
      }
    }
    for (int64_t j = 0; j < kPanel && token + j < rows.length; ++j)
      result[token + j] = value[j / kLanes][j % kLanes];
  }
}

// Writes the values of each query head's direction and matrix.
template <typename Number>
static void values_of_keys_as(const KeyRows& rows, float* panels) {
  using Own = AsFloats<Number>;
  float* packed = panels + padded(rows.length) * rows.size;
  pack_keys<Number, Own>(rows, panels);
  for (int64_t head = 0; head < rows.group; ++head) {
    pack_matrix(rows.matrices + head * rows.size * rows.size, rows.size, packed);
    squares_of_panels(rows, panels, rows.directions + head * rows.size, packed,
                      rows.result + head * rows.result_stride);
  }
}

// Norms where there are no matrices, else values.
static void reduce_keys(const KeyRows& rows, ScalarType type, float* scratch) {
  const bool has_matrices = rows.matrices != nullptr;
  if (type == ScalarType::Float)
    return has_matrices ? values_of_keys_as<float>(rows, scratch)
                        : norms_of_keys_as<float>(rows, scratch);
  if (type == ScalarType::Half)
    return has_matrices ? values_of_keys_as<Half>(rows, scratch)
                        : norms_of_keys_as<Half>(rows, scratch);
  return has_matrices ? values_of_keys_as<BFloat16>(rows, scratch)
                      : norms_of_keys_as<BFloat16>(rows, scratch);
}

}  // namespace kvpolicy::KVPOLICY_CPU
