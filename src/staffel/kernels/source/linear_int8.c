/* y = x · Wᵀ + bias with int8 weights: one scale per output, and one per row of x, taken on the fly.
 *
 * Panels are [ceil(k / 4)][48][4]: four neighbours along k are one lane's share of the dot product
 * instructions. Sums are int32 and exact: 127 · 127 · k fits for any k that is let in.
 */
#include <math.h>
#include <string.h>

#include "common.h"
#include "panels.h"
#include "tiles_int8.h"

#define CHUNK 64      /* quads of k: 12 KB of a panel, and as much of the next chunk, stay in L1 */
#define BLOCK_ROWS 64 /* rows that are multiplied with a panel before the next one is read */
#define SMALLEST 1e-30f /* rows with nothing larger are zero: 127 / largest must be finite */

typedef int32_t word __attribute__((may_alias)); /* of floats */

typedef struct {
    const Tiles *tiles;
    int8_t *x; /* [rows][quads · 4] */
    int64_t rows, quads;
    float row_scale[BLOCK_ROWS];
    int32_t row_sum[BLOCK_ROWS];
    const int8_t *packed;
    const float *scales, *bias;
    float *y;
    int64_t n;
} Product;

/* The largest magnitude in a row; NaN if the row has a NaN or an infinity in it. Without their
 * sign, floats are in the order of their bits, those two at the end. */
static float largest(const float *x, int64_t k) {
    const word *bits = (const word *)x;
    int32_t most = 0;
    for (int64_t i = 0; i < k; i++) {
        int32_t size = bits[i] & 0x7fffffff;
        most = size > most ? size : most;
    }
    float result;
    memcpy(&result, &most, sizeof result);
    return isfinite(result) ? result : NAN;
}

/* Rounds row r of the block to int8; the rest of its last quad is zero. */
static void quantize(Product *p, int64_t r, const float *x, int64_t k) {
    float most = largest(x, k), factor = most >= SMALLEST ? 127 / most : 0;
    int8_t *q = p->x + r * p->quads * QUAD;
    int32_t sum = 0;
    if (factor > 0)
        for (int64_t i = 0; i < k; i++) q[i] = (int8_t)(int32_t)__builtin_rintf(x[i] * factor);
    else
        memset(q, 0, k);
    memset(q + k, 0, p->quads * QUAD - k);
    for (int64_t i = 0; i < k; i++) sum += q[i];
    p->row_scale[r] = most < SMALLEST ? 0 : most / 127;
    p->row_sum[r] = sum;
}

/* out += x · w over one chunk: all rows, in tiles of nearly equal height. */
static void chunk(const Product *p, const int8_t *x, const int8_t *w, int64_t quads,
                  int32_t *out) {
    int64_t tiles = (p->rows + p->tiles->rows - 1) / p->tiles->rows, stride = p->quads * QUAD;
    int64_t bytes = quads * PANEL * QUAD;
    Stream ahead = stream(w + bytes, p->rows > 1 ? bytes : 0, tiles * quads);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = p->rows * t / tiles, rows = p->rows * (t + 1) / tiles - row;
        p->tiles->multiply(rows, x + row * stride, stride, w, quads, out + row * PANEL, &ahead);
    }
}

/* One panel of y. `out` [rows][PANEL] is scratch. */
static void panel(const Product *p, int64_t index, int32_t *out) {
    const int8_t *w = p->packed + index * p->quads * PANEL * QUAD;
    for (int64_t r = 0; r < p->rows; r++)
        for (int j = 0; j < PANEL; j++) out[r * PANEL + j] = -p->tiles->offset * p->row_sum[r];
    for (int64_t q = 0; q < p->quads; q += CHUNK)
        chunk(p, p->x + q * QUAD, w + q * PANEL * QUAD, smaller(CHUNK, p->quads - q), out);
    int64_t at = index * PANEL, width = smaller(PANEL, p->n - at);
    for (int64_t r = 0; r < p->rows; r++) {
        float *y = p->y + r * p->n + at, scale = p->row_scale[r];
        for (int64_t j = 0; j < width; j++)
            y[j] = (float)out[r * PANEL + j] * (scale * p->scales[at + j]) +
                   (p->bias ? p->bias[at + j] : 0);
    }
}

static void panels(const void *product, int64_t from, int64_t to) {
    int32_t out[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t i = from; i < to; i++) panel(product, i, out);
}

/* y [rows][n] = x [rows][k] · Wᵀ + bias, W[j] = scales[j] · packed[j]. `scratch` has room for
 * min(rows, 64) rows of k, rounded up to a multiple of 4, bytes. */
EXPORT void staffel_linear_int8(const float *x, int64_t stride, int64_t rows,
                                const int8_t *packed, const float *scales, int64_t n, int64_t k,
                                const float *bias, int8_t *scratch, float *y, int threads) {
    Product p = {.tiles = best_tiles(), .x = scratch, .quads = (k + QUAD - 1) / QUAD};
    p.packed = packed;
    p.scales = scales;
    p.bias = bias;
    p.n = n;
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        p.y = y + row * n;
        p.rows = smaller(BLOCK_ROWS, rows - row);
        for (int64_t r = 0; r < p.rows; r++) quantize(&p, r, x + (row + r) * stride, k);
        divide(panels, &p, panel_count(n), threads);
    }
}

/* y [count][k]: rows `ids` of the weight [n][k], as floats. Gives how many ids are none of a row;
 * what is in y for them is undefined. */
EXPORT int64_t staffel_linear_int8_gather(const int8_t *packed, const float *scales, int64_t n,
                                          int64_t k, const int64_t *ids, int64_t count,
                                          float *y) {
    int64_t quads = (k + QUAD - 1) / QUAD, wrong = 0;
    for (int64_t t = 0; t < count; t++) {
        if (ids[t] < 0 || ids[t] >= n) {
            wrong++;
            continue;
        }
        const int8_t *w = packed + (ids[t] / PANEL * quads * PANEL + ids[t] % PANEL) * QUAD;
        for (int64_t i = 0; i < k; i++)
            y[t * k + i] = scales[ids[t]] * w[i / QUAD * PANEL * QUAD + i % QUAD];
    }
    return wrong;
}
