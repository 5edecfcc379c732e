/* The plan of a few pages in one call: what `plan_blocks` and `plan_layers` of core/plan.py give for a pair that is page by page.
   Those are the reference, and make every plan that this loop leaves alone. */
#include <stdint.h>

#define MOST_PAGES 32

/* A piece of such a pair: from block to block at the source and at the target, bytes of a token, tokens of a block, how many blocks
   there are on each side; behind it `slots` pairs of offsets, at which a block of number 0 begins. */
struct piece {
    int64_t strides[2], token_bytes, block_tokens, blocks[2], slots;
};

struct page {
    int64_t target, source, number;
};

/* Write the runs of some pages to `out`, three numbers each. Returns how many runs. 0, and nothing counts, where there are more than
   `most_runs`, or where a block is named twice or does not exist: that is left to those who can name what is wrong. What is asked for
   is one list of numbers, because the caller pays for every argument: how many pages, the first token and the end, counted from the
   first page on; then the blocks at the source, and those at the target. */
int64_t plan_pages(const void *table, const int64_t *asked, int64_t *out, int64_t most_runs) {
    const struct piece *piece = table;
    struct page pages[MOST_PAGES];
    int64_t count = asked[0], first = asked[1], end = asked[2];
    int64_t runs[MOST_PAGES][3], run_count = 0, size = piece->block_tokens;
    if (count < 1 || count > MOST_PAGES || first < 0 || first >= end || end > count * size) return 0;
    const int64_t *sources = asked + 3, *targets = sources + count;
    /* In the order of target memory: pages lie there as their blocks are numbered. */
    for (int64_t done = 0; done < count; done++) {
        struct page next = {targets[done], sources[done], done};
        if (next.target < 0 || next.target >= piece->blocks[1] || next.source < 0 || next.source >= piece->blocks[0]) return 0;
        int64_t at = done;
        for (; at > 0 && pages[at - 1].target >= next.target; at--) {
            if (pages[at - 1].target == next.target) return 0;
            pages[at] = pages[at - 1];
        }
        pages[at] = next;
        for (int64_t other = 0; other < done; other++)
            if (sources[other] == next.source) return 0;
    }
    for (int64_t index = 0; index < count; index++) {
        struct page page = pages[index];
        int64_t begin = page.number * size, skipped = begin < first ? first - begin : 0;
        int64_t left = begin + size > end ? begin + size - end : 0;
        int64_t of = page.source * piece->strides[0] + skipped * piece->token_bytes;
        int64_t at = page.target * piece->strides[1] + skipped * piece->token_bytes;
        int64_t length = (size - skipped - left) * piece->token_bytes;
        if (run_count) {
            int64_t *last = runs[run_count - 1];
            if (of == last[0] + last[2] && at == last[1] + last[2]) {
                last[2] += length;
                continue;
            }
        }
        runs[run_count][0] = of;
        runs[run_count][1] = at;
        runs[run_count++][2] = length;
    }
    if (run_count * piece->slots > most_runs) return 0;
    const int64_t *slot = (const int64_t *)(piece + 1);
    for (int64_t number = 0; number < piece->slots; number++, slot += 2) {
        for (int64_t run = 0; run < run_count; run++, out += 3) {
            out[0] = runs[run][0] + slot[0];
            out[1] = runs[run][1] + slot[1];
            out[2] = runs[run][2];
        }
    }
    return run_count * piece->slots;
}
