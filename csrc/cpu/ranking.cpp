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
      std::vector<RankOf<decltype(zero)>> ranks(tokens);
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
      std::vector<RankOf<decltype(zero)>> ranks(tokens);
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

// kept = the oldest of the leading run of must-keep tokens, then the newest others, no
// more than `budget`.
void limit_must_keep(Tensor kept, Tensor must_keep, int64_t budget) {
  const int64_t count = must_keep.size(0), tokens = must_keep.size(1);
  check_rows("kept", kept, ScalarType::Bool, count, tokens);
  check_rows("must_keep", must_keep, ScalarType::Bool, count, tokens);
  const auto marks = write<bool>(kept);
  const auto musts = read<bool>(must_keep);
  torch::stable::parallel_for(0, count, 1, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const bool* must = musts[row];
      int64_t room = budget, sinks = 0;
      while (sinks < tokens && must[sinks] && room > 0) ++sinks, --room;
      std::fill(marks[row], marks[row] + sinks, true);
      for (int64_t t = tokens - 1; t >= sinks; --t) {
        marks[row][t] = must[t] && room > 0;
        room -= marks[row][t];
      }
    }
  });
}

// must_keep = the first `sinks` tokens, and those from the frontier to each length.
void must_keep_tokens(Tensor lengths, Tensor must_keep, Tensor pages, Tensor num_local,
                      Tensor sinks, int64_t block_size) {
  const int64_t events = pages.size(0), heads = pages.size(1), tokens = must_keep.size(2);
  check_rows("num_pages", pages, ScalarType::Long, events, heads);
  check_rows("lengths", lengths, ScalarType::Long, events, heads);
  check("must_keep", must_keep, ScalarType::Bool, 3);
  for (const Tensor* list : {&num_local, &sinks}) {
    check("num_local and sinks", *list, ScalarType::Long, 1);
    STD_TORCH_CHECK(list->is_contiguous() && list->size(0) == events,
                    "num_local and sinks: expected ", events, " contiguous entries");
  }
  const auto counts = read<int64_t>(pages);
  const auto held = write<int64_t>(lengths);
  const int64_t* newest = num_local.const_data_ptr<int64_t>();
  const int64_t* oldest = sinks.const_data_ptr<int64_t>();
  bool* marks = must_keep.mutable_data_ptr<bool>();
  for (int64_t event = 0; event < events; ++event) {
    for (int64_t head = 0; head < heads; ++head, marks += tokens) {
      const int64_t frontier = counts[event][head] * block_size;
      const int64_t length = held[event][head] = frontier + newest[event];
      std::fill(marks, marks + tokens, false);
      std::fill(marks, marks + std::clamp<int64_t>(oldest[event], 0, tokens), true);
      std::fill(marks + std::min(frontier, tokens),
                marks + std::min(std::max(length, frontier), tokens), true);
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("fill_next_best", TORCH_BOX(&fill_next_best));
  library.impl("limit_must_keep", TORCH_BOX(&limit_must_keep));
  library.impl("must_keep_tokens", TORCH_BOX(&must_keep_tokens));
  library.impl("resize", TORCH_BOX(&resize));
}
