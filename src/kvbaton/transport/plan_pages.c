/* The plan of a few pages in one call: what `plan_blocks` and `plan_layers` of core/plan.py give for a pair that is page by page.
   Those are the reference, and make every plan that this loop leaves alone. */
#include <stdint.h>

#define MOST_PAGES 32

/* A piece of such a pair: strides from block to block and offsets of its first byte at the source and at the target, bytes of a
   token, tokens of a block, how many blocks there are on each side; behind it `slots` pairs of offsets. */
struct piece {
    int64_t strides[2], offsets[2], token_bytes, block_tokens, blocks[2], slots;
};

struct page {
    int64_t target, source, number;
};

/* Write the runs of tokens `first` up to `end` to `out`, three numbers each, and how many bytes they have to `bytes`; returns how
   many runs. 0, and nothing counts, where there are more than `most_runs`, or where a list is too short, names a block twice or one
   that does not exist: that is left to those who can name what is wrong. */
int64_t plan_pages(const struct piece *piece, const int64_t *sources, int64_t source_count, const int64_t *targets,
                   int64_t target_count, int64_t first, int64_t end, int64_t *out, int64_t most_runs, int64_t *bytes) {
    struct page pages[MOST_PAGES];
    int64_t runs[3 * MOST_PAGES], run_count = 0, size = piece->block_tokens;
    if (first < 0 || first >= end || size <= 0) return 0;
    int64_t low = first / size, high = (end - 1) / size + 1, count = high - low;
    if (count > MOST_PAGES || high > source_count || high > target_count) return 0;
    /* In the order of target memory: pages lie there as their blocks are numbered. */
    for (int64_t done = 0; done < count; done++) {
        struct page next = {targets[low + done], sources[low + done], low + done};
        if (next.target < 0 || next.target >= piece->blocks[1] || next.source < 0 || next.source >= piece->blocks[0]) return 0;
        int64_t at = done;
        for (; at > 0 && pages[at - 1].target >= next.target; at--) {
            if (pages[at - 1].target == next.target) return 0;
            pages[at] = pages[at - 1];
        }
        pages[at] = next;
        for (int64_t other = low; other < low + done; other++)
            if (sources[other] == next.source) return 0;
    }
    for (int64_t index = 0; index < count; index++) {
        struct page page = pages[index];
        int64_t of = page.source * piece->strides[0] + piece->offsets[0];
        int64_t at = page.target * piece->strides[1] + piece->offsets[1];
        int64_t skipped = page.number * size < first ? first - page.number * size : 0;
        int64_t left = (page.number + 1) * size > end ? (page.number + 1) * size - end : 0;
        int64_t length = (size - skipped - left) * piece->token_bytes;
        of += skipped * piece->token_bytes;
        at += skipped * piece->token_bytes;
        int64_t *last = runs + 3 * (run_count - 1);
        if (run_count && of == last[0] + last[2] && at == last[1] + last[2]) {
            last[2] += length;
        } else {
            int64_t *next = runs + 3 * run_count++;
            next[0] = of;
            next[1] = at;
            next[2] = length;
        }
    }
    if (run_count * piece->slots > most_runs) return 0;
    const int64_t *slot = (const int64_t *)(piece + 1);
    for (int64_t number = 0; number < piece->slots; number++, slot += 2) {
        for (int64_t run = 0; run < run_count; run++, out += 3) {
            out[0] = runs[3 * run] + slot[0];
            out[1] = runs[3 * run + 1] + slot[1];
            out[2] = runs[3 * run + 2];
        }
    }
    *bytes = (end - first) * piece->token_bytes * piece->slots;
    return run_count * piece->slots;
}
