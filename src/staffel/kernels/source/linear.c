/* y = x · Wᵀ + bias over weights that were packed once into panels, for one row as for thousands.
 *
 * A panel is 48 outputs, [k][48]: whatever the instruction set, 48 is a multiple of three vectors,
 * and rows × 3 sums keep enough multiply-adds in flight for both units without spilling. Panels
 * follow each other in memory, so the weights are one stream, read once per block of rows. While
 * a chunk of it is multiplied, the next one is prefetched, a few lines at a time: around eight
 * rows, arithmetic and memory are both at their limit, and neither may wait for the other.
 */
#include <string.h>

#include "common.h"
#include "panels.h"

/* Rows of a tile: as many as leave registers for the weights and for one value of x. */
#if LANES == 16
#define TILE_ROWS 8
#else
#define TILE_ROWS 4
#endif
/* Vectors of a tile of one row. Where registers allow it, it is as wide as the panel: memory is the
 * limit then, and likes to be read from front to back. */
#define ONE_ROW (LANES == 8 ? 6 : 3)

/* Steps of k from one prefetch to the next: small bursts, and no more asking than it takes. */
#define TURN (LANES == 16 ? 1 : 2)

#define CHUNK 64         /* of k: 12 KB of a panel, and as much of the next chunk, stay in L1 */
#define BLOCK_ROWS 64    /* rows that are multiplied with a panel before the next one is read */
#define BLOCK_DEPTH 2048 /* of k; a block of x is copied into 512 KB of L2 */
#define BLOCK_STRIDE (BLOCK_DEPTH + LANES) /* no power of two: rows don't meet in a cache set */

typedef struct {
    const float *x;
    int64_t stride; /* floats from one row of x to the next */
    int64_t rows;
    const float *packed;
    int64_t first, depth, k; /* the part of k that x holds: first … first + depth */
    const float *bias;
    float *y;
    int64_t n;
} Product;

