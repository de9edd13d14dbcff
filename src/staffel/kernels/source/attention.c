/* Attention over a paged KV cache: one call computes a layer of a step.
 *
 * A *tile* is a few consecutive tokens of a sequence; for one kv head it has a *row* for each
 * token and each query head that shares that kv head. A tile goes through its visible keys in
 * *runs*, and keeps per row the largest score, the sum of exponentials and the weighted sum of
 * values so far (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; tiles of it: Dao
 * et al. 2022, arXiv:2205.14135). Scores are in units of ln 2, since 2^x is cheaper than e^x.
 *
 * Narrow tiles (decode) are bound by reading the cache: a run serves all kv heads before the next
 * one is read, and scores are dot products with the keys as they lie. Wide tiles (prefill) are
 * bound by arithmetic: keys are transposed, so that scores are a matrix product without sums
 * across lanes.
 */
#include <omp.h>
#include <string.h>

#include "paged.h"
#include "tile.h"

#define WIDE 12 /* rows from which on transposing keys pays */

/* A tile's rows of one kv head. */
typedef struct {
    float *q;       /* [rows, k_pad], scaled */
    float *out;     /* [rows, v_pad]: weighted sum of values */
    float *largest; /* [rows]: score */
    float *sum;     /* [rows]: of 2^(score - largest) */
} Head;

/* What a thread works with. */
typedef struct {
    const Call *call;
    const Tile *tile;
    int64_t rows, k_pad, v_pad;
    float *scores; /* [rows, RUN] */
    float *panel;  /* [k_pad, RUN]: keys, transposed */
    const float **panel_rows;
    float *k_copy; /* [RUN, k_pad] */
    float *v_copy; /* [RUN, v_pad] */
    float *heads;
} Work;

/* ---- a tile's rows: begin and end */

static int64_t head_floats(int64_t rows, int64_t k_pad, int64_t v_pad) {
    return pad(rows) * (k_pad + v_pad + 2);
}

static Head head_at(const Work *work, int64_t index) {
    int64_t rows = pad(work->rows);
    float *at = work->heads + index * head_floats(rows, work->k_pad, work->v_pad);
    float *out = at + rows * work->k_pad, *largest = out + rows * work->v_pad;
    return (Head){at, out, largest, largest + rows};
}

static void take_query(const Work *work, const float *from, float *to) {
    const Call *call = work->call;
    /* In units of ln 2; a soft cap works on plain scores, and brings them there itself. */
    float scale = (float)(call->softcap ? call->scaling : call->scaling * LOG2E);
    for (int64_t d = 0; d < call->k_width; d++) to[d] = from[d] * scale;
    for (int64_t d = call->k_width; d < work->k_pad; d++) to[d] = 0;
}

static void begin_head(const Work *work, int64_t kv_head, Head head) {
    const Call *call = work->call;
    int64_t group = call->heads / call->kv_heads, first = kv_head * group;
    int64_t token = call->offsets[work->tile->sequence] + work->tile->first;
    for (int64_t row = 0; row < work->rows; row++) {
        int64_t query = first + row % group;
        take_query(work, call->q + (token + row / group) * call->q_token + query * call->q_head,
                   head.q + row * work->k_pad);
        /* A sink is a score that has been seen, of a value of zeros. */
        head.largest[row] = call->sinks ? (float)(call->sinks[query] * LOG2E) : -1e30f;
        head.sum[row] = call->sinks ? 1 : 0;
    }
    memset(head.out, 0, (size_t)(work->rows * work->v_pad) * sizeof(float));
}

static void end_head(const Work *work, int64_t kv_head, Head head) {
    const Call *call = work->call;
    int64_t group = call->heads / call->kv_heads, width = call->v_width;
    int64_t token = call->offsets[work->tile->sequence] + work->tile->first;
    for (int64_t row = 0; row < work->rows; row++) {
        int64_t query = kv_head * group + row % group;
        float *to = call->out + ((token + row / group) * call->heads + query) * width;
        float share = 1 / head.sum[row];
        for (int64_t d = 0; d < width; d++) to[d] = head.out[row * work->v_pad + d] * share;
    }
}

