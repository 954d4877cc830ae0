// Cuts rows of tokens into segments, shares a budget among them, and picks their tokens.
// The steps are those of kernels/segment_quota.py, one row at a time.
#include <cmath>
#include <numeric>
#include <vector>

#include "best.h"

namespace {

using namespace kvpolicy;
using Numbers = std::vector<int64_t>;

constexpr double kMassUnit = 268435456.0;  // of a whole row
constexpr int64_t kFirstStep = 1 << 23;    // no row has twice as many tokens

struct Cuts {
  Numbers thresholds;  // of the running mass, rounded half to even
  int64_t min_segment, max_segment, min_quota;
  bool by_mass;
};

int64_t sum(const Numbers& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

// Flags the tokens that open a segment, before short segments are merged.
void flag_cuts(const int64_t* mass, int64_t length, const Cuts& cuts,
               std::vector<bool>& flags) {
  const int64_t count = cuts.thresholds.size();
  int64_t crossed = 0, whole = 0, next = 0;  // token that opens a piece anyway
  bool first_crosses = false;
  for (int64_t t = 0; t < length; ++t) {
    whole += mass[t];
    const int64_t before = crossed;
    while (crossed < count && whole >= cuts.thresholds[crossed]) ++crossed;
    if (t == 0) first_crosses = crossed > 0;
    const bool opens = (t > 0 && crossed > before) || (t == 1 && first_crosses) ||
                       (t == length - 1 && crossed < count);
    flags[t] = opens || t == next;
    if (flags[t]) next = t + cuts.max_segment;
  }
}

// Deals out `total` tokens one at a time from the first segment on, skipping full ones.
Numbers round_robin(const Numbers& capacity, int64_t total) {
  int64_t level = 0;
  for (int64_t bit = kFirstStep; bit > 0; bit /= 2) {
    int64_t dealt = 0;
    for (const int64_t most : capacity) dealt += std::min(most, level + bit);
    if (dealt <= total) level += bit;
  }
  Numbers given(capacity);
  for (int64_t& each : given) each = std::min(each, level);
  int64_t left = total - sum(given);
  for (size_t s = 0; s < given.size() && left > 0; ++s) {
    if (capacity[s] <= level) continue;
    ++given[s];
    --left;
  }
  return given;
}

// Lowers floors that exceed the budget by `surplus` tokens.
void shrink_floors(Numbers& floors, const Numbers& mass, int64_t surplus) {
  Numbers spare(floors);
  for (int64_t& each : spare) each = std::max<int64_t>(each - 1, 0);
  const int64_t left = surplus - sum(spare);
  const Numbers taken = round_robin(spare, surplus);
  for (size_t s = 0; s < floors.size(); ++s) floors[s] -= taken[s];
  if (left <= 0) return;
  Numbers order;
  for (size_t s = 0; s < floors.size(); ++s)
    if (floors[s] > 0) order.push_back(s);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return mass[a] < mass[b]; });
  for (int64_t i = 0; i < left && i < static_cast<int64_t>(order.size()); ++i)
    floors[order[i]] = 0;
}

// A floor for each segment, the rest of `total` by mass.
Numbers share_by_mass(const Numbers& capacity, const Numbers& mass, int64_t total,
                      int64_t min_quota) {
  Numbers base(capacity);
  for (int64_t& each : base) each = std::min(each, min_quota);
  const int64_t surplus = sum(base) - total;
  if (surplus > 0) shrink_floors(base, mass, surplus);
  const double rest = static_cast<double>(std::max<int64_t>(-surplus, 0));
  const double whole = static_cast<double>(std::max<int64_t>(sum(mass), 1));
  Numbers quotas(base);
  for (size_t s = 0; s < quotas.size(); ++s) {
    const double share = rest * static_cast<double>(mass[s]) / whole;
    const int64_t rounded = static_cast<int64_t>(std::nearbyint(share));
    quotas[s] = std::min(quotas[s] + rounded, capacity[s]);
  }
  const int64_t excess = sum(quotas) - total;
  Numbers room(quotas);
  for (size_t s = 0; s < room.size(); ++s)
    room[s] = excess > 0 ? quotas[s] - base[s] : capacity[s] - quotas[s];
  const Numbers moved = round_robin(room, std::abs(excess));
  for (size_t s = 0; s < quotas.size(); ++s) quotas[s] += excess > 0 ? -moved[s] : moved[s];
  return quotas;
}

struct Row {
  const int64_t* mass;
  const bool* exempt;
  int64_t length, total;
  int64_t* segments;    // [bound, 2]
  int64_t* quotas;      // [bound]
  int64_t* segment_of;  // [tokens]
};

