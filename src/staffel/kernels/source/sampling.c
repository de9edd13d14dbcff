/* Drawing a token: the largest of logit / temperature + noise (model/sampler.py says which noise).
 *
 * A token's noise is -log(-log u), u being its own uniform number. For it to beat a score B that
 * was reached already, -log u has to be less than exp(d - B), d being how far its scaled logit is
 * below the largest. As 1 - u is less than -log u, a few cheap operations rule out nearly all
 * tokens; of the others the score is computed in full.
 */
#include <math.h>

#include "common.h"
#include "functions.h"

#define CHUNK 64 /* tokens */

typedef struct {
    const float *logits;
    float largest, scale;
    double temperature;
    uint64_t key;
    /* So far: the token with the best score, and a little more than exp(-score). */
    int64_t token;
    double score;
    float reach;
} Draw;

/* SplitMix64 (Steele, Lea and Flood 2014): output `id` of the generator that starts at `key`. */
static inline uint64_t bits_of(uint64_t key, int64_t id) {
    uint64_t z = ((uint64_t)id + 1) * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void consider(Draw *draw, int64_t token) {
    double uniform = ((double)(bits_of(draw->key, token) >> 12) + 0.5) * 0x1p-52;
    double below = (double)(draw->logits[token] - draw->largest) / draw->temperature;
    double score = below - log(-log(uniform));
    if (score < draw->score || (score == draw->score && token > draw->token)) return;
    draw->token = token, draw->score = score;
    draw->reach = (float)(exp(-score) * 1.001);
}

static void consider_chunk(Draw *draw, int64_t first) {
    float far[CHUNK]; /* 1 - u, rounded down to 24 bits */
    int32_t near[CHUNK];
    for (int64_t i = 0; i < CHUNK; i++)
        far[i] = (float)(int32_t)(~bits_of(draw->key, first + i) >> 40) * 0x1p-24f;
    for (int64_t i = 0; i < CHUNK; i += LANES) {
        vec below = (load(draw->logits + first + i) - splat(draw->largest)) * draw->scale;
        ivec can = load(far + i) <= exp2_of(below) * draw->reach;
        *(ivec *)(near + i) = can;
    }
    for (int64_t i = 0; i < CHUNK; i++)
        if (near[i]) consider(draw, first + i);
}

static int64_t largest_of(const float *logits, int64_t count) {
    int64_t place = 0;
    float largest = logits[0];
    for (int64_t i = 1; i < count; i++) largest = logits[i] > largest ? logits[i] : largest;
    while (place < count - 1 && logits[place] != largest) place++;
    return place;
}

/* The token drawn from `count` logits, of which none is NaN or plus infinity. */
EXPORT int64_t staffel_draw(const float *logits, int64_t count, double temperature, int64_t key) {
    int64_t likeliest = largest_of(logits, count), i = 0;
    Draw draw = {.logits = logits, .largest = logits[likeliest], .temperature = temperature,
                 .scale = (float)(LOG2E / temperature), .key = (uint64_t)key,
                 .token = likeliest, .score = -INFINITY};
    consider(&draw, likeliest);
    for (; i + CHUNK <= count; i += CHUNK) consider_chunk(&draw, i);
    for (; i < count; i++) consider(&draw, i);
    return draw.token;
}
