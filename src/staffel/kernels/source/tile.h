/* Arithmetic on small matrices that lie in the nearest caches; what attention.c is made of.
 *
 * The functions that take the number of rows or vectors as an argument are inlined where it is a
 * constant, so that their sums stay in registers.
 */
#ifndef STAFFEL_TILE_H
#define STAFFEL_TILE_H

#include "common.h"
#include "functions.h"

/* Rows and vectors of sums that a kernel keeps in registers (AVX-512 has 32, the others 16). */
#define MOST_ROWS 6
#if LANES == 16
#define MOST_SUMS 24
#else
#define MOST_SUMS 12
#endif

/* ---- shuffles: the places 0 to LANES - 1 are of a, the next ones of b */

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

#if LANES == 16
#define ZIP_LOW(a, b) PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define EVEN(a, b) PICK(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30)
#define ODD(a, b) PICK(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31)
#define EVEN_FOURS(a, b) PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_FOURS(a, b) PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#elif LANES == 8
#define ZIP_LOW(a, b) PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define EVEN(a, b) PICK(a, b, 0, 2, 8, 10, 4, 6, 12, 14)
#define ODD(a, b) PICK(a, b, 1, 3, 9, 11, 5, 7, 13, 15)
#define EVEN_FOURS(a, b) PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define ODD_FOURS(a, b) PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define ZIP_LOW(a, b) PICK(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) PICK(a, b, 2, 6, 3, 7)
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7)
#define EVEN_FOURS(a, b) (a) /* never taken: four lanes are folded before */
#define ODD_FOURS(a, b) (b)
#endif

/* ---- across lanes */

INLINE vec fold_pair(vec a, vec b, int largest) {
    if (largest) return greater(a, b);
    return a + b;
}

/* Lane i of the result: the sum (or the largest) of the lanes of x[i]. Destroys x. */
INLINE vec fold(vec *x, int largest) {
    int count = LANES;
#pragma GCC unroll 8
    for (; count > LANES / 4; count /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < count; i += 2)
            x[i / 2] = fold_pair(EVEN(x[i], x[i + 1]), ODD(x[i], x[i + 1]), largest);
#pragma GCC unroll 8
    for (; count > 1; count /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < count; i += 2)
            x[i / 2] = fold_pair(EVEN_FOURS(x[i], x[i + 1]), ODD_FOURS(x[i], x[i + 1]), largest);
    return x[0];
}

/* to[c * stride + r] = from[r][c] for LANES rows and LANES columns. Each round of perfect shuffles
 * turns the bits of (row, column) by one place; as many as a row number has swap the two. */
