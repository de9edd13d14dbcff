/* What the linear kernels share: panels of outputs, their division among threads, prefetching. */
#ifndef STAFFEL_PANELS_H
#define STAFFEL_PANELS_H

#include <omp.h>
#include <stdint.h>

#include "common.h"

#define PANEL 48 /* outputs */
#define LINE 64  /* bytes of a cache line */

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t panel_count(int64_t n) { return (n + PANEL - 1) / PANEL; }

/* Calls `work` once on each thread, with its share of 0 … count. */
INLINE void divide(void (*work)(const void *, int64_t, int64_t), const void *with, int64_t count,
                   int threads) {
    if (threads <= 1) {
        work(with, 0, count);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        int64_t i = omp_get_thread_num(), of = omp_get_num_threads();
        work(with, count * i / of, count * (i + 1) / of);
    }
}

/* What to prefetch: cache lines up to `end`, `burst` of them each time. */
typedef struct {
    const char *at, *end;
    int64_t burst;
} Stream;

/* `bytes` from `at`, spread over as many `turns`. */
INLINE Stream stream(const void *at, int64_t bytes, int64_t turns) {
    const char *from = at;
    return (Stream){from, from + bytes, (bytes / LINE + turns - 1) / turns};
}

INLINE void prefetch(Stream *ahead) {
    for (int64_t i = 0; i < ahead->burst && ahead->at < ahead->end; i++, ahead->at += LINE)
        __builtin_prefetch(ahead->at, 0, 3);
}

#endif
