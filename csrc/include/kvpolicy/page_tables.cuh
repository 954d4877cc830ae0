// Builds page tables: each row's global superblocks, then its local ones.
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
  const int32_t* frontier_blocks;  // [slots] position of the frontier, in superblocks
  int32_t block_size;              // N
};

// Fills kColumns columns of row blockIdx.x of tables [R, columns], and its length.
__global__ void __launch_bounds__(kColumns)
    fill_page_tables(TableRows rows, int32_t* tables, int64_t distance, int32_t columns,
                     int32_t* lengths) {
  const int64_t row = blockIdx.x, slot = rows.slot[row];
  const int32_t held = rows.num_global[slot], frontier = rows.frontier_blocks[slot];
  const int32_t column = blockIdx.y * kColumns + threadIdx.x;
  if (column == 0) {
    lengths[row] = rows.seq_lens[row] - (frontier - held) * rows.block_size;
  }
  if (column >= columns) return;
  int32_t* place = tables + row * distance + column;
  if (column < held) {
    *place = rows.global_blocks[slot * rows.global_distance + column];
  } else {
    const int32_t own = min(column - held + frontier, rows.table_columns - 1);
    *place = rows.block_table[row * rows.table_distance + own];
  }
}

}  // namespace kvpolicy
