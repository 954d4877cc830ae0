// Stands in for CUDA's header of this name, so that a C++ compiler takes .cu files.
//
// Thread blocks run one after the other; the threads of a block are fibres that change
// places at barriers only, in an order that set_order chooses. What a kernel leaves to
// chance therefore comes out differently in different orders. Only what the kernels use
// is here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __launch_bounds__(threads)
// All of a library's thread_local variables lie side by side, so that shared memory can
// be filled with rubbish before each block. There is one thread of the system only.
#define __shared__ static thread_local

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
extern dim3 threadIdx, blockIdx;
using std::max;
using std::min;

namespace fibres {

// Waits for all threads of the block.
void meet_block(int line);
int run(const dim3& blocks, const dim3& threads, const std::function<void()>& kernel);

}  // namespace fibres

#define __syncthreads() fibres::meet_block(__LINE__)

using cudaError_t = int;
using cudaStream_t = void*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return fibres::run(config->gridDim, config->blockDim, [&] { kernel(arguments...); });
}
