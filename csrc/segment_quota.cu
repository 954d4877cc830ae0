// Checks the tensors of torch.ops.vllm_kvpolicy.pick_by_quota and launches its kernel.
#include <torch/csrc/stable/library.h>

#include <kvpolicy/segment_quota.cuh>

#include "score_rows.h"

namespace {

using namespace kvpolicy;

void pick_by_quota(Tensor marked, Tensor score, Tensor group, Tensor quotas) {
  STD_TORCH_CHECK(score.dim() == 2, "score: expected rows of tokens");
  STD_TORCH_CHECK(quotas.dim() == 2, "quotas: expected rows of groups");
  const int64_t count = score.size(0), tokens = score.size(1), groups = quotas.size(1);
  check_rows("score", score, score.scalar_type(), count, tokens, score);
  check_rows("marked", marked, ScalarType::Bool, count, tokens, score);
  check_rows("group", group, ScalarType::Long, count, tokens, score);
  check_rows("quotas", quotas, ScalarType::Long, count, groups, score);
  with_format_of(score, [&](auto type) {
    using Type = decltype(type);
    if (count == 0 || tokens == 0) return;
    const Picks<typename Type::Bits> rows{
        read_rows<typename Type::Bits>(score), read_rows<int64_t>(group),
        read_rows<int64_t>(quotas),            write_marks(marked),
        static_cast<int32_t>(tokens),          static_cast<int32_t>(groups)};
    const Launcher launch(score);
    launch(mark_by_quota<Type>, dim3(count), kSelectThreads, rows);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy, CUDA, library) {
  library.impl("pick_by_quota", TORCH_BOX(&pick_by_quota));
}
