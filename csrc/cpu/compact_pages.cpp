// Moves survivors to their places, heads side by side.
#include <algorithm>
#include <optional>
#include <vector>

#include "host.h"

namespace {

using namespace kvpolicy;

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

  // Moves tokens first to last of a head, whose sources ascend, on its own pages.
  // Where channels lie apart, neighbours on a page move together, channel by channel.
  void move(const int64_t* source, const int64_t* dest, const bool* stays,
            int64_t first, int64_t last) const {
    for (int64_t m = first; m < last;) {
      if (source[m] == dest[m] || (stays && !stays[m])) {
        ++m;
        continue;
      }
      const int64_t from = source[m] / block_size, to = dest[m] / block_size;
      int64_t end = m + 1;
      while (end < last && source[end] / block_size == from &&
             dest[end] / block_size == to && !(stays && !stays[end]))
        ++end;
      const Number* old_page = pages + from * per_page;
      Number* new_page = pages + to * per_page;
      if (per_channel == 1) {
        for (; m < end; ++m)
          copy(new_page + dest[m] % block_size * per_token, 1,
               old_page + source[m] % block_size * per_token, 1);
      } else {
        for (int64_t d = 0; d < width; ++d)
          for (int64_t n = m; n < end; ++n)
            new_page[d * per_channel + dest[n] % block_size * per_token] =
                old_page[d * per_channel + source[n] % block_size * per_token];
      }
      m = end;
    }
  }
};

template <typename Number>
void compact(const Tensor& pages, const int64_t* source, const int64_t* dest,
             const int64_t* first, const bool* stays, int64_t moves, int64_t rows) {
  const Slots<Number> slots{static_cast<Number*>(pages.mutable_data_ptr()),
                            pages.size(1),
                            pages.size(2),
                            pages.stride(0),
                            pages.stride(1),
                            pages.stride(2)};
  std::vector<int64_t> changed;
  for (int64_t m = 0; stays && m < moves; ++m)
    if (!stays[m] && source[m] != dest[m]) changed.push_back(m);
  const int64_t count = changed.size(), width = slots.width;
  std::vector<Number> scratch(count * width);
  const auto each_changed = [&](const auto& run) {
    torch::stable::parallel_for(0, count, 64, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) run(changed[n], &scratch[n * width]);
    });
  };
  each_changed([&](int64_t m, Number* token) {
    slots.copy(token, 1, slots[source[m]], slots.per_channel);
  });
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      slots.move(source, dest, stays, first[row], first[row + 1]);
  });
  each_changed([&](int64_t m, Number* token) {
    slots.copy(slots[dest[m]], slots.per_channel, token, 1);
  });
}

void check_list(const char* name, const Tensor& list, ScalarType type, int64_t size) {
  check(name, list, type, 1);
  STD_TORCH_CHECK(list.size(0) == size && list.is_contiguous(), name, ": expected ",
                  size, " contiguous entries");
}

// Copies tokens between pages; nothing is overwritten before it is read.
void compact_pages(Tensor pages, Tensor source, Tensor dest, Tensor first,
                   std::optional<Tensor> in_place) {
  check("pages", pages, pages.scalar_type(), 3);
  const int64_t moves = source.size(0), rows = first.size(0) - 1;
  check_list("source_slots", source, ScalarType::Long, moves);
  check_list("dest_slots", dest, ScalarType::Long, moves);
  check_list("first", first, ScalarType::Long, rows + 1);
  const bool* stays = nullptr;
  if (in_place.has_value()) {
    check_list("in_place", *in_place, ScalarType::Bool, moves);
    stays = in_place->const_data_ptr<bool>();
  }
  const auto run = [&](auto zero) {
    compact<decltype(zero)>(pages, source.const_data_ptr<int64_t>(),
                            dest.const_data_ptr<int64_t>(),
                            first.const_data_ptr<int64_t>(), stays, moves, rows);
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
