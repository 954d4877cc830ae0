// Checks the tensors of torch.ops.vllm_kvpolicy.page_tables and launches its kernel.
#include <torch/csrc/stable/library.h>

#include <kvpolicy/page_tables.cuh>

#include "host.h"

namespace {

using namespace kvpolicy;

// Checks that `table` is int32 [rows] or [rows, any] with contiguous rows.
void check_table(const char* name, const Tensor& table, int64_t dims, int64_t rows,
                 const Tensor& slot) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Int, name, ": expected int32");
  STD_TORCH_CHECK(table.dim() == dims && table.size(0) == rows, name, ": expected ",
                  dims, " dimensions and ", rows, " rows");
  const bool is_dense = table.stride(dims - 1) == 1 || table.size(dims - 1) <= 1;
  STD_TORCH_CHECK(is_dense, name, ": expected each row's numbers side by side");
  check_beside(name, table, slot);
}

void page_tables(Tensor tables, Tensor lengths, Tensor rows, Tensor block_table,
                 Tensor seq_lens, Tensor global_blocks, Tensor num_global,
                 Tensor skip, Tensor pinned, int64_t block_size) {
  const int64_t count = rows.numel(), slots = num_global.numel();
  STD_TORCH_CHECK(rows.is_cuda() && rows.scalar_type() == ScalarType::Long &&
                      rows.dim() == 1 && rows.is_contiguous(),
                  "rows: expected contiguous int64 on a GPU");
  check_table("tables", tables, 2, count, rows);
  check_table("lengths", lengths, 1, count, rows);
  check_table("block_table", block_table, 2, count, rows);
  check_table("seq_lens", seq_lens, 1, count, rows);
  check_table("global_blocks", global_blocks, 2, slots, rows);
  check_table("num_global", num_global, 1, slots, rows);
  check_table("skip", skip, 1, slots, rows);
  check_table("pinned", pinned, 1, slots, rows);
  const int64_t columns = tables.size(1);
  if (count == 0 || columns == 0) return;

  TableRows given{};
  given.slot = rows.const_data_ptr<int64_t>();
  given.block_table = block_table.const_data_ptr<int32_t>();
  given.seq_lens = seq_lens.const_data_ptr<int32_t>();
  given.table_distance = block_table.stride(0);
  given.table_columns = static_cast<int32_t>(block_table.size(1));
  given.global_blocks = global_blocks.const_data_ptr<int32_t>();
  given.global_distance = global_blocks.stride(0);
  given.num_global = num_global.const_data_ptr<int32_t>();
  given.skip = skip.const_data_ptr<int32_t>();
  given.pinned = pinned.const_data_ptr<int32_t>();
  given.block_size = static_cast<int32_t>(block_size);

  const Launcher launch(rows);
  launch(fill_page_tables, dim3(count, ceil_div(columns, kColumns)), kColumns, given,
         tables.mutable_data_ptr<int32_t>(), tables.stride(0),
         static_cast<int32_t>(columns), lengths.mutable_data_ptr<int32_t>());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy, CUDA, library) {
  library.impl("page_tables", TORCH_BOX(&page_tables));
}
