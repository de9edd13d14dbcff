/* out [rows][48] += x [rows][quads][4] · w [quads][48][4] in int8, as each instruction set does it. */
#ifndef STAFFEL_TILES_INT8_H
#define STAFFEL_TILES_INT8_H

#include <string.h>

#include "panels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define QUAD 4 /* neighbours along k in one lane */

typedef struct {
    int64_t rows;   /* of a tile, at most */
    int32_t offset; /* what is added to each weight, and has to be taken off the sums again */
    void (*multiply)(int64_t rows, const int8_t *x, int64_t stride, const int8_t *w, int64_t quads,
                     int32_t *out, Stream *ahead);
} Tiles;

INLINE int32_t quad_at(const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return quad;
}

#if defined(__AVX2__)

/* |x| · (w with x's sign) gives x · w, and fits: two products of at most 127 · 127 don't saturate
 * the int16 that the instruction adds them up in. */
INLINE void avx2_tile(const int rows, const int vectors, const int8_t *x, int64_t stride,
                      const int8_t *w, int64_t quads, int32_t *out, Stream *ahead) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int at = 0; at < PANEL; at += vectors * 8) {
        __m256i sum[4][6];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
            for (int v = 0; v < vectors; v++)
                sum[r][v] = _mm256_loadu_si256((void *)(out + r * PANEL + at + v * 8));
        for (int64_t q = 0; q < quads; q++) {
            const int8_t *weights = w + (q * PANEL + at) * QUAD;
            prefetch(ahead);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                __m256i value = _mm256_set1_epi32(quad_at(x + r * stride + q * QUAD));
                __m256i size = _mm256_abs_epi8(value);
#pragma GCC unroll 6
                for (int v = 0; v < vectors; v++) {
                    __m256i weight = _mm256_loadu_si256((void *)(weights + v * 32));
                    __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(weight, value));
                    sum[r][v] = _mm256_add_epi32(sum[r][v], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
            for (int v = 0; v < vectors; v++)
                _mm256_storeu_si256((void *)(out + r * PANEL + at + v * 8), sum[r][v]);
    }
}

static void avx2_multiply(int64_t rows, const int8_t *x, int64_t stride, const int8_t *w,
                          int64_t quads, int32_t *out, Stream *ahead) {
    switch (rows) {
        case 1: avx2_tile(1, 6, x, stride, w, quads, out, ahead); break;
        case 2: avx2_tile(2, 3, x, stride, w, quads, out, ahead); break;
        case 3: avx2_tile(3, 3, x, stride, w, quads, out, ahead); break;
        case 4: avx2_tile(4, 3, x, stride, w, quads, out, ahead); break;
    }
}

static const Tiles general_tiles = {4, 0, avx2_multiply};

#else

static void portable_multiply(int64_t rows, const int8_t *x, int64_t stride, const int8_t *w,
                              int64_t quads, int32_t *out, Stream *ahead) {
    for (int64_t q = 0; q < quads; q++, w += PANEL * QUAD) {
        prefetch(ahead);
        for (int64_t r = 0; r < rows; r++) {
            const int8_t *value = x + r * stride + q * QUAD;
            for (int j = 0; j < PANEL; j++)
                out[r * PANEL + j] += w[j * QUAD] * value[0] + w[j * QUAD + 1] * value[1] +
                                      w[j * QUAD + 2] * value[2] + w[j * QUAD + 3] * value[3];
        }
    }
}

static const Tiles general_tiles = {4, 0, portable_multiply};

#endif

#if defined(__AVX512F__)

/* The instruction multiplies unsigned by signed: weights go in as w + 128. Not every CPU with
 * AVX-512 has it, so these functions alone are compiled for it. */
#define VNNI __attribute__((target("avx512vnni")))

VNNI INLINE void vnni_tile(const int rows, const int8_t *x, int64_t stride, const int8_t *w,
                           int64_t quads, int32_t *out, Stream *ahead) {
    const __m512i offset = _mm512_set1_epi8((char)128);
    __m512i sum[8][3];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < 3; v++) sum[r][v] = _mm512_loadu_si512(out + r * PANEL + v * 16);
    for (int64_t q = 0; q < quads; q++, w += PANEL * QUAD) {
        __m512i weight[3];
        prefetch(ahead);
#pragma GCC unroll 3
        for (int v = 0; v < 3; v++)
            weight[v] = _mm512_xor_si512(_mm512_loadu_si512(w + v * 64), offset);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512i value = _mm512_set1_epi32(quad_at(x + r * stride + q * QUAD));
#pragma GCC unroll 3
            for (int v = 0; v < 3; v++)
                sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], weight[v], value);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < 3; v++) _mm512_storeu_si512(out + r * PANEL + v * 16, sum[r][v]);
}

VNNI static void vnni_multiply(int64_t rows, const int8_t *x, int64_t stride, const int8_t *w,
                               int64_t quads, int32_t *out, Stream *ahead) {
    switch (rows) {
        case 1: vnni_tile(1, x, stride, w, quads, out, ahead); break;
        case 2: vnni_tile(2, x, stride, w, quads, out, ahead); break;
        case 3: vnni_tile(3, x, stride, w, quads, out, ahead); break;
        case 4: vnni_tile(4, x, stride, w, quads, out, ahead); break;
        case 5: vnni_tile(5, x, stride, w, quads, out, ahead); break;
        case 6: vnni_tile(6, x, stride, w, quads, out, ahead); break;
        case 7: vnni_tile(7, x, stride, w, quads, out, ahead); break;
        case 8: vnni_tile(8, x, stride, w, quads, out, ahead); break;
    }
}

static const Tiles vnni_tiles = {8, 128, vnni_multiply};

#endif

static const Tiles *best_tiles(void) {
#if defined(__AVX512F__)
    if (__builtin_cpu_supports("avx512vnni")) return &vnni_tiles;
#endif
    return &general_tiles;
}

#endif