/* ---- a tile's rows meet a run of keys */

/* Copies rows, filled up with zeros to whole vectors, and lets the pointers point to the copies. */
static void copy_rows(const float **rows, int64_t count, int64_t width, float *to) {
    for (int64_t i = 0; i < count; i++) {
        for (int64_t d = 0; d < width; d++) to[d] = rows[i][d];
        for (int64_t d = width; d < pad(width); d++) to[d] = 0;
        rows[i] = to;
        to += pad(width);
    }
}

static void scores_by_dots(const Work *work, const Head *head, const Run *run, const Run *next) {
    for (int64_t i = 0; i < run->padded; i += LANES)
        dot(work->rows, work->k_pad, head->q, run->k + i, next->k + i, work->scores + i, RUN);
}

static void scores_by_panel(const Work *work, const Head *head, const Run *run) {
    for (int64_t d = 0; d < work->k_pad; d += LANES)
        for (int64_t i = 0; i < run->padded; i += LANES)
            transpose(run->k + i, d, work->panel + d * RUN + i, RUN);
    memset(work->scores, 0, (size_t)(work->rows * RUN) * sizeof(float));
    multiply(work->rows, work->k_pad, head->q, work->k_pad, work->panel_rows, run->padded,
             work->scores, RUN);
}

static void cap_scores(const Work *work, const Run *run) {
    float inner = (float)(1 / work->call->softcap), outer = (float)(work->call->softcap * LOG2E);
    for (int64_t row = 0; row < work->rows; row++)
        for (int64_t i = 0; i < run->padded; i += LANES) {
            float *at = work->scores + row * RUN + i;
            store(at, tanh_of(load(at) * inner) * outer);
        }
}

/* Scores of keys that a row must not see become -infinity. */
static void hide(const Work *work, const Run *run) {
    const Call *call = work->call;
    int64_t group = call->heads / call->kv_heads;
    for (int64_t row = 0; row < work->rows; row++) {
        int64_t query = call->starts[work->tile->sequence] + work->tile->first + row / group;
        int64_t first = query + 1 - call->window - run->first;
        int64_t end = most(0, least(query + 1 - run->first, run->count));
        float *scores = work->scores + row * RUN;
        for (int64_t i = 0; i < least(first, run->padded); i++) scores[i] = -__builtin_inff();
        for (int64_t i = end; i < run->padded; i++) scores[i] = -__builtin_inff();
    }
}

/* The largest score of each of LANES rows, of which `count` exist. */
static vec largest_of(const float *scores, int64_t count, int64_t keys) {
    vec part[LANES];
    for (int64_t r = 0; r < LANES; r++) part[r] = splat(-1e30f);
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < keys; i += LANES)
            part[r] = greater(part[r], load(scores + r * RUN + i));
    return fold(part, 1);
}

/* Scores become weights, 2^(score - largest); gives each row's sum of them. */
static vec weigh(float *scores, int64_t count, int64_t keys, const float *largest) {
    vec part[LANES];
    for (int64_t r = 0; r < LANES; r++) part[r] = splat(0);
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < keys; i += LANES) {
            vec weights = exp2_of(load(scores + r * RUN + i) - largest[r]);
            store(scores + r * RUN + i, weights);
            part[r] += weights;
        }
    return fold(part, 0);
}

static void shrink(float *rows, int64_t count, int64_t width, const float *factors) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; factors[r] != 1 && d < width; d += LANES)
            store(rows + r * width + d, load(rows + r * width + d) * factors[r]);
}

static void soften(const Work *work, const Head *head, const Run *run) {
    float factors[LANES];
    for (int64_t row = 0; row < work->rows; row += LANES) {
        int64_t count = least(LANES, work->rows - row);
        float *scores = work->scores + row * RUN, *largest = head->largest + row;
        vec before = load(largest);
        vec now = greater(before, largest_of(scores, count, run->padded));
        vec factor = exp2_of(before - now);
        store(largest, now);
        store(factors, factor);
        vec sum = weigh(scores, count, run->padded, largest);
        store(head->sum + row, load(head->sum + row) * factor + sum);
        shrink(head->out + row * work->v_pad, count, work->v_pad, factors);
    }
}

