// Numbers of 16 bits as float32; longer ones stay as they are.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvpolicy {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline __attribute__((always_inline)) float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline __attribute__((always_inline)) float to_float(float value) { return value; }

inline __attribute__((always_inline)) double to_float(double value) { return value; }

inline __attribute__((always_inline)) float to_float(BFloat16 value) {
  return as_float(uint32_t{value.bits} << 16);
}

// The exponent moves by a product, which makes numbers below 2^-14 right as well;
// infinity and NaN get the highest exponent.
inline __attribute__((always_inline)) float to_float(Half value) {
  const uint32_t size = value.bits & 0x7fff, sign = uint32_t{value.bits & 0x8000u} << 16;
  const float scaled = as_float(size << 13) * 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &scaled, sizeof(bits));
  const uint32_t highest = size >= 0x7c00 ? 0x7f800000u : 0u;
  return as_float(bits | highest | sign);
}

}  // namespace kvpolicy
