/* One memcpy per run, by a crew: the caller, and helpers of its own that take chunks of the same work while it lasts.
   A helper that the system does not let run in time is not waited for.

   A batch of some megabytes is *begun*: the caller checks it, leaves it to the helpers and goes on. To wake a thread that has the
   interpreter's lock to wait for, and to be woken by it, would take as long as the copy. The last helper writes one byte to a
   descriptor, and the caller looks with `end_batch`. There is one begun batch at a time. */
#define _GNU_SOURCE
#include "strips.h"
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AHEAD 2
#define MOST_HELPERS 16
#define MOST_CHUNK (1u << 20)
#define LEAST_CHUNK (128u << 10)
#define CHUNKS_EACH 8
#define WORTH_HELP (1u << 20)
#define TABLE_RUNS 256

struct job {
    char *target;
    const char *source;
    const struct strip *strips;
    uint64_t count;
    struct cursor from;
    uint64_t bytes, chunk;
};

struct crew {
    pthread_mutex_t lock;
    pthread_cond_t work, spare, done; /* `spare` is what the first helper waits for, where batches are begun */
    struct job *left; /* what no thread has taken yet; 0 when there is nothing to do */
    struct job begun;
    struct strip listed; /* the begun batch, where its runs are listed */
    uint64_t *own;       /* and the copy of them */
    int wakeup;          /* gets a byte when the begun batch has ended */
    cpu_set_t usable;
    int busy, is_over, helpers, begins, away_from, is_crowded;
    pthread_t threads[MOST_HELPERS];
};

int check_runs(const uint64_t *runs, long row, long column, long count, uint64_t source_bytes, uint64_t target_bytes,
               uint64_t *own);

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
        take_runs(chunk.strips, chunk.count, &crew->left->from, chunk.bytes < chunk.chunk ? chunk.bytes : chunk.chunk, UINT64_MAX,
                  0, &chunk.bytes);
        crew->left->bytes -= chunk.bytes;
        pthread_mutex_unlock(&crew->lock);
        copy_chunk(&chunk);
        pthread_mutex_lock(&crew->lock);
    }
}

/* The share of `bytes` that is taken at a time: all who copy shall end at nearly the same time. */
static uint64_t chunk_of(const struct crew *crew, uint64_t bytes) {
    uint64_t chunk = bytes / (CHUNKS_EACH * (uint64_t)crew->helpers);
    return chunk < LEAST_CHUNK ? LEAST_CHUNK : chunk > MOST_CHUNK ? MOST_CHUNK : chunk;
}

/* With the lock, so that the byte is written before `end_batch` can see the end: its caller may close the descriptor then. */
static void end_begun(struct crew *crew) {
    ssize_t written = write(crew->wakeup, "", 1);
    (void)written; /* the pipe is full: it is readable */
    crew->left = 0;
}

/* Where batches are begun, the first helper is there for those alone: in others the caller takes its place. */
static void *help(void *argument) {
    struct crew *crew = argument;
    pthread_mutex_lock(&crew->lock);
    int only_begun = crew->begins && pthread_equal(pthread_self(), crew->threads[0]);
    while (!crew->is_over || (crew->left && crew->left->bytes)) {
        if (!crew->left || !crew->left->bytes || (only_begun && crew->left != &crew->begun)) {
            pthread_cond_wait(only_begun ? &crew->spare : &crew->work, &crew->lock);
            continue;
        }
        crew->busy++;
        take_part(crew);
        if (!--crew->busy) {
            if (crew->left == &crew->begun) end_begun(crew);
            pthread_cond_broadcast(&crew->done);
        }
    }
    pthread_mutex_unlock(&crew->lock);
    return 0;
}

/* Keep helpers off the caller's processor, where they would only take turns with it; the system may put them there otherwise.
   One that is there for what the caller does not take part in may run anywhere. Where the other processors are fewer than the
   helpers, it gets the caller's, which is about to wait: the system finds that one busy when it wakes them all, and puts two on
   another. As a batch thread it does not take the processor from a caller that goes on and may hold the interpreter's lock.
   Called with the lock. */
static void send_away(struct crew *crew) {
    int here = sched_getcpu();
    cpu_set_t others = crew->usable;
    if (here < 0 || here == crew->away_from || here >= CPU_SETSIZE) return;
    CPU_CLR(here, &others);
    if (!CPU_COUNT(&others)) return;
    for (int i = crew->begins; i < crew->helpers; i++) pthread_setaffinity_np(crew->threads[i], sizeof others, &others);
    if (crew->begins && crew->helpers && CPU_COUNT(&others) < crew->helpers) {
        struct sched_param usual = {0};
        cpu_set_t callers;
        CPU_ZERO(&callers);
        CPU_SET(here, &callers);
        pthread_setschedparam(crew->threads[0], SCHED_BATCH, &usual);
        pthread_setaffinity_np(crew->threads[0], sizeof callers, &callers);
    }
    crew->away_from = here;
}

/* A crew with so many helpers, or fewer where the system does not give that many; 0 without memory. With `begins` there is one more,
   and batches can be begun. */
