/* What all kernels share: the vector type, and the edge to Python.
 *
 * Vectors are GCC's and Clang's vector extensions: one source serves every instruction set, and
 * the compiler's flags choose the width. Intrinsics stay inside the few functions that need them.
 */
#ifndef STAFFEL_COMMON_H
#define STAFFEL_COMMON_H

#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* `aligned(4)`: loads and stores through it may be unaligned. `may_alias`: of float arrays. */
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }
static inline vec splat(float x) { return x - (vec){0}; }

#endif
