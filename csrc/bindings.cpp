// Declares the operators of torch.ops.vllm_kvpolicy. Each .cu file implements one.
#include <torch/csrc/stable/library.h>

// In the library's bytes: which sources it was built of.
#ifndef KVPOLICY_SOURCES
#define KVPOLICY_SOURCES ""
#endif
extern "C" __attribute__((used, visibility("default"))) const char kvpolicy_sources[] =
    KVPOLICY_SOURCES;

STABLE_TORCH_LIBRARY(vllm_kvpolicy, library) {
  library.def(
      "compact_pages(Tensor(a!) slots, Tensor source_slots, Tensor dest_slots, "
      "Tensor first, Tensor? in_place, Tensor(b!)? scratch) -> ()");
  library.def(
      "page_tables(Tensor(a!) tables, Tensor(b!) lengths, Tensor rows, "
      "Tensor block_table, Tensor seq_lens, Tensor global_blocks, Tensor num_global, "
      "Tensor skip, Tensor pinned, int block_size) -> ()");
}
