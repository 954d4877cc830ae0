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
      "Tensor first, Tensor? in_place, Tensor(b!)? scratch) -> ()");
  library.def(
      "credited_mass(Tensor(a!) mass, Tensor(b!) updated, Tensor usage, "
      "Tensor lengths, Tensor? credit, float decay, float mix) -> ()");
  library.def(
      "fill_next_best(Tensor(a!) marked, Tensor keep, Tensor score, Tensor valid, "
      "Tensor? targets, int target) -> ()");
  library.def("limit_must_keep(Tensor(a!) kept, Tensor must_keep, int budget) -> ()");
  library.def(
      "list_survivors(Tensor(a!) listed, Tensor survives, Tensor first, "
      "int block_size) -> ()");
  library.def(
      "must_keep_tokens(Tensor(a!) lengths, Tensor(b!) must_keep, Tensor num_pages, "
      "Tensor num_local, Tensor sinks, int block_size) -> ()");
  library.def(
      "paged_norms(Tensor(a!) norms, Tensor pool, Tensor pages, Tensor lengths) -> ()");
  library.def(
      "paged_quadratics(Tensor(a!) values, Tensor pool, Tensor pages, Tensor lengths, "
      "Tensor directions, Tensor matrices) -> ()");
  library.def(
      "pick_by_quota(Tensor(a!) marked, Tensor score, Tensor group, Tensor quotas) "
      "-> ()");
  library.def(
      "pooled_usage(Tensor(a!) pooled, Tensor usage, Tensor lengths, Tensor window, "
      "int kernel, bool pads) -> ()");
  library.def(
      "read_survivors(Tensor(a!) found, Tensor survivors, Tensor local, Tensor which, "
      "Tensor index, Tensor first, Tensor global_blocks) -> ()");
  library.def(
      "resize(Tensor(a!) marked, Tensor keep, Tensor score, Tensor must_keep, "
      "Tensor num_pages, Tensor quota, int block_size) -> ()");
  library.def(
      "segment_quota(Tensor(a!) segments, Tensor(b!) quotas, Tensor(c!) segment_of, "
      "Tensor mass, Tensor lengths, Tensor exempt, Tensor total, float segment_mass, "
      "int thresholds, int min_segment, int max_segment, int min_quota, bool by_mass) "
      "-> ()");
  library.def(
      "survivor_moves(Tensor(a!) source, Tensor(b!) dest, Tensor(c!) starts, "
      "Tensor(d!)? in_place, Tensor sources, Tensor held, Tensor first, Tensor pages, "
      "Tensor? unmoved, int tokens, int block_size) -> ()");
  library.def(
      "window_usage(Tensor(a!) mean, Tensor(b!) last, Tensor queries, Tensor pool, "
      "Tensor pages, Tensor lengths, float scale, Tensor? sinks) -> ()");
  library.def(
      "write_survivors(Tensor(a!) survivors, Tensor(b!) local, Tensor which, "
      "Tensor index, Tensor values, Tensor sources, Tensor num_pages, "
      "Tensor num_local, Tensor global_blocks) -> ()");
}
