// Kernels with the faults that fibres are to find, and one without.
#include <cuda_runtime.h>

#include <exception>

namespace {

constexpr int kThreads = 64;

// Each thread reads what a neighbour has written.
template <bool kBefore, bool kAfter>
__global__ void pass_on(int* numbers, int rounds, int step) {
  __shared__ int shared[kThreads];
  const int thread = threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    shared[thread] = numbers[thread];
    if (kBefore) __syncthreads();
    numbers[thread] = shared[(thread + step) % kThreads];
    if (kAfter) __syncthreads();
  }
}

__global__ void read_what_nobody_wrote(int* numbers) {
  __shared__ int shared[kThreads];
  numbers[threadIdx.x] = shared[threadIdx.x];
  shared[threadIdx.x] = 0;
}

__global__ void only_some_wait(int* numbers) {
  if (numbers[threadIdx.x] % 2 == 0) __syncthreads();
}

__global__ void wait_at_two_places(int* numbers) {
  if (threadIdx.x < kThreads / 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

int launch(dim3 blocks, int threads, void (*kernel)(int*), int* numbers) {
  const cudaLaunchConfig_t config{blocks, dim3(threads), 0, nullptr};
  return cudaLaunchKernelEx(&config, kernel, numbers);
}

}  // namespace

// Runs one of them on 64 numbers; returns what went wrong, or nothing.
extern "C" const char* run_kernel(int which, int* numbers) {
  static char text[200];
  using Kernel = void (*)(int*);
  const Kernel kernels[] = {
      [](int* numbers) { pass_on<true, true>(numbers, 3, 1); },
      [](int* numbers) { pass_on<false, true>(numbers, 3, 1); },
      [](int* numbers) { pass_on<false, true>(numbers, 3, kThreads - 1); },
      [](int* numbers) { pass_on<true, false>(numbers, 3, 1); },
      read_what_nobody_wrote,
      only_some_wait,
      wait_at_two_places,
  };
  try {
    const int error = launch(dim3(2), kThreads, kernels[which], numbers);
    return error == 0 ? "" : "an error of the launch";
  } catch (const std::exception& found) {
    std::strncpy(text, found.what(), sizeof(text) - 1);
    return text;
  }
}

extern "C" int launch_of_size(int64_t blocks, int64_t blocks_y, int threads) {
  return launch(dim3(blocks, blocks_y), threads, [](int*) {}, nullptr);
}