void cut_and_share(const Row& row, int64_t tokens, int64_t bound, const Cuts& cuts,
                   std::vector<bool>& flags) {
  flag_cuts(row.mass, row.length, cuts, flags);
  Numbers capacity(bound, 0), mass(bound, 0);
  int64_t start = 0;
  for (int64_t s = 0; s < bound; ++s) {
    int64_t end = std::min(start + cuts.min_segment, row.length);
    while (end < row.length && !flags[end]) ++end;
    for (int64_t t = start; t < end; ++t) {
      row.segment_of[t] = s;
      capacity[s] += !row.exempt[t];
      mass[s] += row.exempt[t] ? 0 : row.mass[t];
    }
    row.segments[2 * s] = start;
    row.segments[2 * s + 1] = start = end;
  }
  std::fill(row.segment_of + row.length, row.segment_of + tokens, bound);
  const Numbers quotas = cuts.by_mass
                             ? share_by_mass(capacity, mass, row.total, cuts.min_quota)
                             : round_robin(capacity, row.total);
  std::copy(quotas.begin(), quotas.end(), row.quotas);
}

// Results are contiguous; S is their bound on segments.
void segment_quota(Tensor segments, Tensor quotas, Tensor segment_of, Tensor mass,
                   Tensor lengths, Tensor exempt, Tensor total, double segment_mass,
                   int64_t thresholds, int64_t min_segment, int64_t max_segment,
                   int64_t min_quota, bool by_mass) {
  const int64_t count = mass.size(0), tokens = mass.size(1), bound = quotas.size(1);
  check_rows("segments", segments, ScalarType::Long, count, 2 * bound);
  check_rows("quotas", quotas, ScalarType::Long, count, bound);
  check_rows("segment_of", segment_of, ScalarType::Long, count, tokens);
  check_rows("mass", mass, ScalarType::Long, count, tokens);
  check_rows("lengths", lengths, ScalarType::Long, count, 1);
  check_rows("exempt", exempt, ScalarType::Bool, count, tokens);
  check_rows("total", total, ScalarType::Long, count, 1);
  Cuts cuts{{}, min_segment, max_segment, min_quota, by_mass};
  const double step = segment_mass * kMassUnit;
  for (int64_t k = 1; k <= thresholds; ++k)
    cuts.thresholds.push_back(static_cast<int64_t>(std::nearbyint(k * step)));
  const auto masses = read<int64_t>(mass), held = read<int64_t>(lengths);
  const auto totals = read<int64_t>(total);
  for (int64_t row = 0; row < count; ++row)
    STD_TORCH_CHECK(0 <= *held[row] && *held[row] <= tokens, "lengths: expected 0 to ",
                    tokens, ", got ", *held[row]);
  const auto exempts = read<bool>(exempt);
  const auto edges = write<int64_t>(segments), shares = write<int64_t>(quotas);
  const auto numbers = write<int64_t>(segment_of);
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    std::vector<bool> flags(tokens);
    for (int64_t row = begin; row < end; ++row)
      cut_and_share({masses[row], exempts[row], *held[row], *totals[row], edges[row],
                     shares[row], numbers[row]},
                    tokens, bound, cuts, flags);
  });
}

// Marks the best tokens of each group of a row, as many as its quota.
void pick_by_quota(Tensor marked, Tensor score, Tensor group, Tensor quotas) {
  const int64_t count = score.size(0), tokens = score.size(1), groups = quotas.size(1);
  check_rows("marked", marked, ScalarType::Bool, count, tokens);
  check_rows("score", score, score.scalar_type(), count, tokens);
  check_rows("group", group, ScalarType::Long, count, tokens);
  check_rows("quotas", quotas, ScalarType::Long, count, groups);
  const auto marks = write<bool>(marked);
  const auto groups_of = read<int64_t>(group), quota = read<int64_t>(quotas);
  with_type_of(score, [&](auto zero) {
    const auto scores = read<decltype(zero)>(score);
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      std::vector<RankOf<decltype(zero)>> ranks(tokens);
      Numbers place(groups + 1);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t* own = groups_of[row];
        std::fill(place.begin(), place.end(), 0);
        for (int64_t t = 0; t < tokens; ++t)
          if (0 <= own[t] && own[t] < groups) ++place[own[t] + 1];
        std::partial_sum(place.begin(), place.end(), place.begin());
        for (int64_t t = 0; t < tokens; ++t) {
          marks[row][t] = false;
          if (0 <= own[t] && own[t] < groups)
            ranks[place[own[t]]++] = rank_of(to_float(scores[row][t]), t);
        }
        // Each place is now where its group ends.
        for (int64_t g = 0; g < groups; ++g)
          mark_best(ranks.data() + (g ? place[g - 1] : 0), ranks.data() + place[g],
                    quota[row][g], marks[row]);
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_kvpolicy_cpu, CPU, library) {
  library.impl("segment_quota", TORCH_BOX(&segment_quota));
  library.impl("pick_by_quota", TORCH_BOX(&pick_by_quota));
}
