// Selects the best tokens of each row.
#include <optional>
#include <vector>

#include "best.h"

namespace {

using namespace kvpolicy;

// marked = keep, and the best of the other valid tokens until `target` are marked.
void fill_next_best(Tensor marked, Tensor keep, Tensor score, Tensor valid,
                    std::optional<Tensor> targets, int64_t target) {
  const int64_t count = score.size(0), tokens = score.size(1);
  check_rows("marked", marked, ScalarType::Bool, count, tokens);
  check_rows("keep", keep, ScalarType::Bool, count, tokens);
  check_rows("score", score, score.scalar_type(), count, tokens);
  check_rows("valid", valid, ScalarType::Bool, count, tokens);
  const int64_t* each = nullptr;
  if (targets.has_value()) {
    check("targets", *targets, ScalarType::Long, 1);
    STD_TORCH_CHECK(targets->is_contiguous() && targets->size(0) == count,
                    "targets: expected ", count, " contiguous entries");
    each = targets->const_data_ptr<int64_t>();
  }
  const auto kept = read<bool>(keep), held = read<bool>(valid);
  const auto marks = write<bool>(marked);
  with_type_of(score, [&](auto zero) {
    const auto scores = read<decltype(zero)>(score);
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      std::vector<Rank> ranks(tokens);
      for (int64_t row = begin; row < end; ++row) {
        int64_t missing = each ? each[row] : target, others = 0;
        for (int64_t t = 0; t < tokens; ++t) {
          marks[row][t] = kept[row][t];
          missing -= kept[row][t];
          if (held[row][t] && !kept[row][t])
            ranks[others++] = rank_of(to_float(scores[row][t]), t);
        }
        mark_best(ranks.data(), ranks.data() + others, missing, marks[row]);
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("fill_next_best", TORCH_BOX(&fill_next_best));
}
