/* One memcpy per run, by a crew: the caller, and helpers of its own that take chunks of the same work while it lasts.
   A helper that the system does not let run in time is not waited for. */
#define _GNU_SOURCE
#include "strips.h"
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define AHEAD 2
#define MOST_HELPERS 15
#define CHUNK (1u << 20)
#define WORTH_HELP (1u << 20)
#define TABLE_RUNS 256

struct job {
    char *target;
    const char *source;
    const struct strip *strips;
    uint64_t count;
    struct cursor from;
    uint64_t bytes;
};

struct crew {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct job *left; /* what nobody has taken yet; 0 when there is nothing to do */
    cpu_set_t usable;
    int busy, is_over, helpers, away_from;
    pthread_t threads[MOST_HELPERS];
};

/* The runs are unrolled a few at a time, into a table that stays in the processor's first cache. */
static void copy_chunk(const struct job *job) {
    uint64_t table[3 * TABLE_RUNS], left = job->bytes, taken;
    struct cursor at = job->from;
    while (left) {
        uint64_t runs = take_runs(job->strips, job->count, &at, left, TABLE_RUNS, table, &taken);
        for (const uint64_t *run = table, *end = table + 3 * runs; run < end; run += 3) {
            if (run + 3 * AHEAD < end) {
                __builtin_prefetch(job->source + run[3 * AHEAD], 0, 0);
                __builtin_prefetch(job->target + run[3 * AHEAD + 1], 1, 0);
            }
            memcpy(job->target + run[1], job->source + run[0], run[2]);
        }
        left -= taken;
    }
}

/* Take chunk after chunk until nothing is left. Called with the lock, and returns with it. */
static void take_part(struct crew *crew) {
    while (crew->left && crew->left->bytes) {
        struct job chunk = *crew->left;
        take_runs(chunk.strips, chunk.count, &crew->left->from, chunk.bytes < CHUNK ? chunk.bytes : CHUNK, UINT64_MAX, 0,
                  &chunk.bytes);
        crew->left->bytes -= chunk.bytes;
        pthread_mutex_unlock(&crew->lock);
        copy_chunk(&chunk);
        pthread_mutex_lock(&crew->lock);
    }
}

static void *help(void *argument) {
    struct crew *crew = argument;
    pthread_mutex_lock(&crew->lock);
    while (!crew->is_over) {
        if (!crew->left || !crew->left->bytes) {
            pthread_cond_wait(&crew->work, &crew->lock);
            continue;
        }
        crew->busy++;
        take_part(crew);
        if (!--crew->busy) pthread_cond_signal(&crew->done);
    }
    pthread_mutex_unlock(&crew->lock);
    return 0;
}

/* Keep helpers off the caller's processor, where they would only take turns with it; the system may put them there otherwise. */
static void send_away(struct crew *crew) {
    int here = sched_getcpu();
    cpu_set_t others = crew->usable;
    if (here < 0 || here == crew->away_from || here >= CPU_SETSIZE) return;
    CPU_CLR(here, &others);
    if (!CPU_COUNT(&others)) return;
    for (int i = 0; i < crew->helpers; i++) pthread_setaffinity_np(crew->threads[i], sizeof others, &others);
    crew->away_from = here;
}

/* A crew with so many helpers, or fewer where the system does not give that many; 0 without memory. */
struct crew *open_crew(long helpers) {
    struct crew *crew = calloc(1, sizeof *crew);
    if (!crew) return 0;
    pthread_mutex_init(&crew->lock, 0);
    pthread_cond_init(&crew->work, 0);
    pthread_cond_init(&crew->done, 0);
    crew->away_from = -1;
    if (sched_getaffinity(0, sizeof crew->usable, &crew->usable)) helpers = 0;
    while (crew->helpers < helpers && crew->helpers < MOST_HELPERS) {
        if (pthread_create(&crew->threads[crew->helpers], 0, help, crew)) break;
        crew->helpers++;
    }
    return crew;
}

/* End the helpers. Nobody may be copying. */
void close_crew(struct crew *crew) {
    pthread_mutex_lock(&crew->lock);
    crew->is_over = 1;
    pthread_cond_broadcast(&crew->work);
    pthread_mutex_unlock(&crew->lock);
    for (int i = 0; i < crew->helpers; i++) pthread_join(crew->threads[i], 0);
    pthread_cond_destroy(&crew->done);
    pthread_cond_destroy(&crew->work);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}

/* Copy from `at` on, which is moved: at most `most_bytes` in at most `most_runs` runs. Returns how many bytes were copied.
   For one caller at a time. */
uint64_t copy_runs(struct crew *crew, char *target, const char *source, const struct strip *strips, uint64_t count,
                   struct cursor *at, uint64_t most_bytes, uint64_t most_runs) {
    struct job left = {target, source, strips, count, *at, 0};
    uint64_t total;
    take_runs(strips, count, at, most_bytes, most_runs, 0, &total);
    left.bytes = total;
    if (!crew->helpers || total <= WORTH_HELP) {
        copy_chunk(&left);
        return total;
    }
    send_away(crew);
    pthread_mutex_lock(&crew->lock);
    crew->left = &left;
    pthread_cond_broadcast(&crew->work);
    take_part(crew);
    crew->left = 0;
    while (crew->busy) pthread_cond_wait(&crew->done, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    return total;
}
