// Keys of one KV head, copied from their pages to panels that vectors read in order.
// Included by the headers that each_cpu.h compiles, behind vectors.h.

constexpr int kPanel = 2 * kLanes;  // keys at a time

static int64_t padded(int64_t length) { return (length + kPanel - 1) / kPanel * kPanel; }

// What keys are multiplied as: one channel a time, as float32.
template <typename Number>
struct AsFloats {
  static constexpr int64_t kWidth = 1;  // channels that lie in 32 bits

  static float pack(const Number* channel, int64_t, bool) { return to_float(*channel); }

  static Floats add(Floats sum, Floats keys, float query) { return sum + keys * query; }
};

// The same where the other factor has the keys' dtype.
template <typename Number>
struct Product : AsFloats<Number> {};

#ifdef KVPOLICY_BF16_PAIRS
// Two channels at a time, whose products are exact in float32.
template <>
struct Product<BFloat16> {
  static constexpr int64_t kWidth = 2;

  static inline __attribute__((always_inline)) float pack(const BFloat16* channel,
                                                          int64_t stride, bool is_pair) {
    const uint32_t next = is_pair ? channel[stride].bits : 0;
    return as_float(channel->bits | next << 16);
  }

  static Floats add(Floats sum, Floats keys, float query) {
    const __m512 queries = _mm512_set1_ps(query);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)keys, (__m512bh)queries);
  }
};
#endif

// Copies keys to panels of [channels / kWidth, kPanel], zero on padding. A head has the
// fields of `Head` of window_usage.cpp that name its pool, pages and sizes.
template <typename Number, typename Own, typename Keys>
static void pack_keys(const Keys& head, float* panels) {
  const int64_t end = padded(head.length), step = Own::kWidth;
  const int64_t width = (head.size + step - 1) / step * kPanel;
  memset(panels + (end / kPanel - 1) * width, 0, width * sizeof(float));
  int64_t count;
  for (int64_t token = 0; token < head.length; token += count) {
    const int64_t slot = token % head.page_size, lane = token % kPanel;
    count = head.page_size - slot;
    if (count > kPanel - lane) count = kPanel - lane;
    if (count > head.length - token) count = head.length - token;
    const int64_t page = token / head.page_size;
    const Number* pool = static_cast<const Number*>(head.pool);
    const Number* keys =
        pool + head.pages[page] * head.page_stride + slot * head.slot_stride;
    // Pages lie anywhere: the next one is fetched while this one is packed.
    const bool is_last = (page + 1) * head.page_size >= head.length;
    const Number* next = pool + head.pages[page + !is_last] * head.page_stride;
    float* panel = panels + token / kPanel * width + lane;
    for (int64_t d = 0; d < head.size; d += step, panel += kPanel) {
      const Number* column = keys + d * head.key_stride;
      const bool is_pair = d + 1 < head.size;
      if (head.slot_stride == 1) {
        for (int64_t c = d; c < d + step; ++c)
          for (int64_t j = 0; j < head.page_size; j += 64 / sizeof(Number))
            __builtin_prefetch(next + c * head.key_stride + j);
        for (int64_t j = 0; j < count; ++j)
          panel[j] = Own::pack(column + j, head.key_stride, is_pair);
      } else {
        for (int64_t j = 0; j < count; ++j)
          panel[j] = Own::pack(column + j * head.slot_stride, head.key_stride, is_pair);
      }
    }
  }
}
