/* One memcpy per run, by a crew: whoever calls, and helpers of its own that take chunks of the same work while it lasts.
   A helper that the system does not let run in time is not waited for. A run is three numbers: source offset, target offset,
   bytes; `row` and `column` are the steps, in numbers, from one run to the next and from one of its numbers to the next. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AHEAD 2
#define MOST_HELPERS 15
#define CHUNK (1u << 20)
#define WORTH_HELP (1u << 20)

struct place {
    uint64_t run, within;
};

struct job {
    char *target;
    const char *source;
    const uint64_t *runs;
    long row, column, count;
    struct place from;
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

static uint64_t size_of(const struct job *job, uint64_t run) { return job->runs[run * job->row + 2 * job->column]; }

/* Walk on by at most `bytes` and at most `most_runs` runs; tells how many bytes that were. */
static uint64_t walk(const struct job *job, struct place *place, uint64_t bytes, uint64_t most_runs) {
    uint64_t done = 0, last = place->run + most_runs;
    while (done < bytes && place->run < last && place->run < (uint64_t)job->count) {
        uint64_t left = size_of(job, place->run) - place->within;
        if (left > bytes - done) {
            place->within += bytes - done;
            return bytes;
        }
        done += left;
        place->run++;
        place->within = 0;
    }
    return done;
}

static void copy_chunk(const struct job *job) {
    uint64_t run = job->from.run, within = job->from.within, left = job->bytes;
    while (left) {
        const uint64_t *numbers = job->runs + run * job->row;
        uint64_t bytes = numbers[2 * job->column] - within;
        if (run + AHEAD < (uint64_t)job->count) {
            __builtin_prefetch(job->source + numbers[AHEAD * job->row], 0, 0);
            __builtin_prefetch(job->target + numbers[AHEAD * job->row + job->column], 1, 0);
        }
        bytes = bytes < left ? bytes : left;
        memcpy(job->target + numbers[job->column] + within, job->source + numbers[0] + within, bytes);
        left -= bytes;
        within = 0;
        run++;
    }
}

/* Take chunk after chunk until nothing is left. Called with the lock, and returns with it. */
static void take_part(struct crew *crew) {
    while (crew->left && crew->left->bytes) {
        struct job chunk = *crew->left;
        chunk.bytes = walk(crew->left, &crew->left->from, chunk.bytes < CHUNK ? chunk.bytes : CHUNK, crew->left->count);
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

/* Copy from `place` on, which is moved: at most `most_bytes` in at most `most_runs` runs. Tells how many bytes were copied.
   For one caller at a time. */
uint64_t copy_runs(struct crew *crew, char *target, const char *source, const uint64_t *runs, long row, long column, long count,
                   struct place *place, uint64_t most_bytes, uint64_t most_runs) {
    struct job left = {target, source, runs, row, column, count, *place, 0};
    uint64_t total = left.bytes = walk(&left, place, most_bytes, most_runs);
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
