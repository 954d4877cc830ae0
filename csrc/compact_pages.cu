// Checks the tensors of torch.ops.vllm_kvpolicy.compact_pages and launches its kernels.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <kvpolicy/compact_pages.cuh>
#include <optional>

#include "host.h"

namespace {

using namespace kvpolicy;

void check_matrix(const char* name, const Tensor& rows) {
  STD_TORCH_CHECK(rows.is_cuda(), name, ": expected it on a GPU");
  STD_TORCH_CHECK(rows.dim() == 2 && (rows.stride(1) == 1 || rows.size(1) == 1), name,
                  ": expected each row's numbers side by side");
}

// Returns the widest access in bytes, at most 16, that is aligned with the start and
// the end of every token.
int64_t access_bytes(const Moves& moves) {
  const int64_t address = reinterpret_cast<int64_t>(moves.slots);
  const int64_t bits = address | moves.distance | moves.token_bytes;
  return std::min<int64_t>(bits & -bits, 16);
}

template <typename Vector>
void move_tokens(const Launcher& launch, const Moves& moves, const int64_t* first,
                 int64_t rows) {
  const int64_t slices = ceil_div(moves.token_bytes, kLanes * sizeof(Vector));
  const dim3 per_row(rows, slices);
  const dim3 per_pass(ceil_div(moves.count, kTokens), slices);
  if (moves.scratch != nullptr) {
    launch(copy_changed<Vector, true>, per_pass, kThreads, moves);
  }
  launch(move_in_place<Vector>, per_row, kThreads, moves, first);
  if (moves.scratch != nullptr) {
    launch(copy_changed<Vector, false>, per_pass, kThreads, moves);
  }
}

void compact_pages(Tensor slots, Tensor source_slots, Tensor dest_slots, Tensor first,
                   std::optional<Tensor> in_place, std::optional<Tensor> scratch) {
  const int64_t count = source_slots.numel(), rows = first.numel() - 1;
  check_matrix("slots", slots);
  check_list("source_slots", source_slots, ScalarType::Long, count, slots);
  check_list("dest_slots", dest_slots, ScalarType::Long, count, slots);
  check_list("first", first, ScalarType::Long, rows + 1, slots);
  STD_TORCH_CHECK(in_place.has_value() == scratch.has_value(),
                  "scratch: expected with in_place, and only with it");
  const int64_t item_bytes = slots.element_size(), width = slots.size(1);
  Moves moves{};
  moves.slots = static_cast<char*>(slots.mutable_data_ptr());
  moves.distance = slots.stride(0) * item_bytes;
  moves.token_bytes = width * item_bytes;
  moves.source = source_slots.const_data_ptr<int64_t>();
  moves.dest = dest_slots.const_data_ptr<int64_t>();
  moves.count = count;
  if (in_place.has_value()) {
    check_list("in_place", *in_place, ScalarType::Bool, count, slots);
    check_matrix("scratch", *scratch);
    STD_TORCH_CHECK(scratch->is_contiguous() && scratch->size(0) == count &&
                        scratch->size(1) == width &&
                        scratch->scalar_type() == slots.scalar_type(),
                    "scratch: expected a token for each move, of the slots' dtype");
    moves.in_place = in_place->const_data_ptr<bool>();
    moves.scratch = static_cast<char*>(scratch->mutable_data_ptr());
  }
  if (count == 0 || rows <= 0 || width == 0) return;

  const Launcher launch(slots);
  const int64_t* starts = first.const_data_ptr<int64_t>();
  switch (access_bytes(moves)) {
    case 16:
      return move_tokens<uint4>(launch, moves, starts, rows);
    case 8:
      return move_tokens<uint2>(launch, moves, starts, rows);
    case 4:
      return move_tokens<uint32_t>(launch, moves, starts, rows);
    case 2:
      return move_tokens<uint16_t>(launch, moves, starts, rows);
    default:
      return move_tokens<uint8_t>(launch, moves, starts, rows);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy, CUDA, library) {
  library.impl("compact_pages", TORCH_BOX(&compact_pages));
}
