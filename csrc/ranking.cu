// Checks the tensors of torch.ops.vllm_kvpolicy.top_k_mask and launches its kernel.
#include <torch/csrc/stable/library.h>

#include <kvpolicy/ranking.cuh>
#include <optional>

#include "score_rows.h"

namespace {

using namespace kvpolicy;

void top_k_mask(Tensor marked, Tensor score, Tensor must_keep, Tensor valid,
                std::optional<Tensor> budgets, int64_t budget) {
  STD_TORCH_CHECK(score.dim() == 2, "score: expected rows of tokens");
  const int64_t count = score.size(0), tokens = score.size(1);
  check_rows("score", score, score.scalar_type(), count, tokens, score);
  check_rows("marked", marked, ScalarType::Bool, count, tokens, score);
  check_rows("must_keep", must_keep, ScalarType::Bool, count, tokens, score);
  check_rows("valid", valid, ScalarType::Bool, count, tokens, score);
  const int64_t* of_rows = nullptr;
  if (budgets.has_value()) {
    check_list("budgets", *budgets, ScalarType::Long, count, score);
    of_rows = budgets->const_data_ptr<int64_t>();
  }
  with_format_of(score, [&](auto type) {
    using Type = decltype(type);
    if (count == 0 || tokens == 0) return;
    const TopK<typename Type::Bits> rows{
        read_rows<typename Type::Bits>(score), read_rows<bool>(must_keep),
        read_rows<bool>(valid),                write_marks(marked),
        of_rows,                               budget,
        static_cast<int32_t>(tokens)};
    const Launcher launch(score);
    launch(mark_top_k<Type>, dim3(count), kSelectThreads, rows);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy, CUDA, library) {
  library.impl("top_k_mask", TORCH_BOX(&top_k_mask));
}
