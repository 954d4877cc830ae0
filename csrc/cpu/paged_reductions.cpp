// Sums over the channels of keys or values, read from the pages: each thread takes one
// (event, layer, KV head) at a time and packs its keys for its vectors once. Of a
// symmetric matrix only the half on and right of the diagonal is multiplied.
#include <cstdint>
#include <cstring>
#include <memory>

#include "numbers.h"
#include "paged_heads.h"

namespace kvpolicy {

// A KV head of one event and layer. Strides are in elements.
struct KeyRows {
  const void* pool;
  int64_t page_stride, slot_stride, key_stride;
  const int64_t* pages;
  int64_t page_size;
  int64_t size, group;
  int64_t length;            // tokens held
  const float* directions;   // [group, size]
  const float* matrices;     // [group, size, size], none for norms
  float* result;             // [group, tokens], zero where nothing is written
  int64_t result_stride;     // from one query head to the next
};

}  // namespace kvpolicy

#define KVPOLICY_FOR_EACH_CPU "key_rows.h"
#include "each_cpu.h"

namespace {

using namespace kvpolicy;

// Checks that the axes from the third on lie one row after the other.
void check_packed(const char* name, const Tensor& rows) {
  int64_t stride = 1;
  for (int64_t axis = rows.dim() - 1; axis >= 2; --axis) {
    STD_TORCH_CHECK(rows.stride(axis) == stride || rows.size(axis) <= 1, name,
                    ": expected the numbers of a layer side by side");
    stride *= rows.size(axis);
  }
}

// What values are made of; none for norms.
struct Of {
  const Tensor* directions;
  const Tensor* matrices;
};

void reduce(Tensor& result, const Tensor& pool, const Tensor& pages,
            const Tensor& lengths, Of of) {
  const ScalarType type = pool.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half ||
                      type == ScalarType::BFloat16,
                  "pool: expected float32, float16 or bfloat16");
  check("pool", pool, type, 3);
  check("pages", pages, ScalarType::Long, 4);
  STD_TORCH_CHECK(pages.stride(3) == 1 || pages.size(3) <= 1,
                  "pages: expected each row's numbers side by side");
  const int64_t layers = pages.size(1), heads = pages.size(2), size = pool.size(2);
  const int64_t rows = result.size(2), num_tokens = result.size(3);
  check_heads("result", result, ScalarType::Float, 4, pages, rows);
  check_heads("lengths", lengths, ScalarType::Long, 3, pages, heads);
  STD_TORCH_CHECK(heads > 0 && rows % heads == 0 && result.stride(3) == 1,
                  "result: expected rows of each KV head");
  STD_TORCH_CHECK(pages.size(3) * pool.size(1) >= num_tokens,
                  "pages: expected room for ", num_tokens, " tokens");
  if (of.matrices) {
    check_heads("directions", *of.directions, ScalarType::Float, 4, pages, rows);
    check_heads("matrices", *of.matrices, ScalarType::Float, 5, pages, rows);
    STD_TORCH_CHECK(of.directions->size(3) == size && of.matrices->size(3) == size &&
                        of.matrices->size(4) == size,
                    "matrices: expected the pool's size ", size, " of a head");
    check_packed("directions", *of.directions);
    check_packed("matrices", *of.matrices);
  }
  const int64_t* all_pages = pages.const_data_ptr<int64_t>();
  const int64_t* all_lengths = lengths.const_data_ptr<int64_t>();
  float* all_results = result.mutable_data_ptr<float>();
  KeyRows model{};
  model.pool = pool.const_data_ptr();
  model.page_stride = pool.stride(0);
  model.slot_stride = pool.stride(1);
  model.key_stride = pool.stride(2);
  model.page_size = pool.size(1);
  model.size = size;
  model.group = rows / heads;
  model.result_stride = result.stride(2);
  const int64_t count = pages.size(0) * layers * heads;
  check_lengths(lengths, num_tokens);
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const int64_t floats = KVPOLICY_BEST(key_scratch_size)(model, num_tokens);
    const std::unique_ptr<float[]> scratch(new float[floats]);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index % heads, layer = index / heads % layers;
      const int64_t event = index / heads / layers, query = row * model.group;
      KeyRows own = model;
      own.pages = all_pages + place(pages, event, layer, row);
      own.length = all_lengths[place(lengths, event, layer, row)];
      if (!own.length) continue;
      own.result = all_results + place(result, event, layer, query);
      if (of.matrices) {
        own.directions = of.directions->const_data_ptr<float>() +
                         place(*of.directions, event, layer, query);
        own.matrices = of.matrices->const_data_ptr<float>() +
                       place(*of.matrices, event, layer, query);
      }
      KVPOLICY_BEST(reduce_keys)(own, type, scratch.get());
    }
  });
}

void paged_norms(Tensor norms, Tensor pool, Tensor pages, Tensor lengths) {
  reduce(norms, pool, pages, lengths, {});
}

void paged_quadratics(Tensor values, Tensor pool, Tensor pages, Tensor lengths,
                      Tensor directions, Tensor matrices) {
  reduce(values, pool, pages, lengths, {&directions, &matrices});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("paged_norms", TORCH_BOX(&paged_norms));
  library.impl("paged_quadratics", TORCH_BOX(&paged_quadratics));
}
