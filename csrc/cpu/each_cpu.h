// Compiles the header named by KVPOLICY_FOR_EACH_CPU once per kind of CPU, each time in
// another namespace KVPOLICY_CPU; KVPOLICY_BEST(FUNCTION) is the one for this CPU.
// With GCC on x86-64 these are `newest` (AVX-512 with products of bfloat16), `newer`
// (AVX-512), `new_enough` (AVX2 and FMA) and `any`; elsewhere only `any`, which is
// whatever the compiler takes for its baseline.
//
// The header may include nothing: what it uses is included before, so that no function
// of the standard library is compiled for a CPU that this one is not.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVPOLICY_KINDS 1
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
#define KVPOLICY_CPU newest
#define KVPOLICY_BYTES 64
#define KVPOLICY_BF16_PAIRS 1
#include KVPOLICY_FOR_EACH_CPU
#undef KVPOLICY_BF16_PAIRS
#undef KVPOLICY_BYTES
#undef KVPOLICY_CPU
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define KVPOLICY_CPU newer
#define KVPOLICY_BYTES 64
#include KVPOLICY_FOR_EACH_CPU
#undef KVPOLICY_BYTES
#undef KVPOLICY_CPU
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define KVPOLICY_CPU new_enough
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

// FUNCTION of the namespace that suits this CPU best, or of the one that a test names.
#ifdef KVPOLICY_ONLY
#define KVPOLICY_BEST(FUNCTION) (KVPOLICY_ONLY::FUNCTION)
#elif defined(KVPOLICY_KINDS)
#define KVPOLICY_HAS(NAME) __builtin_cpu_supports(NAME)
#define KVPOLICY_HAS_512                                       \
  (KVPOLICY_HAS("avx512f") && KVPOLICY_HAS("avx512bw") &&      \
   KVPOLICY_HAS("avx512dq") && KVPOLICY_HAS("avx512vl"))
#define KVPOLICY_BEST(FUNCTION)                                             \
  (KVPOLICY_HAS_512 && KVPOLICY_HAS("avx512bf16") ? newest::FUNCTION        \
   : KVPOLICY_HAS_512                             ? newer::FUNCTION         \
   : KVPOLICY_HAS("avx2") && KVPOLICY_HAS("fma")  ? new_enough::FUNCTION    \
                                                  : any::FUNCTION)
#else
#define KVPOLICY_BEST(FUNCTION) (any::FUNCTION)
#endif