struct crew *open_crew(long helpers, int begins) {
    struct crew *crew = calloc(1, sizeof *crew);
    if (!crew) return 0;
    pthread_mutex_init(&crew->lock, 0);
    pthread_cond_init(&crew->work, 0);
    pthread_cond_init(&crew->spare, 0);
    pthread_cond_init(&crew->done, 0);
    crew->away_from = -1;
    crew->begins = begins;
    helpers += begins;
    if (sched_getaffinity(0, sizeof crew->usable, &crew->usable)) helpers = 0;
    pthread_mutex_lock(&crew->lock); /* a helper looks which one it is */
    while (crew->helpers < helpers && crew->helpers < MOST_HELPERS) {
        if (pthread_create(&crew->threads[crew->helpers], 0, help, crew)) break;
        crew->helpers++;
    }
    pthread_mutex_unlock(&crew->lock);
    return crew;
}

/* End the helpers, once a batch that was begun has ended. No thread may be copying. */
void close_crew(struct crew *crew) {
    pthread_mutex_lock(&crew->lock);
    crew->is_over = 1;
    pthread_cond_broadcast(&crew->work);
    pthread_cond_broadcast(&crew->spare);
    pthread_mutex_unlock(&crew->lock);
    for (int i = 0; i < crew->helpers; i++) pthread_join(crew->threads[i], 0);
    pthread_cond_destroy(&crew->done);
    pthread_cond_destroy(&crew->spare);
    pthread_cond_destroy(&crew->work);
    pthread_mutex_destroy(&crew->lock);
    free(crew->own);
    free(crew);
}

/* Whether the begun batch has ended; with `waits`, when it has. */
int end_batch(struct crew *crew, int waits) {
    pthread_mutex_lock(&crew->lock);
    while (waits && crew->left == &crew->begun) pthread_cond_wait(&crew->done, &crew->lock);
    int has_ended = crew->left != &crew->begun;
    pthread_mutex_unlock(&crew->lock);
    return has_ended;
}

/* Copy from `at` on, which is moved: at most `most_bytes` in at most `most_runs` runs. Returns how many bytes were copied.
   For one caller at a time. A batch that was begun goes first. */
uint64_t copy_runs(struct crew *crew, char *target, const char *source, const struct strip *strips, uint64_t count,
                   struct cursor *at, uint64_t most_bytes, uint64_t most_runs) {
    struct job left = {target, source, strips, count, *at, 0, 0};
    uint64_t total;
    take_runs(strips, count, at, most_bytes, most_runs, 0, &total);
    left.bytes = total;
    end_batch(crew, 1);
    pthread_mutex_lock(&crew->lock);
    crew->is_crowded = 1;
    if (crew->helpers <= crew->begins || total <= WORTH_HELP) {
        pthread_mutex_unlock(&crew->lock);
        copy_chunk(&left);
        return total;
    }
    left.chunk = chunk_of(crew, total);
    while (crew->left) pthread_cond_wait(&crew->done, &crew->lock);
    send_away(crew);
    crew->left = &left;
    pthread_cond_broadcast(&crew->work);
    take_part(crew);
    crew->left = 0;
    while (crew->busy) pthread_cond_wait(&crew->done, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    return total;
}

/* Leave a batch to the helpers; returns whether it was begun. Not while there is another, nor without helpers. */
static int begin(struct crew *crew, struct job job, int wakeup) {
    pthread_mutex_lock(&crew->lock);
    int is_free = !crew->left && crew->begins && crew->helpers;
    if (is_free) {
        send_away(crew);
        job.chunk = chunk_of(crew, job.bytes);
        crew->begun = job;
        crew->wakeup = wakeup;
        crew->left = &crew->begun;
        pthread_cond_broadcast(&crew->work);
        /* Where other batches came during the last one, the processors have enough to do, and one helper more only takes turns. */
        if (!crew->is_crowded || crew->helpers == crew->begins) pthread_cond_signal(&crew->spare);
        crew->is_crowded = 0;
    }
    pthread_mutex_unlock(&crew->lock);
    return is_free;
}

/* Begin a batch of strips, which were checked, and which the caller keeps until it has ended. */
int begin_strips(struct crew *crew, char *target, const char *source, const struct strip *strips, uint64_t count, uint64_t bytes,
                 int wakeup) {
    return begin(crew, (struct job){target, source, strips, count, {0}, bytes, 0}, wakeup);
}

/* Check and begin a batch of listed runs, of which a copy is kept. Returns how many bytes it has; 0, and nothing was begun, unless
   the runs pass the checks of `check_runs` and have at most `most_bytes`: everything else is left to those who can name what is
   wrong. */
uint64_t begin_listed(struct crew *crew, char *target, uint64_t target_bytes, const char *source, uint64_t source_bytes,
                      const uint64_t *runs, long row, long column, long count, uint64_t most_bytes, int wakeup) {
    static const uint64_t no_slot[3];
    uint64_t left = most_bytes;
    pthread_mutex_lock(&crew->lock);
    int is_free = !crew->left && crew->begins && crew->helpers;
    pthread_mutex_unlock(&crew->lock); /* one caller at a time begins, so that it stays free of begun batches */
    if (!is_free || count <= 0) return 0;
    free(crew->own);
    crew->own = malloc(3 * sizeof *crew->own * (size_t)count);
    if (!crew->own || !check_runs(runs, row, column, count, source_bytes, target_bytes, crew->own)) return 0;
    for (long run = 0; run < count; run++) {
        if (crew->own[2 * count + run] > left) return 0;
        left -= crew->own[2 * count + run];
    }
    crew->listed = (struct strip){no_slot, 1, crew->own, (uint64_t)count, 1, (uint64_t)count, 0, 0, {0, 0}};
    struct job job = {target, source, &crew->listed, 1, {0}, most_bytes - left, 0};
    return begin(crew, job, wakeup) ? most_bytes - left : 0;
}