static void normalise(const Work *work, const Head *head, const Run *run) {
    if (work->call->softcap) cap_scores(work, run);
    hide(work, run);
    soften(work, head, run);
}

/* `next` is what comes after this run: it is prefetched. */
static void absorb_narrow(const Work *work, const Head *head, Run *run, const Run *next) {
    const Call *call = work->call;
    if (work->k_pad != call->k_width) copy_rows(run->k, run->padded, call->k_width, work->k_copy);
    if (work->v_pad != call->v_width) copy_rows(run->v, run->padded, call->v_width, work->v_copy);
    scores_by_dots(work, head, run, next);
    normalise(work, head, run);
    multiply_ahead(work->rows, run->count, work->scores, RUN, run->v, next->v, work->v_pad,
                   head->out, work->v_pad);
}

/* Values are read once for every few rows: they are copied, so that they lie close together. */
static void absorb_wide(const Work *work, const Head *head, Run *run) {
    const Call *call = work->call;
    if (work->k_pad != call->k_width) copy_rows(run->k, run->padded, call->k_width, work->k_copy);
    copy_rows(run->v, run->padded, call->v_width, work->v_copy);
    scores_by_panel(work, head, run);
    normalise(work, head, run);
    multiply(work->rows, run->count, work->scores, RUN, run->v, work->v_pad, head->out,
             work->v_pad);
}

/* ---- a tile */

static int64_t work_floats(int64_t rows, int64_t k_pad, int64_t v_pad) {
    return pad(rows) * RUN + k_pad * RUN + pad(k_pad * 2) + RUN * (k_pad + v_pad);
}

static Work begin_work(const Call *call, const Tile *tile, float *scratch) {
    Work work = {.call = call, .tile = tile};
    work.rows = tile->tokens * (call->heads / call->kv_heads);
    work.k_pad = pad(call->k_width), work.v_pad = pad(call->v_width);
    work.scores = scratch;
    work.panel = work.scores + pad(work.rows) * RUN;
    work.k_copy = work.panel + work.k_pad * RUN;
    work.v_copy = work.k_copy + work.k_pad * RUN;
    work.panel_rows = (const float **)(work.v_copy + work.v_pad * RUN);
    work.heads = (float *)work.panel_rows + pad(work.k_pad * 2);
    for (int64_t d = 0; d < work.k_pad; d++) work.panel_rows[d] = work.panel + d * RUN;
    return work;
}

static int64_t first_key(const Call *call, const Tile *tile) {
    return most(0, call->starts[tile->sequence] + tile->first + 1 - call->window);
}

static int64_t end_key(const Call *call, const Tile *tile) {
    return call->starts[tile->sequence] + tile->first + tile->tokens;
}

static void touch_tile(const Call *call, const Tile *tile) {
    int64_t first = first_key(call, tile);
    touch(call, tile->sequence, first, least(first + 2 * RUN, end_key(call, tile)));
}

/* Each run for all heads before the next run: that is how the cache lies in memory. A head's run
 * is found one turn before it is used, so that it can be prefetched. */
static void attend_narrow(const Work *work, int64_t kv_head, int64_t heads, int64_t first,
                          int64_t end) {
    Run runs[2];
    int64_t sequence = work->tile->sequence, items = (end - first + RUN - 1) / RUN * heads;
    for (int64_t i = 0; i <= items; i++) {
        int64_t key = first + least(i, items - 1) / heads * RUN;
        find_run(work->call, sequence, kv_head + i % heads, key, least(RUN, end - key),
                 &runs[i % 2]);
        if (i % heads == 0) touch(work->call, sequence, key + 2 * RUN, least(key + 3 * RUN, end));
        Head head = head_at(work, (i + heads - 1) % heads);
        if (i > 0) absorb_narrow(work, &head, &runs[(i + 1) % 2], &runs[i % 2]);
    }
}

static void attend_wide(const Work *work, int64_t kv_head, int64_t first, int64_t end) {
    Head head = head_at(work, 0);
    for (int64_t key = first; key < end; key += RUN) {
        Run run;
        find_run(work->call, work->tile->sequence, kv_head, key, least(RUN, end - key), &run);
        absorb_wide(work, &head, &run);
    }
}