/* out [rows][PANEL] += x [rows][depth] · w [depth][PANEL], `vectors` of the panel at a time. */
INLINE void tile(const int rows, const int vectors, const float *x, int64_t stride, const float *w,
                 int64_t depth, float *out, Stream *ahead) {
    for (int at = 0; at < PANEL; at += vectors * LANES) {
        vec sum[TILE_ROWS][6], weight[6];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
            for (int v = 0; v < vectors; v++) sum[r][v] = load(out + r * PANEL + at + v * LANES);
#pragma GCC unroll 4
        for (int64_t i = 0; i < depth; i++) {
            if (i % TURN == 0) prefetch(ahead);
#pragma GCC unroll 6
            for (int v = 0; v < vectors; v++) weight[v] = load(w + i * PANEL + at + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
                for (int v = 0; v < vectors; v++) sum[r][v] += splat(x[r * stride + i]) * weight[v];
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
            for (int v = 0; v < vectors; v++) store(out + r * PANEL + at + v * LANES, sum[r][v]);
    }
}

/* A tile of any height; each is compiled on its own, its sums in registers. */
static void any_tile(int64_t rows, const float *x, int64_t stride, const float *w, int64_t depth,
                     float *out, Stream *ahead) {
    switch (rows) {
        case 1: tile(1, ONE_ROW, x, stride, w, depth, out, ahead); break;
        case 2: tile(2, 3, x, stride, w, depth, out, ahead); break;
        case 3: tile(3, 3, x, stride, w, depth, out, ahead); break;
        case 4: tile(4, 3, x, stride, w, depth, out, ahead); break;
#if TILE_ROWS == 8
        case 5: tile(5, 3, x, stride, w, depth, out, ahead); break;
        case 6: tile(6, 3, x, stride, w, depth, out, ahead); break;
        case 7: tile(7, 3, x, stride, w, depth, out, ahead); break;
        case 8: tile(8, 3, x, stride, w, depth, out, ahead); break;
#endif
    }
}

/* What to prefetch while a chunk is multiplied: the next one. One row needs no help: its pace is
 * the memory's, and the hardware follows a single stream best by itself. */
static Stream following(const Product *p, const float *w, int64_t depth, int64_t tiles) {
    int64_t bytes = p->rows > 1 ? depth * PANEL * sizeof *w : 0;
    int64_t turns = (depth + TURN - 1) / TURN * tiles * (PANEL / (3 * LANES));
    return stream(w + depth * PANEL, bytes, turns);
}

/* out += x · w over one chunk: all rows, in tiles of nearly equal height. */
static void chunk(const Product *p, const float *x, const float *w, int64_t depth, float *out) {
    int64_t tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS;
    Stream ahead = following(p, w, depth, tiles);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = p->rows * t / tiles, rows = p->rows * (t + 1) / tiles - row;
        any_tile(rows, x + row * p->stride, p->stride, w, depth, out + row * PANEL, &ahead);
    }
}

/* One panel of y. `out` [rows][PANEL] is scratch: so no tile has to know where y ends. */
static void panel(const Product *p, int64_t index, float *out) {
    const float *w = p->packed + (index * p->k + p->first) * PANEL;
    memset(out, 0, p->rows * PANEL * sizeof *out);
    for (int64_t i = 0; i < p->depth; i += CHUNK)
        chunk(p, p->x + i, w + i * PANEL, smaller(CHUNK, p->depth - i), out);
    int64_t at = index * PANEL, width = smaller(PANEL, p->n - at);
    for (int64_t r = 0; r < p->rows; r++) {
        float *y = p->y + r * p->n + at;
        const float *onto = p->first ? y : p->bias ? p->bias + at : NULL;
        for (int64_t j = 0; j < width; j++) y[j] = out[r * PANEL + j] + (onto ? onto[j] : 0);
    }
}

static void panels(const void *product, int64_t from, int64_t to) {
    float out[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t i = from; i < to; i++) panel(product, i, out);
}

/* A block of rows, copied to where its rows are close together. */
static void block(Product p, int threads) {
    static _Thread_local float copy[BLOCK_ROWS * BLOCK_STRIDE] __attribute__((aligned(64)));
    const float *x = p.x;
    int64_t stride = p.stride;
    p.x = copy;
    p.stride = BLOCK_STRIDE;
    for (; p.first < p.k; p.first += BLOCK_DEPTH) {
        p.depth = smaller(BLOCK_DEPTH, p.k - p.first);
        for (int64_t r = 0; r < p.rows; r++)
            memcpy(copy + r * BLOCK_STRIDE, x + r * stride + p.first, p.depth * sizeof *copy);
        divide(panels, &p, panel_count(p.n), threads);
    }
}

/* y [rows][n] = x [rows][k] · Wᵀ + bias; `packed` as panels [ceil(n / 48)][k][48]. */
EXPORT void staffel_linear(const float *x, int64_t stride, int64_t rows, const float *packed,
                           int64_t n, int64_t k, const float *bias, float *y, int threads) {
    Product p = {x, stride, rows, packed, 0, k, k, bias, y, n};
    if (rows == 0) return;
    if (rows <= BLOCK_ROWS / 2) {
        divide(panels, &p, panel_count(n), threads);
        return;
    }
    int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t row = rows * b / blocks;
        p.x = x + row * stride;
        p.y = y + row * n;
        p.rows = rows * (b + 1) / blocks - row;
        block(p, threads);
    }
}

/* y [count][k]: rows `ids` of the weight [n][k] that was packed. Gives how many ids are none of a
 * row; what is in y for them is undefined. */
EXPORT int64_t staffel_linear_gather(const float *packed, int64_t n, int64_t k,
                                     const int64_t *ids, int64_t count, float *y) {
    int64_t wrong = 0;
    for (int64_t t = 0; t < count; t++) {
        if (ids[t] < 0 || ids[t] >= n) {
            wrong++;
            continue;
        }
        const float *w = packed + ids[t] / PANEL * k * PANEL + ids[t] % PANEL;
        for (int64_t i = 0; i < k; i++) y[t * k + i] = w[i * PANEL];
    }
    return wrong;
}
