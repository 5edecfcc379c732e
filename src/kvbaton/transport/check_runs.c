/* One pass over runs before a batch is accepted. It settles what is the rule, pages or slices of pages inside both regions, and
   leaves everything else to those who can name what is wrong. A run is three numbers: source offset, target offset, bytes; `row`
   and `column` are the steps, in numbers, from one run to the next and from one of its numbers to the next. */
#include <stdint.h>
#include <stdlib.h>

#define MOST_SLOTS_PER_RUN 256

/* Whether every target is a slot of its own in a grid of slots of `size` bytes that starts at `lowest`. */
static int is_grid(const uint64_t *targets, long count, uint64_t size, uint64_t lowest, uint64_t highest) {
    uint64_t slots = (highest - lowest) / size + 1;
    if (slots > (uint64_t)count * MOST_SLOTS_PER_RUN) return 0;
    uint64_t *taken = calloc(slots / 64 + 1, sizeof *taken);
    if (!taken) return 0;
    int shift = size & (size - 1) ? -1 : __builtin_ctzll(size);
    long run = 0;
    for (; run < count; run++) {
        uint64_t distance = targets[run] - lowest;
        uint64_t slot = shift < 0 ? distance / size : distance >> shift;
        uint64_t bit = 1ull << slot % 64;
        if (slot * size != distance || taken[slot / 64] & bit) break;
        taken[slot / 64] |= bit;
    }
    free(taken);
    return run == count;
}

/* Copy the runs to `own`, column by column; tells whether they are all right. If not, they may still be, and `own` is void. */
int check_runs(const uint64_t *runs, long row, long column, long count, uint64_t source_bytes, uint64_t target_bytes,
               uint64_t *own) {
    if (count <= 0) return 0;
    uint64_t *sources = own, *targets = own + count, *sizes = own + 2 * count;
    uint64_t size = runs[2 * column], lowest = UINT64_MAX, highest = 0, end = 0;
    int are_equal = 1, are_in_order = 1;
    for (long run = 0; run < count; run++, runs += row) {
        uint64_t source = runs[0], target = runs[column], bytes = runs[2 * column];
        if (!bytes || bytes > source_bytes || source > source_bytes - bytes) return 0;
        if (bytes > target_bytes || target > target_bytes - bytes) return 0;
        are_equal &= bytes == size;
        are_in_order &= target >= end;
        end = target + bytes;
        if (target < lowest) lowest = target;
        if (target > highest) highest = target;
        sources[run] = source;
        targets[run] = target;
        sizes[run] = bytes;
    }
    return are_in_order || (are_equal && is_grid(targets, count, size, lowest, highest));
}

/* The bytes of runs that were checked. */
uint64_t count_bytes(const uint64_t *runs, long row, long column, long count) {
    uint64_t total = 0;
    for (long run = 0; run < count; run++) total += runs[run * row + 2 * column];
    return total;
}
