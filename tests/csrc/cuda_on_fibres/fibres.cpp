// Runs thread blocks on fibres, and stands in for what a PyTorch for CUDA offers.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <link.h>
#include <ucontext.h>

#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

dim3 threadIdx, blockIdx;

namespace fibres {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr unsigned kMaxThreads = 1024, kMaxBlocksY = 65535;
constexpr int kRubbish = 0x5A, kInvalidConfiguration = 9;

struct Barrier {
  unsigned threads = 0, arrived = 0;
  int line = 0;
  int64_t generation = 0;
};

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  unsigned thread = 0;
  bool is_waiting = false;
  int64_t generation = 0;  // of the barrier, when the wait began
  bool is_done = false;
};

std::vector<std::unique_ptr<Fibre>> pool;
Barrier barrier;
ucontext_t scheduler;
Fibre* current = nullptr;
const std::function<void()>* body = nullptr;
std::string failure;
int order = 0;
std::mt19937 chance;

void leave() { swapcontext(&current->context, &scheduler); }

void start() {
  (*body)();
  current->is_done = true;
  leave();
}

__shared__ volatile char present;  // a write to it makes the system allocate all

int spoil_of_library(dl_phdr_info* library, size_t, void* base) {
  if (library->dlpi_addr != reinterpret_cast<ElfW(Addr)>(base)) return 0;
  for (int part = 0; part < library->dlpi_phnum; ++part) {
    const auto& header = library->dlpi_phdr[part];
    if (header.p_type != PT_TLS) continue;
    std::memset(library->dlpi_tls_data, kRubbish, header.p_memsz);
    return 1;
  }
  return 0;
}

void spoil_shared_memory() {
  present = 0;
  Dl_info own;
  dladdr(reinterpret_cast<void*>(&spoil_shared_memory), &own);
  if (dl_iterate_phdr(spoil_of_library, own.dli_fbase) == 0) {
    throw std::runtime_error("shared memory is not where it should be");
  }
}

// Who comes first: 0 for the lowest, 1 for the highest, else by chance.
std::vector<int64_t> in_order(int64_t count) {
  std::vector<int64_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (order == 1) std::reverse(numbers.begin(), numbers.end());
  if (order > 1) std::shuffle(numbers.begin(), numbers.end(), chance);
  return numbers;
}

void run_block(unsigned threads) {
  while (pool.size() < threads) pool.push_back(std::make_unique<Fibre>());
  barrier = Barrier{};
  barrier.threads = threads;
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fibre& fibre = *pool[thread];
    fibre.thread = thread;
    fibre.is_waiting = fibre.is_done = false;
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fibre.context, start, 0);
  }
  spoil_shared_memory();
  unsigned done = 0;
  while (done < threads) {
    bool has_moved = false;
    for (const int64_t number : in_order(threads)) {
      Fibre& fibre = *pool[number];
      if (fibre.is_done) continue;
      if (fibre.is_waiting && barrier.generation == fibre.generation) continue;
      fibre.is_waiting = false;
      threadIdx = dim3(fibre.thread, 0, 0);
      current = &fibre;
      swapcontext(&scheduler, &fibre.context);
      if (!failure.empty()) throw std::runtime_error(std::exchange(failure, ""));
      has_moved = true;
      done += fibre.is_done;
    }
    if (!has_moved) {
      throw std::runtime_error("threads wait at a barrier that others never reach");
    }
  }
}

}  // namespace

void meet_block(int line) {
  if (barrier.arrived != 0 && barrier.line != line) {
    failure = "threads of a block wait at different barriers";
    leave();
  }
  barrier.line = line;
  if (++barrier.arrived == barrier.threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  current->is_waiting = true;
  current->generation = barrier.generation;
  leave();
}

int run(const dim3& blocks, const dim3& threads, const std::function<void()>& kernel) {
  if (threads.y != 1 || threads.z != 1 || blocks.z != 1) {
    throw std::invalid_argument("launches of this shape are not emulated");
  }
  if (blocks.x == 0 || blocks.y == 0 || blocks.y > kMaxBlocksY || threads.x == 0 ||
      threads.x > kMaxThreads) {
    return kInvalidConfiguration;
  }
  body = &kernel;
  for (const int64_t block : in_order(int64_t{blocks.x} * blocks.y)) {
    blockIdx = dim3(block % blocks.x, block / blocks.x, 0);
    run_block(threads.x);
  }
  return 0;
}

}  // namespace fibres

extern "C" {

void set_order(int order) {
  fibres::order = order;
  fibres::chance.seed(order);
}

int aoti_torch_get_current_cuda_stream(int, void** stream) {
  *stream = nullptr;
  return 0;
}

void torch_c10_cuda_check_msg(int error, const char*, const char*, unsigned, bool,
                              char** message) {
  *message = error == 0 ? nullptr : strdup("the launch of a kernel failed");
}

void torch_c10_cuda_free_error_msg(char* message) { free(message); }

}
