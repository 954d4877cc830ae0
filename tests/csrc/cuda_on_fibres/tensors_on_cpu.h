// Comes before each .cu file: tensors on a CPU count as those of a GPU.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

namespace torch::stable::accelerator {

struct NoGuard {
  explicit NoGuard(int32_t) {}
};

}  // namespace torch::stable::accelerator

#define CUDA CPU
#define is_cuda is_cpu
#define DeviceGuard NoGuard
