// Compiles the header named by KVPOLICY_FOR_EACH_CPU once per kind of CPU, each time in
// another namespace KVPOLICY_CPU, and defines best_cpu(), which says what this one is.
// With GCC on x86-64 these are `newest` (AVX-512), `newer` (AVX2 and FMA) and `any`;
// elsewhere only `any`, which is whatever the compiler takes for its baseline.
//
// The header may include nothing: what it uses is included before, so that no function
// of the standard library is compiled for a CPU that this one is not.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVPOLICY_KINDS 1

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define KVPOLICY_CPU newest
#define KVPOLICY_BYTES 64
#include KVPOLICY_FOR_EACH_CPU
#undef KVPOLICY_BYTES
#undef KVPOLICY_CPU
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define KVPOLICY_CPU newer
#define KVPOLICY_BYTES 32
#include KVPOLICY_FOR_EACH_CPU
#undef KVPOLICY_BYTES
#undef KVPOLICY_CPU
#pragma GCC pop_options
#endif

#define KVPOLICY_CPU any
#define KVPOLICY_BYTES 16
#include KVPOLICY_FOR_EACH_CPU
#undef KVPOLICY_BYTES
#undef KVPOLICY_CPU

// Calls FUNCTION of the namespace that suits this CPU best.
#ifdef KVPOLICY_KINDS
#define KVPOLICY_BEST(FUNCTION)                                                   \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&     \
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") \
       ? newest::FUNCTION                                                         \
   : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")              \
       ? newer::FUNCTION                                                          \
       : any::FUNCTION)
#else
#define KVPOLICY_BEST(FUNCTION) (any::FUNCTION)
#endif
