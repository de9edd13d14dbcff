/* Which instruction set this CPU and system can run; asked of the portable library. */
#include "common.h"

/* 0: portable only; 1: AVX2 with FMA; 2: AVX-512 (F, BW, VL, DQ). */
EXPORT int staffel_cpu_level(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}
