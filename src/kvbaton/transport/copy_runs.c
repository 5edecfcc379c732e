/* One memcpy per run. A run is three numbers: source offset, target offset, bytes; `row` and `column` are the steps, in numbers,
   from one run to the next and from one of its numbers to the next. */
#include <stdint.h>
#include <string.h>

#define AHEAD 2

void copy_runs(char *target, const char *source, const uint64_t *runs, long row, long column, long count) {
    for (long i = 0; i < count; i++) {
        const uint64_t *run = runs + i * row;
        if (i + AHEAD < count) {
            __builtin_prefetch(source + run[AHEAD * row], 0, 0);
            __builtin_prefetch(target + run[AHEAD * row + column], 1, 0);
        }
        memcpy(target + run[column], source + run[0], run[2 * column]);
    }
}
