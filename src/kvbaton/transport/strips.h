/* Runs in short form, as `core/strips.py` defines them, and a place among them. All offsets are in bytes. */
#include <stdint.h>

struct strip {
    const uint64_t *slots; /* rows of three: source offset, target offset, not used */
    uint64_t slot_count;
    const uint64_t *places; /* source offset, target offset, and bytes (without items) or tokens */
    uint64_t place_count;
    uint64_t row, column; /* steps, in numbers, from one place to the next and from one of its numbers to the next */
    const uint64_t *items; /* rows of three, of one token: source offset, target offset, bytes */
    uint64_t item_count;
    uint64_t steps[2]; /* from token to token, in the source and in the target */
};

/* The next run, and how much of it is done. */
struct cursor {
    uint64_t strip, slot, place, token, item, within;
};

/* Write the runs behind `at`, three numbers each, to `out`: at most `most_runs`, of at most `most_bytes`, for which the last one is
   cut. `at` moves on, `taken` is how many bytes they have. Without `out` the cursor only moves, over whole places where it can.
   Returns how many runs that were. */
uint64_t take_runs(const struct strip *strips, uint64_t count, struct cursor *at, uint64_t most_bytes, uint64_t most_runs,
                   uint64_t *out, uint64_t *taken);
