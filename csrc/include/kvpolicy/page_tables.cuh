// Puts each row's global superblocks in front of its local ones.
#pragma once

#include <cstdint>

namespace kvpolicy {

constexpr int kColumns = 256;  // of a thread block, a thread each

struct TableRows {
  const int64_t* slot;             // [R] slot of each row
  const int32_t* block_table;      // [R, P] vLLM's rows
  const int32_t* seq_lens;         // [R] tokens computed after the step
  int64_t table_distance;          // entries between two rows of block_table
  int32_t table_columns;           // P
  const int32_t* global_blocks;    // [slots, A] superblocks of survivors
  int64_t global_distance;         // entries between two rows of global_blocks
  const int32_t* num_global;       // [slots] how many of them count
  const int32_t* frontier_blocks;  // [slots] frontier in superblocks
  int32_t block_size;              // N
};

// Fills columns of row blockIdx.x of tables [R, columns], and its length.
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
