// Declares the operators of torch.ops.vllm_kvpolicy_cpu, which the other files implement.
#include <torch/csrc/stable/library.h>

// In the library's bytes: which sources it was built of.
#ifndef KVPOLICY_SOURCES
#define KVPOLICY_SOURCES ""
#endif
extern "C" __attribute__((used, visibility("default"))) const char kvpolicy_sources[] =
    KVPOLICY_SOURCES;

STABLE_TORCH_LIBRARY(vllm_kvpolicy_cpu, library) {
  library.def(
      "compact_pages(Tensor(a!) pages, Tensor source_slots, Tensor dest_slots, "
      "Tensor first, Tensor? in_place) -> ()");
  library.def(
      "fill_next_best(Tensor(a!) marked, Tensor keep, Tensor score, Tensor valid, "
      "Tensor? targets, int target) -> ()");
  library.def(
      "pick_by_quota(Tensor(a!) marked, Tensor score, Tensor group, Tensor quotas) "
      "-> ()");
  library.def(
      "resize(Tensor(a!) marked, Tensor keep, Tensor score, Tensor must_keep, "
      "Tensor num_pages, Tensor quota, int block_size) -> ()");
  library.def(
      "segment_quota(Tensor(a!) segments, Tensor(b!) quotas, Tensor(c!) segment_of, "
      "Tensor mass, Tensor lengths, Tensor exempt, Tensor total, float segment_mass, "
      "int thresholds, int min_segment, int max_segment, int min_quota, bool by_mass) "
      "-> ()");
  library.def(
      "window_usage(Tensor(a!) mean, Tensor(b!) last, Tensor queries, Tensor pool, "
      "Tensor pages, Tensor lengths, float scale) -> ()");
}
