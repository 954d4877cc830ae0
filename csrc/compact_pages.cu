// Checks the tensors of torch.ops.vllm_kvpolicy.compact_pages and launches its kernels.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <kvpolicy/compact_pages.cuh>
#include <optional>

namespace {

using kvpolicy::Moves;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

// A contiguous [length] tensor beside the slots.
void check_list(const char* name, const Tensor& list, ScalarType type, int64_t length,
                const Tensor& slots) {
  STD_TORCH_CHECK(list.scalar_type() == type, name, ": expected another dtype");
  STD_TORCH_CHECK(list.dim() == 1 && list.is_contiguous() && list.size(0) == length,
                  name, ": expected ", length, " contiguous entries");
  STD_TORCH_CHECK(
      list.is_cuda() && list.get_device_index() == slots.get_device_index(), name,
      ": expected it on the device of the slots");
}

void check_matrix(const char* name, const Tensor& rows) {
  STD_TORCH_CHECK(rows.is_cuda(), name, ": expected it on a GPU");
  STD_TORCH_CHECK(rows.dim() == 2 && (rows.stride(1) == 1 || rows.size(1) == 1), name,
                  ": expected each row's numbers side by side");
}

// The widest access, in bytes, at which every token begins and ends.
int64_t access_bytes(const Moves& moves) {
  const int64_t address = reinterpret_cast<int64_t>(moves.slots);
  const int64_t bits = address | moves.distance | moves.token_bytes;
  return std::min<int64_t>(bits & -bits, 16);
}

template <typename Vector>
void launch(const Moves& moves, const int64_t* first, int64_t rows,
            cudaStream_t stream) {
  using namespace kvpolicy;
  const int64_t slices = ceil_div(moves.token_bytes, kLanes * sizeof(Vector));
  const dim3 per_row(rows, slices);
  const dim3 per_pass(ceil_div(moves.count, kTokens), slices);
  if (moves.scratch != nullptr) {
    copy_changed<Vector, true><<<per_pass, kThreads, 0, stream>>>(moves);
  }
  move_in_place<Vector><<<per_row, kThreads, 0, stream>>>(moves, first);
  if (moves.scratch != nullptr) {
    copy_changed<Vector, false><<<per_pass, kThreads, 0, stream>>>(moves);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void dispatch(const Moves& moves, const int64_t* first, int64_t rows,
              cudaStream_t stream) {
  switch (access_bytes(moves)) {
    case 16:
      return launch<uint4>(moves, first, rows, stream);
    case 8:
      return launch<uint2>(moves, first, rows, stream);
    case 4:
      return launch<uint32_t>(moves, first, rows, stream);
    case 2:
      return launch<uint16_t>(moves, first, rows, stream);
    default:
      return launch<uint8_t>(moves, first, rows, stream);
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

  const int32_t device = slots.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  dispatch(moves, first.const_data_ptr<int64_t>(), rows,
           static_cast<cudaStream_t>(stream));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy, CUDA, library) {
  library.impl("compact_pages", TORCH_BOX(&compact_pages));
}
