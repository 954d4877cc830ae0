// Moves survivors to their places, heads side by side.
#include <algorithm>
#include <optional>

#include "host.h"

namespace {

using namespace kvpolicy;

constexpr int64_t kRun = 64;  // tokens that move together

// Where survivors go, in slots, and whether they stay on their page's place of the list.
struct Moves {
  const int64_t *source, *dest;
  const bool* stays;  // null where all do

  bool is_changed(int64_t m) const { return stays && !stays[m]; }
};

// Tokens of pages [P, N, D] of any strides, as integers of their size.
template <typename Number>
struct Slots {
  Number* pages;
  int64_t block_size, width, per_page, per_token, per_channel;

  Number* operator[](int64_t slot) const {
    return pages + slot / block_size * per_page + slot % block_size * per_token;
  }

  void copy(Number* to, int64_t to_channel, const Number* from,
            int64_t from_channel) const {
    if (to_channel == 1 && from_channel == 1) {
      std::copy(from, from + width, to);
    } else {
      for (int64_t d = 0; d < width; ++d) to[d * to_channel] = from[d * from_channel];
    }
  }

  // Moves tokens first to last of a head, whose sources ascend, on its own pages:
  // those together that leave one page for one page.
  void move(const Moves& moves, int64_t first, int64_t last) const {
    int64_t from[kRun], to[kRun];
    for (int64_t m = first; m < last;) {
      const int64_t source = moves.source[m], dest = moves.dest[m];
      if (source == dest || moves.is_changed(m)) {
        ++m;
        continue;
      }
      const int64_t old_page = source / block_size, new_page = dest / block_size;
      const int64_t end = std::min(last, m + kRun);
      int64_t count = 0;
      for (; m < end && !moves.is_changed(m); ++m, ++count) {
        const int64_t leaves = moves.source[m] - old_page * block_size;
        const int64_t enters = moves.dest[m] - new_page * block_size;
        if (leaves < 0 || leaves >= block_size || enters < 0 || enters >= block_size)
          break;
        from[count] = leaves * per_token;
        to[count] = enters * per_token;
      }
      const int64_t next = m < last ? moves.source[m] / block_size : old_page;
      move_run({pages + old_page * per_page, pages + new_page * per_page,
                pages + next * per_page, from, to, count});
    }
  }

  // Tokens that leave one page for one page, by their places there.
  struct Run {
    const Number* old_page;
    Number* new_page;
    const Number* next_page;  // that the next run leaves
    const int64_t *from, *to;
    int64_t count;
  };

  // Tokens in one piece where their channels lie side by side, as far as they are
  // neighbours before and after; else channel by channel.
  void move_run(const Run& run) const {
    if (per_channel != 1) return move_columns(run);
    for (int64_t n = 0; n < run.count;) {
      const int64_t start = n++;
      while (per_token == width && n < run.count &&
             run.from[n] == run.from[n - 1] + width && run.to[n] == run.to[n - 1] + width)
        ++n;
      const Number* tokens = run.old_page + run.from[start];
      std::copy(tokens, tokens + (n - start) * width, run.new_page + run.to[start]);
    }
  }

  void move_columns(const Run& run) const {
    constexpr int64_t kColumns = 4;  // that read the places once
    int64_t d = 0;
    for (; d + kColumns <= width; d += kColumns) {
      const Number* from = run.old_page + d * per_channel;
      Number* to = run.new_page + d * per_channel;
      for (int64_t c = d; c < d + kColumns; ++c)
        for (int64_t n = 0; n < block_size; n += 64 / sizeof(Number))
          __builtin_prefetch(run.next_page + c * per_channel + n * per_token);
      for (int64_t n = 0; n < run.count; ++n)
#pragma GCC unroll 4
        for (int64_t c = 0; c < kColumns; ++c)
          to[run.to[n] + c * per_channel] = from[run.from[n] + c * per_channel];
    }
    for (; d < width; ++d)
      for (int64_t n = 0; n < run.count; ++n)
        run.new_page[run.to[n] + d * per_channel] =
            run.old_page[run.from[n] + d * per_channel];
  }
};

// Tokens that change pages wait in scratch [moves, width] until all have been read.
template <typename Number>
void compact(const Tensor& pages, const Moves& moves, const int64_t* first,
             int64_t rows, Number* scratch) {
  const Slots<Number> slots{static_cast<Number*>(pages.mutable_data_ptr()),
                            pages.size(1),
                            pages.size(2),
                            pages.stride(0),
                            pages.stride(1),
                            pages.stride(2)};
  const auto each_changed = [&](const auto& run) {
    if (!moves.stays) return;
    torch::stable::parallel_for(first[0], first[rows], 64, [&](int64_t m, int64_t end) {
      for (; m < end; ++m)
        if (!moves.stays[m]) run(m, scratch + m * slots.width);
    });
  };
  each_changed([&](int64_t m, Number* token) {
    slots.copy(token, 1, slots[moves.source[m]], slots.per_channel);
  });
  torch::stable::parallel_for(0, rows, 1, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) slots.move(moves, first[row], first[row + 1]);
  });
  each_changed([&](int64_t m, Number* token) {
    slots.copy(slots[moves.dest[m]], slots.per_channel, token, 1);
  });
}

void check_list(const char* name, const Tensor& list, ScalarType type, int64_t size) {
  check(name, list, type, 1);
  STD_TORCH_CHECK(list.size(0) == size && list.is_contiguous(), name, ": expected ",
                  size, " contiguous entries");
}

// Copies tokens between pages; nothing is overwritten before it is read.
void compact_pages(Tensor pages, Tensor source, Tensor dest, Tensor first,
                   std::optional<Tensor> in_place, std::optional<Tensor> scratch) {
  check("pages", pages, pages.scalar_type(), 3);
  const int64_t count = source.size(0), rows = first.size(0) - 1;
  check_list("source_slots", source, ScalarType::Long, count);
  check_list("dest_slots", dest, ScalarType::Long, count);
  check_list("first", first, ScalarType::Long, rows + 1);
  Moves moves{source.const_data_ptr<int64_t>(), dest.const_data_ptr<int64_t>(), nullptr};
  void* waiting = nullptr;
  if (in_place.has_value()) {
    check_list("in_place", *in_place, ScalarType::Bool, count);
    moves.stays = in_place->const_data_ptr<bool>();
    STD_TORCH_CHECK(scratch.has_value(), "scratch: expected it where tokens may change "
                    "pages");
    check_rows("scratch", *scratch, pages.scalar_type(), count, pages.size(2));
    STD_TORCH_CHECK(scratch->is_contiguous(), "scratch: expected it contiguous");
    waiting = scratch->mutable_data_ptr();
  }
  const auto run = [&](auto zero) {
    using Number = decltype(zero);
    compact<Number>(pages, moves, first.const_data_ptr<int64_t>(), rows,
                    static_cast<Number*>(waiting));
  };
  switch (pages.element_size()) {
    case 1:
      return run(uint8_t{});
    case 2:
      return run(uint16_t{});
    case 4:
      return run(uint32_t{});
    case 8:
      return run(uint64_t{});
    default:
      STD_TORCH_CHECK(false, "pages: expected numbers of 1, 2, 4 or 8 bytes");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("compact_pages", TORCH_BOX(&compact_pages));
}
