/* A call of paged attention: its arguments, and where in the cache a sequence's tokens are. */
#ifndef STAFFEL_PAGED_H
#define STAFFEL_PAGED_H

#include <stddef.h>
#include <string.h>

#include "common.h"

#define RUN 64    /* keys */
#define PAGE 1024 /* floats of a memory page */

/* Strides are in floats. What a step's layers have in common comes first: kernels/attention.py has
 * those fields in the same order. */
typedef struct {
    /* The cache: [blocks, layers, block_size, kv_heads, width]. */
    float *k_cache, *v_cache;
    int64_t blocks, layers, block_size, kv_heads, k_width, v_width;
    /* The step: tables [sequences, table_stride], the others [sequences]. */
    int64_t sequences;
    const int64_t *tables;
    int64_t table_stride;
    const int64_t *starts, *counts, *offsets;
    /* [tile_count, 3]: sequence, first token of the step, tokens. tile_rows: the most of one. */
    const int64_t *tiles;
    int64_t tile_count, tile_rows;
    /* threads * staffel_attention_scratch floats. */
    float *scratch;
    int64_t threads;
    /* The layer: q [T, heads, k_width], k and v [T, kv_heads, width]; out [T, heads, v_width]. */
    int64_t layer, heads;
    const float *q;
    int64_t q_token, q_head;
    const float *k;
    int64_t k_token, k_head;
    const float *v;
    int64_t v_token, v_head;
    float *out;
    const float *sinks;
    int64_t window;
    double scaling, softcap;
} Call;
_Static_assert(offsetof(Call, layer) == 19 * 8, "kernels/attention.py has the fields before it");

typedef struct {
    int64_t sequence, first, tokens;
} Tile;

/* Consecutive keys of a sequence, and where the rows of one kv head are. The rows beyond `count`
 * are the last one again; `padded` counts whole vectors. */
typedef struct {
    int64_t first, count, padded;
    const float *k[RUN], *v[RUN];
} Run;

static int64_t pad(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- where tokens are */

/* The cache's row of a token for kv head 0; those of the other heads follow. */
static int64_t place(const Call *call, int64_t sequence, int64_t position) {
    int64_t block = position / call->block_size, within = position - block * call->block_size;
    int64_t id = call->tables[sequence * call->table_stride + block];
    return ((id * call->layers + call->layer) * call->block_size + within) * call->kv_heads;
}

static void find_run(const Call *call, int64_t sequence, int64_t kv_head, int64_t first,
                     int64_t count, Run *run) {
    run->first = first, run->count = count, run->padded = pad(count);
    int64_t left = 0; /* of the block */
    const float *k = NULL, *v = NULL;
    for (int64_t i = 0; i < RUN; i++) {
        if (left == 0 && i < count) {
            int64_t at = place(call, sequence, first + i) + kv_head;
            left = call->block_size - (first + i) % call->block_size;
            k = call->k_cache + at * call->k_width, v = call->v_cache + at * call->v_width;
        } else if (i < count) {
            k += call->kv_heads * call->k_width, v += call->kv_heads * call->v_width;
        }
        run->k[i] = k, run->v[i] = v;
        left--;
    }
}

static void touch_pages(const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += PAGE) __builtin_prefetch(from + i);
    __builtin_prefetch(from + count - 1);
}

/* Starts a read of each memory page with the sequence's keys from `first` to `end`, well before
 * they are needed. Blocks lie anywhere, and a page's first read waits for its address to be
 * translated; reads in flight together share that wait. */
static void touch(const Call *call, int64_t sequence, int64_t first, int64_t end) {
    while (first < end) {
        int64_t left = call->block_size - first % call->block_size;
        int64_t at = place(call, sequence, first);
        int64_t rows = least(left, end - first) * call->kv_heads;
        touch_pages(call->k_cache + at * call->k_width, rows * call->k_width);
        touch_pages(call->v_cache + at * call->v_width, rows * call->v_width);
        first += left;
    }
}

/* ---- writing the step's keys and values */

static void write_token(float *to, const float *from, int64_t heads, int64_t width,
                        int64_t stride) {
    if (stride == width) width *= heads, heads = 1;
    for (int64_t h = 0; h < heads; h++)
        memcpy(to + h * width, from + h * stride, (size_t)width * sizeof(float));
}

static void write_sequence(const Call *call, int64_t sequence) {
    int64_t heads = call->kv_heads;
    for (int64_t i = 0; i < call->counts[sequence]; i++) {
        int64_t to = place(call, sequence, call->starts[sequence] + i);
        int64_t token = call->offsets[sequence] + i;
        write_token(call->k_cache + to * call->k_width, call->k + token * call->k_token, heads,
                    call->k_width, call->k_head);
        write_token(call->v_cache + to * call->v_width, call->v + token * call->v_token, heads,
                    call->v_width, call->v_head);
    }
}

#endif
