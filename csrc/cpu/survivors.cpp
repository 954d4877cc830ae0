// Lists survivors, says where they go, and keeps what is remembered of them.
#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "host.h"

namespace {

using namespace kvpolicy;

// The quotient by a size of numbers of which most are near the one before.
struct Divider {
  int64_t size, quotient = 0, first = 0;

  int64_t operator()(int64_t number) {
    if (number < first || number >= first + size) {
      quotient = number / size;
      first = quotient * size;
    }
    return quotient;
  }
};

// Checks that the lists of heads start and end among so many pages. An error inside a
// parallel loop would lose its words.
void check_starts(const Rows<const int64_t>& starts, int64_t events, int64_t heads,
                  int64_t pages) {
  for (int64_t event = 0; event < events; ++event)
    for (int64_t head = 0; head <= heads; ++head)
      STD_TORCH_CHECK(0 <= starts[event][head] && starts[event][head] <= pages,
                      "first: expected 0 to ", pages, " pages, got ",
                      starts[event][head]);
}

// listed = head * tokens + token of the survivors of each head from its first page on.
void list_survivors(Tensor listed, Tensor survives, Tensor first, int64_t block_size) {
  check("survives", survives, ScalarType::Bool, 3);
  const int64_t events = survives.size(0), heads = survives.size(1);
  const int64_t tokens = survives.size(2), places = listed.size(1);
  check_rows("listed", listed, ScalarType::Long, events, places);
  check_rows("first", first, ScalarType::Long, events, heads + 1);
  STD_TORCH_CHECK(survives.is_contiguous(), "survives: expected it contiguous");
  const bool* all = survives.const_data_ptr<bool>();
  const auto lists = write<int64_t>(listed);
  const auto starts = read<int64_t>(first);
  check_starts(starts, events, heads, places / block_size);
  for (int64_t event = 0; event < events; ++event)
    std::fill(lists[event], lists[event] + places, -1);
  torch::stable::parallel_for(0, events * heads, 1, [&](int64_t row, int64_t end) {
    std::vector<int64_t> own(tokens + 1);
    for (; row < end; ++row) {
      const int64_t event = row / heads, head = row % heads;
      const bool* stays = all + row * tokens;
      int64_t count = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        own[count] = head * tokens + t;
        count += stays[t];
      }
      const int64_t start = starts[event][head] * block_size;
      count = std::min(count, places - start);
      std::copy(own.begin(), own.begin() + count, lists[event] + start);
    }
  });
}

// source and dest = the slots of survivors before and after, [events, places]; starts =
// where heads start among them, each event's with a row of padding, and the end.
void survivor_moves(Tensor source, Tensor dest, Tensor starts,
                    std::optional<Tensor> in_place, Tensor sources, Tensor held,
                    Tensor first, Tensor pages, std::optional<Tensor> unmoved,
                    int64_t tokens, int64_t block_size) {
  const int64_t events = sources.size(0), places = sources.size(1);
  const int64_t count = places / block_size;
  check("held", held, ScalarType::Long, 3);
  check_rows("sources", sources, ScalarType::Long, events, places);
  check_rows("first", first, ScalarType::Long, events, held.size(1) + 1);
  check_rows("pages", pages, ScalarType::Long, events, count);
  const int64_t heads = held.size(1), rows = events * (heads + 1) + 1;
  check("starts", starts, ScalarType::Long, 1);
  STD_TORCH_CHECK(starts.is_contiguous() && starts.numel() == rows,
                  "starts: expected ", rows, " contiguous entries");
  for (const Tensor* slots : {&source, &dest}) {
    check_rows("source and dest", *slots, ScalarType::Long, events, places);
    STD_TORCH_CHECK(slots->is_contiguous(),
                    "source and dest: expected them contiguous");
  }
  STD_TORCH_CHECK(held.is_contiguous() && held.size(0) == events,
                  "held: expected contiguous pages of ", events, " events");
  if (unmoved.has_value())
    check_rows("unmoved", *unmoved, ScalarType::Bool, events, count);
  const int64_t width = held.size(2), entries = heads * width;
  const auto lists = read<int64_t>(sources), new_pages = read<int64_t>(pages);
  const auto same = unmoved.has_value() ? read<bool>(*unmoved) : Rows<const bool>{};
  const int64_t* old_pages = held.const_data_ptr<int64_t>();
  int64_t* leaves = source.mutable_data_ptr<int64_t>();
  int64_t* enters = dest.mutable_data_ptr<int64_t>();
  bool* stays = in_place.has_value() ? in_place->mutable_data_ptr<bool>() : nullptr;
  const auto lists_of = read<int64_t>(first);
  int64_t* begin = starts.mutable_data_ptr<int64_t>();
  for (int64_t event = 0; event < events; ++event)
    for (int64_t head = 0; head <= heads; ++head)
      *begin++ = lists_of[event][head] * block_size + event * places;
  *begin = events * places;
  std::atomic<bool> fits{true};
  torch::stable::parallel_for(0, events, 1, [&](int64_t event, int64_t end) {
    for (; event < end; ++event) {
      Divider head{tokens}, page{block_size}, place{block_size};
      for (int64_t m = 0; m < places; ++m) {
        const int64_t survivor = lists[event][m], to = event * places + m;
        const int64_t list = place(m);
        if (stays) stays[to] = same[event][list];
        leaves[to] = enters[to] = 0;
        if (survivor < 0) continue;
        const int64_t token = survivor - head(survivor) * tokens;
        const int64_t entry = head.quotient * width + page(token);
        if (entry >= entries) {
          fits = false;
          continue;
        }
        leaves[to] = old_pages[event * entries + entry] * block_size + token - page.first;
        enters[to] = new_pages[event][list] * block_size + m - place.first;
      }
    }
  });
  STD_TORCH_CHECK(fits, "sources: expected tokens of held pages");
}

