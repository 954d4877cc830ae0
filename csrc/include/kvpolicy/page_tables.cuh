// Builds page tables: each row's pinned superblocks, its global and its local ones.
#pragma once

#include <cstdint>

namespace kvpolicy {

constexpr int kColumns = 256;  // per thread block, one thread each

struct TableRows {
  const int64_t* slot;             // [R] slot of each row's request
  const int32_t* block_table;      // [R, P] vLLM's block table
  const int32_t* seq_lens;         // [R] tokens computed after the step
  int64_t table_distance;          // row stride of block_table, in entries
  int32_t table_columns;           // P
  const int32_t* global_blocks;    // [slots, A] superblocks of survivors
  int64_t global_distance;         // row stride of global_blocks, in entries
  const int32_t* num_global;       // [slots] number of valid entries in global_blocks
  const int32_t* skip;    // [slots] entries between the pinned ones and the frontier
  const int32_t* pinned;  // [slots] leading entries that stay as they are
  int32_t block_size;              // N
};

// Fills kColumns columns of row blockIdx.x of tables [R, columns], and its length.
__global__ void __launch_bounds__(kColumns)
    fill_page_tables(TableRows rows, int32_t* tables, int64_t distance, int32_t columns,
                     int32_t* lengths) {
  const int64_t row = blockIdx.x, slot = rows.slot[row];
  const int32_t held = rows.num_global[slot], skipped = rows.skip[slot] - held;
  const int32_t column = blockIdx.y * kColumns + threadIdx.x;
  if (column == 0) {
    lengths[row] = rows.seq_lens[row] - skipped * rows.block_size;
  }
  if (column >= columns) return;
  int32_t* place = tables + row * distance + column;
  const int32_t survivor = column - rows.pinned[slot];
  if (survivor >= 0 && survivor < held) {
    *place = rows.global_blocks[slot * rows.global_distance + survivor];
  } else {
    const int32_t own = survivor < 0 ? column : column + skipped;
    *place = rows.block_table[row * rows.table_distance + min(own, rows.table_columns - 1)];
  }
}

}  // namespace kvpolicy
