/* One memcpy per run, in several threads. A run is three numbers: source offset, target offset, bytes; `row` and `column` are the
   steps, in numbers, from one run to the next and from one of its numbers to the next. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 2
#define MOST_THREADS 16
#define WORTH_A_THREAD (512u << 10)

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

static void *copy_part(void *argument) {
    struct job *job = argument;
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
    return 0;
}

/* Copy from `place` on, which is moved: at most `most_bytes` in at most `most_runs` runs. Tells how many bytes were copied. */
uint64_t copy_runs(char *target, const char *source, const uint64_t *runs, long row, long column, long count,
                   struct place *place, uint64_t most_bytes, uint64_t most_runs, long threads) {
    struct job jobs[MOST_THREADS], whole = {target, source, runs, row, column, count, *place, 0};
    pthread_t helpers[MOST_THREADS];
    int is_running[MOST_THREADS] = {0};
    uint64_t total = walk(&whole, place, most_bytes, most_runs), shared = 0;
    struct place at = whole.from;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > (long)(total / WORTH_A_THREAD)) threads = total / WORTH_A_THREAD;
    if (threads < 1) threads = 1;
    for (long i = 0; i < threads; i++) {
        jobs[i] = whole;
        jobs[i].from = at;
        jobs[i].bytes = i + 1 < threads ? total / threads : total - shared;
        shared += jobs[i].bytes;
        if (i + 1 == threads) break;
        walk(&whole, &at, jobs[i].bytes, count);
        is_running[i] = !pthread_create(&helpers[i], 0, copy_part, &jobs[i]);
        if (!is_running[i]) copy_part(&jobs[i]);
    }
    copy_part(&jobs[threads - 1]);
    for (long i = 0; i + 1 < threads; i++)
        if (is_running[i]) pthread_join(helpers[i], 0);
    return total;
}