INLINE void transpose(const float *const *from, int64_t column, float *to, int64_t stride) {
    vec x[LANES], y[LANES];
    for (int i = 0; i < LANES; i++) x[i] = load(from[i] + column);
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = ZIP_LOW(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = ZIP_HIGH(x[i], x[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
    for (int i = 0; i < LANES; i++) store(to + i * stride, x[i]);
}

/* ---- products
 *
 * `ahead`: the rows that come after these of b (of k), or NULL; they are prefetched.
 */

#define LINE 16 /* floats of a cache line */

/* c[i, j] += sum over d of a[i, d] * b[d][j], for `rows` rows and `vecs` vectors of columns. */
INLINE void multiply_block(const int rows, const int vecs, int64_t depth, const float *a,
                           int64_t a_stride, const float *const *b, const float *const *ahead,
                           int64_t column, float *c, int64_t c_stride) {
    vec sum[MOST_ROWS][4];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) sum[i][j] = (vec){0};
    for (int64_t d = 0; d < depth; d++) {
        vec x[4];
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) x[j] = load(b[d] + column + j * LANES);
        if (ahead)
#pragma GCC unroll 4
            for (int j = 0; j < vecs * LANES; j += LINE)
                __builtin_prefetch(ahead[d] + column + j);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vecs; j++) sum[i][j] += a[i * a_stride + d] * x[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) {
            float *to = c + i * c_stride + column + j * LANES;
            store(to, load(to) + sum[i][j]);
        }
}

INLINE void multiply_rows(const int rows, int64_t depth, const float *a, int64_t a_stride,
                          const float *const *b, const float *const *ahead, int64_t columns,
                          float *c, int64_t c_stride) {
    int64_t j = 0;
    if (rows * 4 <= MOST_SUMS)
        for (; j + 4 * LANES <= columns; j += 4 * LANES)
            multiply_block(rows, 4, depth, a, a_stride, b, ahead, j, c, c_stride);
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        multiply_block(rows, 2, depth, a, a_stride, b, ahead, j, c, c_stride);
    for (; j < columns; j += LANES)
        multiply_block(rows, 1, depth, a, a_stride, b, ahead, j, c, c_stride);
}

INLINE void multiply_all(int64_t rows, int64_t depth, const float *a, int64_t a_stride,
                         const float *const *b, const float *const *ahead, int64_t columns,
                         float *c, int64_t c_stride) {
    for (; rows >= MOST_ROWS; rows -= MOST_ROWS) {
        multiply_rows(MOST_ROWS, depth, a, a_stride, b, ahead, columns, c, c_stride);
        a += MOST_ROWS * a_stride;
        c += MOST_ROWS * c_stride;
    }
    switch (rows) {
    case 5: multiply_rows(5, depth, a, a_stride, b, ahead, columns, c, c_stride); break;
    case 4: multiply_rows(4, depth, a, a_stride, b, ahead, columns, c, c_stride); break;
    case 3: multiply_rows(3, depth, a, a_stride, b, ahead, columns, c, c_stride); break;
    case 2: multiply_rows(2, depth, a, a_stride, b, ahead, columns, c, c_stride); break;
    case 1: multiply_rows(1, depth, a, a_stride, b, ahead, columns, c, c_stride); break;
    }
}

/* c += a b: a is [rows, depth], b[d] points to a row of `columns`, a multiple of LANES. */
static void multiply(int64_t rows, int64_t depth, const float *a, int64_t a_stride,
                     const float *const *b, int64_t columns, float *c, int64_t c_stride) {
    multiply_all(rows, depth, a, a_stride, b, NULL, columns, c, c_stride);
}

static void multiply_ahead(int64_t rows, int64_t depth, const float *a, int64_t a_stride,
                           const float *const *b, const float *const *ahead, int64_t columns,
                           float *c, int64_t c_stride) {
    multiply_all(rows, depth, a, a_stride, b, ahead, columns, c, c_stride);
}

/* part[i][j] = lanes of q[i] . k[j], to be summed, for a few rows and keys at a time. */
INLINE void dot_block(const int rows, const int keys, int64_t width, const float *q,
                      const float *const *k, vec (*part)[LANES]) {
    vec sum[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < keys; j++) sum[i][j] = (vec){0};
    for (int64_t d = 0; d < width; d += LANES) {
        vec x[4];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) x[i] = load(q + i * width + d);
#pragma GCC unroll 4
        for (int j = 0; j < keys; j++) {
            vec key = load(k[j] + d);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) sum[i][j] += x[i] * key;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < keys; j++) part[i][j] = sum[i][j];
}

/* scores[i, j] = q[i] . k[j] for `rows` rows (at most 4) and LANES keys. */
INLINE void dot_rows(const int rows, int64_t width, const float *q, const float *const *k,
                     const float *const *ahead, float *scores, int64_t stride) {
    const int keys = rows * 4 <= MOST_SUMS ? 4 : 2;
    vec part[4][LANES];
    for (int j = 0; j < LANES; j += keys) {
        for (int i = j; i < j + keys; i++)
            for (int64_t d = 0; d < width; d += LINE) __builtin_prefetch(ahead[i] + d);
        vec(*at)[LANES] = (vec(*)[LANES])(part[0] + j);
        dot_block(rows, keys, width, q, k + j, at);
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) store(scores + i * stride, fold(part[i], 0));
}

/* scores = q k': q is [rows, width], each of the LANES keys k[j] a row of `width`, a multiple of
 * LANES. */
static void dot(int64_t rows, int64_t width, const float *q, const float *const *k,
                const float *const *ahead, float *scores, int64_t stride) {
    for (; rows >= 4; rows -= 4, q += 4 * width, scores += 4 * stride)
        dot_rows(4, width, q, k, ahead, scores, stride);
    switch (rows) {
    case 3: dot_rows(3, width, q, k, ahead, scores, stride); break;
    case 2: dot_rows(2, width, q, k, ahead, scores, stride); break;
    case 1: dot_rows(1, width, q, k, ahead, scores, stride); break;
    }
}

#endif
