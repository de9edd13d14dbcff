/* Functions of each lane of a vector. */
#ifndef STAFFEL_FUNCTIONS_H
#define STAFFEL_FUNCTIONS_H

#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define LOG2E 1.44269504088896340736

INLINE vec greater(vec a, vec b) {
#if LANES == 16
    return _mm512_max_ps(a, b);
#elif LANES == 8
    return _mm256_max_ps(a, b);
#else
    ivec first = a > b;
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
#endif
}

/* 2^x - 1 = scale * result + scale - 1. The polynomial is the one of degree 5 with value 1 at 0
 * that has the least relative error of 2^r on |r| <= 1/2: 9.2e-8. x from -126 to 127. */
INLINE vec exp2_parts(vec x, vec *scale) {
    const float shift = 12582912; /* 1.5 * 2^23: adding it rounds to a whole number */
    vec shifted = x + shift;
    vec r = x - (shifted - shift);
    *scale = (vec)(((uvec)shifted << 23) + (127u << 23));
    vec p = splat(0.00132647291f);
    p = p * r + 0.00967151264f;
    p = p * r + 0.05550733737f;
    p = p * r + 0.2402224209f;
    p = p * r + 0.6931469776f;
    return p * r;
}

/* 2^x for x <= 0; 0 below 2^-126. A NaN stays one. */
INLINE vec exp2_of(vec x) {
    ivec tiny = x < -126;
    vec scale, p = exp2_parts(x, &scale);
    return (vec)((ivec)(p * scale + scale) & ~tiny);
}

/* tanh(x) = e / (e + 2) with e = exp(2 x) - 1: no digits are lost near 0. */
INLINE vec tanh_of(vec x) {
    const float most = 10; /* 1 from there on, in float */
    x = greater(x, splat(-most));
    x = -greater(-x, splat(-most));
    vec scale, p = exp2_parts(x * 2.885390082f, &scale); /* 2 / ln 2 */
    vec e = p * scale + (scale - 1);
    return e / (e + 2);
}

#endif
