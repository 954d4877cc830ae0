// Host code shared by the operators: tensor checks and kernel launches.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace kvpolicy {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline int64_t ceil_div(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

inline void check_beside(const char* name, const Tensor& tensor, const Tensor& other) {
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == other.get_device_index(), name,
      ": expected it on the same GPU as the other tensors");
}

// Checks that `list` is a contiguous [length] tensor.
inline void check_list(const char* name, const Tensor& list, ScalarType type,
                       int64_t length, const Tensor& other) {
  STD_TORCH_CHECK(list.scalar_type() == type, name, ": expected another dtype");
  STD_TORCH_CHECK(list.dim() == 1 && list.is_contiguous() && list.size(0) == length,
                  name, ": expected ", length, " contiguous entries");
  check_beside(name, list, other);
}

// Launches kernels on the current stream of the tensor's GPU.
class Launcher {
 public:
  explicit Launcher(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 blocks, int threads,
                  const Arguments&... arguments) const {
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.stream = stream_;
    STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace kvpolicy
