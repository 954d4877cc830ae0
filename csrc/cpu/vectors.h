// Vectors of one kind of CPU. Included by the headers that each_cpu.h compiles, once in
// each of their namespaces, hence without a guard.

constexpr int kLanes = KVPOLICY_BYTES / 4;

typedef float Floats __attribute__((vector_size(KVPOLICY_BYTES)));
typedef int32_t Ints __attribute__((vector_size(KVPOLICY_BYTES)));
typedef double Doubles __attribute__((vector_size(2 * KVPOLICY_BYTES)));

static inline Floats load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof(values));
  return values;
}

static inline void store(float* to, Floats values) {
  memcpy(to, &values, sizeof(values));
}

// exp(x) for x between -87 and 0, to one unit in the last place. x is split into n ln 2
// and a rest of at most ln 2 / 2, whose exponential is a polynomial (Cephes, expf).
static inline Floats exp_below_one(Floats x) {
  const float whole = 12582912.0f;  // 1.5 * 2^23: the sum has no fraction
  const Floats shifted = x * 1.44269504088896341f + whole;
  const Floats n = shifted - whole;
  const Floats rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * (rest * rest) + rest + 1.0f;
  const Ints power = ((Ints)shifted - (Ints)(Floats{} + whole)) << 23;
  return (Floats)((Ints)y + power);
}