static void attend_heads(const Work *work, int64_t kv_head, int64_t heads) {
    const Call *call = work->call;
    int64_t first = first_key(call, work->tile), end = end_key(call, work->tile);
    for (int64_t h = 0; h < heads; h++) begin_head(work, kv_head + h, head_at(work, h));
    if (work->rows < WIDE)
        attend_narrow(work, kv_head, heads, first, end);
    else
        attend_wide(work, kv_head, first, end);
    for (int64_t h = 0; h < heads; h++) end_head(work, kv_head + h, head_at(work, h));
}

static void attend_tile(const Call *call, const Tile *tile, int64_t kv_head, int64_t heads,
                        float *scratch) {
    Work work = begin_work(call, tile, scratch);
    int64_t together = work.rows < WIDE ? heads : 1;
    for (int64_t h = 0; h < heads; h += together) attend_heads(&work, kv_head + h, together);
}

static void attend_alone(const Call *call) {
    const Tile *tiles = (const Tile *)call->tiles;
    touch_tile(call, tiles);
    for (int64_t i = 0; i < call->tile_count; i++) {
        if (i + 1 < call->tile_count) touch_tile(call, tiles + i + 1);
        attend_tile(call, tiles + i, 0, call->kv_heads, call->scratch);
    }
}

/* The last tiles of a chunk see most: they go first, so that threads end together. */
static void attend_together(const Call *call, int64_t scratch) {
    const Tile *tiles = (const Tile *)call->tiles;
    int64_t heads = call->kv_heads, items = call->tile_count * heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)call->threads)
    for (int64_t i = items - 1; i >= 0; i--)
        attend_tile(call, tiles + i / heads, i % heads, 1,
                    call->scratch + omp_get_thread_num() * scratch);
}

/* ---- what Python calls */

/* Floats of scratch memory that each thread needs. */
EXPORT int64_t staffel_attention_scratch(int64_t rows, int64_t kv_heads, int64_t k_width,
                                         int64_t v_width) {
    int64_t k_pad = pad(k_width), v_pad = pad(v_width);
    return work_floats(rows, k_pad, v_pad) + head_floats(rows, k_pad, v_pad) +
           kv_heads * head_floats(least(rows, WIDE), k_pad, v_pad);
}

/* The first sequence whose table is too short or names a block that is not there; -1: none. */
EXPORT int64_t staffel_attention_check(const Call *call) {
    for (int64_t s = 0; s < call->sequences; s++) {
        int64_t used = (call->starts[s] + call->counts[s] - 1) / call->block_size + 1;
        if (call->starts[s] < 0 || call->counts[s] < 1 || used > call->table_stride) return s;
        const int64_t *table = call->tables + s * call->table_stride;
        for (int64_t b = 0; b < used; b++)
            if (table[b] < 0 || table[b] >= call->blocks) return s;
    }
    return -1;
}

/* Writes the step's keys and values into the cache, then attends. `step` ends before the layer's
 * fields, which are the other arguments. */
EXPORT void staffel_attention(const void *step, int64_t layer, int64_t heads, const float *q,
                              int64_t q_token, int64_t q_head, const float *k, int64_t k_token,
                              int64_t k_head, const float *v, int64_t v_token, int64_t v_head,
                              float *out, const float *sinks, int64_t window, double scaling,
                              double softcap) {
    Call call = {.layer = layer, .heads = heads, .q = q, .q_token = q_token, .q_head = q_head,
                 .k = k, .k_token = k_token, .k_head = k_head, .v = v, .v_token = v_token,
                 .v_head = v_head, .out = out, .sinks = sinks, .window = window,
                 .scaling = scaling, .softcap = softcap};
    memcpy(&call, step, offsetof(Call, layer));
    for (int64_t s = 0; s < call.sequences; s++) write_sequence(&call, s);
    if (call.threads <= 1)
        attend_alone(&call);
    else
        attend_together(&call, staffel_attention_scratch(call.tile_rows, call.kv_heads,
                                                         call.k_width, call.v_width));
}
