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

// marked = as many of each row's first pages' tokens as fill `quota` pages: must-keep
// tokens first, then kept ones, then others.
void resize(Tensor marked, Tensor keep, Tensor score, Tensor must_keep, Tensor pages,
            Tensor quota, int64_t block_size) {
  const int64_t count = score.size(0), tokens = score.size(1);
  check_rows("marked", marked, ScalarType::Bool, count, tokens);
  check_rows("keep", keep, ScalarType::Bool, count, tokens);
  check_rows("score", score, score.scalar_type(), count, tokens);
  check_rows("must_keep", must_keep, ScalarType::Bool, count, tokens);
  for (const Tensor* list : {&pages, &quota}) {
    check("pages and quota", *list, ScalarType::Long, 1);
    STD_TORCH_CHECK(list->is_contiguous() && list->size(0) == count,
                    "pages and quota: expected ", count, " contiguous entries");
  }
  const auto kept = read<bool>(keep), must = read<bool>(must_keep);
  const auto marks = write<bool>(marked);
  const int64_t* num_pages = pages.const_data_ptr<int64_t>();
  const int64_t* num_wanted = quota.const_data_ptr<int64_t>();
  with_type_of(score, [&](auto zero) {
    const auto scores = read<decltype(zero)>(score);
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      std::vector<Rank> ranks(tokens);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t held = std::min(num_pages[row] * block_size, tokens);
        int64_t room = num_wanted[row] * block_size, sizes[3] = {};
        const auto grade = [&](int64_t t) { return must[row][t] ? 2 : +kept[row][t]; };
        for (int64_t t = 0; t < held; ++t) ++sizes[grade(t)];
        int cut = 2;  // the grade of which some get in
        while (cut > 0 && room > sizes[cut]) room -= sizes[cut--];
        int64_t among = 0;
        std::fill(marks[row], marks[row] + tokens, false);
        for (int64_t t = 0; t < held; ++t) {
          const int own = grade(t);
          marks[row][t] = own > cut;
          if (own == cut) ranks[among++] = rank_of(to_float(scores[row][t]), t);
        }
        mark_best(ranks.data(), ranks.data() + among, room, marks[row]);
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("fill_next_best", TORCH_BOX(&fill_next_best));
  library.impl("resize", TORCH_BOX(&resize));
}
