/* A small batch, checked and copied in one call: to hand it to another thread would cost more than its bytes do. */
#include <stdint.h>
#include <string.h>

#define MOST_RUNS 512

/* The region of the target and that of the source: the same for all that is moved between them. */
struct regions {
    char *target;
    uint64_t target_bytes;
    const char *source;
    uint64_t source_bytes;
};

int64_t plan_pages(const void *table, const int64_t *asked, int64_t *out, int64_t most_runs);

int check_runs(const uint64_t *runs, long row, long column, long count, uint64_t source_bytes, uint64_t target_bytes,
               uint64_t *own);

/* Returns how many bytes were copied; 0, and nothing was, unless the runs are few, of at most `most_bytes`, and pass the checks of
   `check_runs`: everything else is left to those who can name what is wrong. */
uint64_t move_few(char *target, uint64_t target_bytes, const char *source, uint64_t source_bytes, const uint64_t *runs, long row,
                  long column, long count, uint64_t most_bytes) {
    uint64_t own[3 * MOST_RUNS], left = most_bytes;
    if (count > MOST_RUNS) return 0;
    /* First, so that what is too long is not checked for nothing. */
    for (long run = 0; run < count; run++) {
        uint64_t bytes = runs[run * row + 2 * column];
        if (bytes > left) return 0;
        left -= bytes;
    }
    if (!check_runs(runs, row, column, count, source_bytes, target_bytes, own)) return 0;
    const uint64_t *sources = own, *targets = own + count, *sizes = own + 2 * count;
    for (long run = 0; run < count; run++) memcpy(target + targets[run], source + sources[run], sizes[run]);
    return most_bytes - left;
}

/* Plans a few pages as `plan_pages` does, and checks and copies their runs as `move_few` does. Returns how many bytes that were, and
   how many runs above the 32nd bit; 0, and nothing was copied, where either of them leaves it to others. */
uint64_t move_pages(const struct regions *in, const void *table, const int64_t *asked, uint64_t most_bytes) {
    int64_t runs[3 * MOST_RUNS];
    if (most_bytes >> 32) return 0;
    int64_t run_count = plan_pages(table, asked, runs, MOST_RUNS);
    if (!run_count) return 0;
    const uint64_t *planned = (const uint64_t *)runs;
    uint64_t moved = move_few(in->target, in->target_bytes, in->source, in->source_bytes, planned, 3, 1, run_count, most_bytes);
    return moved ? moved | (uint64_t)run_count << 32 : 0;
}
