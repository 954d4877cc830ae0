// Window attention read from the pages: each thread takes one (event, layer, KV head)
// at a time. It packs the keys for its vectors once, makes the logits of a few queries
// over all keys, turns them into probabilities, and adds those up, so that no more than
// a few rows of logits are ever stored.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

#include "numbers.h"
#include "paged_heads.h"

namespace kvpolicy {

constexpr float kNoWeight = 0x1p-119f;      // twice TINY of kernels/softmax.py
constexpr float kLeastLogit = -83.1776616f;  // log of TINY

// A KV head of one event and layer. Strides are in elements.
struct Head {
  const void* queries;  // of its first query head
  int64_t head_stride, step_stride, query_stride;
  const void* pool;
  int64_t page_stride, slot_stride, key_stride;
  const int64_t* pages;
  int64_t page_size;
  int64_t size, group, window;
  int64_t length;      // tokens held
  int64_t used;        // queries that count
  float scale;
  const float* sinks;  // [group], or null for none
  float* mean;  // [group, tokens], zero where nothing is written
  float* last;  // likewise
  int64_t result_stride;  // from one query head to the next, of both
};

}  // namespace kvpolicy

#define KVPOLICY_FOR_EACH_CPU "window_rows.h"
#include "each_cpu.h"

namespace {

using namespace kvpolicy;

// Returns what all heads have in common.
Head head_of(const Tensor& queries, const Tensor& pool, const Tensor& pages,
             const Tensor& mean, double scale) {
  Head head{};
  head.head_stride = queries.stride(2);
  head.step_stride = queries.stride(3);
  head.query_stride = queries.stride(4);
  head.pool = pool.const_data_ptr();
  head.page_stride = pool.stride(0);
  head.slot_stride = pool.stride(1);
  head.key_stride = pool.stride(2);
  head.page_size = pool.size(1);
  head.size = pool.size(2);
  head.group = queries.size(2) / pages.size(2);
  head.window = queries.size(3);
  head.result_stride = mean.stride(2);
  head.scale = static_cast<float>(scale);
  return head;
}

void window_usage(Tensor mean, Tensor last, Tensor queries, Tensor pool, Tensor pages,
                  Tensor lengths, double scale, std::optional<Tensor> sinks) {
  const ScalarType type = queries.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half ||
                      type == ScalarType::BFloat16,
                  "queries: expected float32, float16 or bfloat16");
  check("queries", queries, type, 5);
  check("pool", pool, type, 3);
  check("pages", pages, ScalarType::Long, 4);
  const int64_t layers = queries.size(1), heads = pages.size(2);
  check_heads("pages", pages, ScalarType::Long, 4, queries, heads);
  check_heads("lengths", lengths, ScalarType::Long, 3, queries, heads);
  check_heads("mean", mean, ScalarType::Float, 4, queries, queries.size(2));
  check_heads("last", last, ScalarType::Float, 4, queries, queries.size(2));
  const int64_t num_tokens = mean.size(3);
  STD_TORCH_CHECK(last.size(3) == num_tokens && mean.stride(2) == last.stride(2),
                  "last: expected the sizes of mean");
  STD_TORCH_CHECK(queries.size(4) == pool.size(2), "queries: expected the pool's size ",
                  pool.size(2), " of a head");
  STD_TORCH_CHECK(pages.size(3) * pool.size(1) >= num_tokens,
                  "pages: expected room for ", num_tokens, " tokens");
  if (sinks) {
    check("sinks", *sinks, ScalarType::Float, 2);
    STD_TORCH_CHECK(sinks->size(0) == layers && sinks->size(1) == queries.size(2) &&
                        sinks->stride(1) == 1,
                    "sinks: expected a row of each layer's query heads");
  }
  const Head model = head_of(queries, pool, pages, mean, scale);
  const int64_t width = type == ScalarType::Float ? 4 : 2, group = model.group;
  const char* all_queries = static_cast<const char*>(queries.const_data_ptr());
  const int64_t* all_pages = pages.const_data_ptr<int64_t>();
  const int64_t* all_lengths = lengths.const_data_ptr<int64_t>();
  const float* all_sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  float* all_means = mean.mutable_data_ptr<float>();
  float* all_lasts = last.mutable_data_ptr<float>();

  const int64_t count = queries.size(0) * layers * heads;
  check_lengths(lengths, num_tokens);
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const int64_t size = KVPOLICY_BEST(scratch_size)(model, num_tokens);
    const std::unique_ptr<float[]> scratch(new float[size]);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index % heads, layer = index / heads % layers;
      const int64_t event = index / heads / layers;
      Head head = model;
      head.queries = all_queries + width * place(queries, event, layer, row * group);
      head.pages = all_pages + place(pages, event, layer, row);
      head.length = all_lengths[place(lengths, event, layer, row)];
      if (!head.length) continue;
      if (sinks) head.sinks = all_sinks + layer * sinks->stride(0) + row * group;
      head.used = std::max<int64_t>(1, std::min(head.length - 1, head.window));
      head.mean = all_means + place(mean, event, layer, row * group);
      head.last = all_lasts + place(last, event, layer, row * group);
      KVPOLICY_BEST(usage_of_head)(head, type, scratch.get());
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("window_usage", TORCH_BOX(&window_usage));
}
