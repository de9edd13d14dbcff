/* What a transformer does between its matrix products, each in one pass over its input.
 *
 * Every function takes rows; with `threads` above 1 they are shared out, with 1 no parallel
 * region is entered. Products and sums are in float32.
 */
#include <math.h>
#include <omp.h>

#include "common.h"
#include "functions.h"

static inline vec pick(ivec mask, vec yes, vec no) {
    return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask));
}

static inline float sum_of(vec v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

/* e^x within 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite: ln 2 in two parts), e^r
 * by its Taylor series. Beyond what float32 holds it stays at the nearest normal number. */
static inline vec exponential(vec x) {
    const vec low = splat(-87.3f), high = splat(88.3f), shift = splat(12582912.0f);
    x = pick(x < low, low, x);
    x = pick(x > high, high, x);
    vec n = (x * splat(1.44269504f) + shift) - shift; /* to the nearest integer */
    vec r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vec sum = splat(1.0f / 720);
    sum = sum * r + splat(1.0f / 120);
    sum = sum * r + splat(1.0f / 24);
    sum = sum * r + splat(1.0f / 6);
    sum = sum * r + splat(0.5f);
    sum = sum * r + splat(1.0f);
    sum = sum * r + splat(1.0f);
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return sum * (vec)power;
}

/* One thread's rows of `total`. */
static inline void share(int64_t total, int64_t *first, int64_t *last) {
    int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
    *first = total * mine / threads;
    *last = total * (mine + 1) / threads;
}

/* ---- root mean square norm */

typedef struct {
    const float *x, *weight;
    float *y;
    int64_t stride, width;
    float eps, offset;
} norm_job;

static void norm_row(const norm_job *job, const float *x, float *y) {
    int64_t width = job->width, i = 0;
    vec squares = {0};
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float sum = sum_of(squares);
    for (; i < width; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)width + job->eps);
    for (i = 0; i + LANES <= width; i += LANES)
        store(y + i, load(x + i) * splat(scale) * (load(job->weight + i) + splat(job->offset)));
    for (; i < width; i++) y[i] = x[i] * scale * (job->weight[i] + job->offset);
}

static void norm_rows(const norm_job *job, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        norm_row(job, job->x + row * job->stride, job->y + row * job->width);
}

EXPORT void staffel_rms_norm(const float *x, int64_t stride, const float *weight, float *y,
                             int64_t rows, int64_t width, float eps, float offset, int threads) {
    norm_job job = {x, weight, y, stride, width, eps, offset};
    if (threads <= 1) {
        norm_rows(&job, 0, rows);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        int64_t first, last;
        share(rows, &first, &last);
        norm_rows(&job, first, last);
    }
}

/* ---- gated activation */

/* SiLU is g * sigmoid(g). GELU in its tanh form is g * sigmoid(2 u), with
 * u = sqrt(2 / pi) (g + 0.044715 g^3), since (1 + tanh u) / 2 = sigmoid(2 u). */
static inline vec gate_of(vec g, int gelu) {
    vec z = g;
    if (gelu) z = splat(1.5957691216f) * (g + splat(0.044715f) * g * g * g);
    return g / (splat(1.0f) + exponential(-z));
}

static void gated_row(const float *x, float *y, int64_t width, int gelu) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        store(y + i, gate_of(load(x + i), gelu) * load(x + width + i));
    for (; i < width; i++) y[i] = gate_of(splat(x[i]), gelu)[0] * x[width + i];
}

static void gated_rows(const float *x, int64_t stride, float *y, int64_t width, int gelu,
                       int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        gated_row(x + row * stride, y + row * width, width, gelu);
}

/* Rows of x are the gate's `width` values, then the other factor's. */
EXPORT void staffel_gated(const float *x, int64_t stride, float *y, int64_t rows, int64_t width,
                          int gelu, int threads) {
    if (threads <= 1) {
        gated_rows(x, stride, y, width, gelu, 0, rows);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        int64_t first, last;
        share(rows, &first, &last);
        gated_rows(x, stride, y, width, gelu, first, last);
    }
}

/* ---- rotary embedding */

/* One token's heads: `turned` of `width` values, in two halves, the rest as they are. */
static void rotate_token(const float *x, int64_t stride, float *y, int64_t heads, int64_t width,
                         const float *cosine, const float *sine, int64_t turned) {
    int64_t half = turned / 2;
    for (int64_t head = 0; head < heads; head++, x += stride, y += width) {
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            vec a = load(x + i), b = load(x + half + i);
            store(y + i, a * load(cosine + i) - b * load(sine + i));
            store(y + half + i, b * load(cosine + half + i) + a * load(sine + half + i));
        }
        for (; i < half; i++) {
            y[i] = x[i] * cosine[i] - x[half + i] * sine[i];
            y[half + i] = x[half + i] * cosine[half + i] + x[i] * sine[half + i];
        }
        for (i = turned; i < width; i++) y[i] = x[i];
    }
}

/* x is [heads, tokens, width] with strides of both; y is laid out [tokens, heads, width]. */
EXPORT void staffel_rotary(const float *x, int64_t head_stride, int64_t token_stride, float *y,
                           int64_t heads, int64_t tokens, int64_t width, const float *cosine,
                           const float *sine, int64_t turned) {
    for (int64_t token = 0; token < tokens; token++)
        rotate_token(x + token * token_stride, head_stride, y + token * heads * width, heads,
                     width, cosine + token * turned, sine + token * turned, turned);
}