// Memory of survivors: values by superblock, and of local tokens by request and head.
struct Memory {
  float *survivors, *local;  // [A, B, W] and [A, S, n, R]
  int64_t blocks, width, requests, heads, most_local;
  const int64_t *which, *index;
  Rows<const int32_t> table;  // superblocks by request
  int64_t table_width;

  float* superblock(int64_t value, int64_t event, int64_t place) const {
    return survivors + (which[value] * blocks + table[index[event]][place]) * width;
  }

  float* local_row(int64_t value, int64_t event, int64_t head) const {
    const int64_t request = which[value] * requests + index[event];
    return local + (request * heads + head) * most_local;
  }
};

Memory memory_of(const Tensor& survivors, const Tensor& local, const Tensor& which,
                 const Tensor& index, const Tensor& table) {
  check("survivors", survivors, ScalarType::Float, 3);
  check("local", local, ScalarType::Float, 4);
  check("which", which, ScalarType::Long, 1);
  check("index", index, ScalarType::Long, 1);
  check_rows("global_blocks", table, ScalarType::Int, table.size(0), table.size(1));
  STD_TORCH_CHECK(survivors.is_contiguous() && local.is_contiguous() &&
                      which.is_contiguous() && index.is_contiguous(),
                  "survivors, local, which and index: expected them contiguous");
  return {static_cast<float*>(survivors.mutable_data_ptr()),
          static_cast<float*>(local.mutable_data_ptr()),
          survivors.size(1),
          survivors.size(2),
          local.size(1),
          local.size(2),
          local.size(3),
          which.const_data_ptr<int64_t>(),
          index.const_data_ptr<int64_t>(),
          read<int32_t>(table),
          table.size(1)};
}

// found = values of a head's survivors, of its local tokens right after the last event,
// and zeros.
void read_survivors(Tensor found, Tensor survivors, Tensor local, Tensor which,
                    Tensor index, Tensor first, Tensor table) {
  const Memory memory = memory_of(survivors, local, which, index, table);
  const int64_t events = index.size(0), heads = memory.heads, tokens = found.size(3);
  check("found", found, ScalarType::Float, 4);
  check_rows("first", first, ScalarType::Long, events, heads + 1);
  const auto starts = read<int64_t>(first);
  check_starts(starts, events, heads, memory.table_width * heads);
  float* all = found.mutable_data_ptr<float>();
  const int64_t rows = which.size(0) * events * heads, page = memory.width / heads;
  torch::stable::parallel_for(0, rows, 1, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t head = row % heads, event = row / heads % events;
      const int64_t value = row / heads / events;
      float* to = all + row * tokens;
      int64_t entry = starts[event][head] * page;
      int64_t left = std::min(starts[event][head + 1] * page - entry, tokens);
      float* last = to + tokens;
      while (left > 0) {
        const int64_t place = entry / memory.width, offset = entry % memory.width;
        const int64_t count = std::min(left, memory.width - offset);
        const float* from = memory.superblock(value, event, place) + offset;
        to = std::copy(from, from + count, to);
        entry += count;
        left -= count;
      }
      const float* from = memory.local_row(value, event, head);
      to = std::copy(from, from + std::min<int64_t>(memory.most_local, last - to), to);
      std::fill(to, last, 0.0f);
    }
  });
}

// Enters the values of survivors where they are now, and of local tokens.
void write_survivors(Tensor survivors, Tensor local, Tensor which, Tensor index,
                     Tensor values, Tensor sources, Tensor pages, Tensor num_local,
                     Tensor table) {
  const Memory memory = memory_of(survivors, local, which, index, table);
  const int64_t events = index.size(0), heads = memory.heads, all = sources.size(1);
  check("values", values, ScalarType::Float, 4);
  check_rows("sources", sources, ScalarType::Long, events, all);
  check_rows("num_pages", pages, ScalarType::Long, events, heads);
  check("num_local", num_local, ScalarType::Long, 1);
  STD_TORCH_CHECK(values.is_contiguous(), "values: expected them contiguous");
  STD_TORCH_CHECK(all % memory.width == 0 && all <= memory.table_width * memory.width,
                  "sources: expected places of at most ", memory.table_width,
                  " whole superblocks, got ", all);
  const int64_t tokens = values.size(3), page = memory.width / heads;
  const float* given = values.const_data_ptr<float>();
  const auto lists = read<int64_t>(sources), counts = read<int64_t>(pages);
  const int64_t* newest = num_local.const_data_ptr<int64_t>();
  torch::stable::parallel_for(0, which.size(0) * events, 1, [&](int64_t n, int64_t end) {
    for (; n < end; ++n) {
      const int64_t event = n % events, value = n / events;
      const float* own = given + n * heads * tokens;
      for (int64_t m = 0; m < all; m += memory.width) {
        float* to = memory.superblock(value, event, m / memory.width);
        for (int64_t i = 0; i < memory.width; ++i) {
          const int64_t survivor = lists[event][m + i];
          to[i] = survivor < 0 ? 0.0f : own[survivor];
        }
      }
      for (int64_t head = 0; head < heads; ++head) {
        float* to = memory.local_row(value, event, head);
        const float* from = own + head * tokens;
        for (int64_t i = 0; i < memory.most_local; ++i) {
          const int64_t token = std::min(counts[event][head] * page + i, tokens - 1);
          to[i] = i < newest[event] ? from[token] : 0.0f;
        }
      }
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("list_survivors", TORCH_BOX(&list_survivors));
  library.impl("read_survivors", TORCH_BOX(&read_survivors));
  library.impl("survivor_moves", TORCH_BOX(&survivor_moves));
  library.impl("write_survivors", TORCH_BOX(&write_survivors));
}
