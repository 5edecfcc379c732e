/* Begins the copies of a plan on a GPU: lays its tables out in pinned memory, and queues what copies them, the kernel of each strip,
   and a number that shows the end. It does what `strip_launch.py` and `copier.py` do, for the plans that are the rule and for
   kernels that are compiled: in Python, whose code is cold between two batches, that takes as long as the copy. */
#include "strips.h"
#include <stddef.h>

#define LINE 16
#define FEW_TOKENS 16
#define WASTE 1.07
#define MOST_STRIPS 8
#define MOST_NUMBER 0x7fffffffu
#define PARAMS 13
#define HIDDEN 8 /* kernels of some compilers have more, for memory that they do not use; two today */

struct waiter;
void wait_for_flag(struct waiter *waiter, const int32_t *flag, int32_t wanted, int wakeup, uint64_t bytes);
int check_strips(const struct strip *strips, uint64_t count, uint64_t source_bytes, uint64_t target_bytes);

struct segment {
    uint64_t offset, end, address;
};

/* A region: its pieces of memory in order of their offsets, and the address from which distances are counted. */
struct placement {
    const struct segment *segments;
    uint64_t count, floor;
};

struct kernel {
    void *function; /* 0: not compiled yet */
    uint64_t shared_bytes;
};

struct tile {
    uint64_t piece, rows, warps;
    struct kernel kernels[4]; /* with tokens: 1, even: 2 */
};

struct gpu {
    int (*enter)(void *context), (*leave)(void **context);
    int (*bring)(uint64_t target, const void *source, size_t bytes, void *stream);
    int (*launch)(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned shared, void *stream,
                  void **params, void **extra);
    int (*write)(void *stream, uint64_t address, uint32_t number, unsigned flags);
    void *context, *stream;
    struct waiter *waiter;
    char *pinned;
    uint64_t on_gpu, room, flag;
    const struct tile *tiles; /* largest piece first */
    uint64_t tile_count;
};

struct laid_out {
    const struct tile *tile;
    const struct kernel *kernel;
    uint64_t params[PARAMS];
};

static const struct segment *segment_of(const struct placement *place, uint64_t offset) {
    uint64_t low = 0, high = place->count;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (place->segments[middle].offset <= offset) low = middle + 1;
        else high = middle;
    }
    return low ? &place->segments[low - 1] : 0;
}

/* The largest piece that leaves few threads without work, for runs of `item` bytes; for places of a strip, where that is 0. */
static const struct tile *best_tile(const struct gpu *gpu, const struct strip *strip, uint64_t item) {
    const struct tile *best = 0;
    double least = 0;
    for (const struct tile *tile = gpu->tiles, *end = tile + gpu->tile_count; tile < end; tile++) {
        uint64_t total = item, covered = (item + tile->piece - 1) / tile->piece * tile->piece;
        if (!item)
            for (uint64_t place = total = covered = 0; place < strip->place_count; place++) {
                uint64_t bytes = strip->places[place * strip->row + 2 * strip->column];
                total += bytes;
                covered += (bytes + tile->piece - 1) / tile->piece * tile->piece;
            }
        if ((double)covered <= (double)total * WASTE) return tile;
        if (!best || (double)covered < least) best = tile, least = (double)covered;
    }
    return best;
}

/* What the places of a strip add up to, and the bytes that they reach from a slot on either side. */
struct sum {
    uint64_t bits, most, total, low[2], high[2];
};

/* Copy the places of a strip, three numbers each, and add them up. `has_tokens`, `row` and `column` are numbers where this is called, so
   that the loop is made for them. */
static inline __attribute__((always_inline)) struct sum copy_places(const struct strip *strip, uint64_t *rows, int has_tokens, uint64_t row,
                                                                    uint64_t column) {
    struct sum sum = {0, 0, 0, {UINT64_MAX, UINT64_MAX}, {0, 0}};
    uint64_t steps[2] = {strip->steps[0], strip->steps[1]}, item = has_tokens ? strip->items[2] : 0;
    for (const uint64_t *place = strip->places, *last = place + strip->place_count * row; place != last; place += row, rows += 3) {
        uint64_t amount = place[2 * column];
        for (int side = 0; side < 2; side++) {
            uint64_t start = place[side * column], end = start + (has_tokens ? (amount - 1) * steps[side] + item : amount);
            sum.bits |= start;
            if (start < sum.low[side]) sum.low[side] = start;
            if (end > sum.high[side]) sum.high[side] = end;
            rows[side] = start;
        }
        rows[2] = amount;
        if (!has_tokens) sum.bits |= amount;
        if (amount > sum.most) sum.most = amount;
        sum.total += amount;
    }
    return sum;
}

static struct sum add_places(const struct strip *strip, uint64_t *rows) {
    if (strip->row != 3 || strip->column != 1) return copy_places(strip, rows, strip->item_count > 0, strip->row, strip->column);
    return strip->item_count ? copy_places(strip, rows, 1, 3, 1) : copy_places(strip, rows, 0, 3, 1);
}

/* Write the tables of a strip to `at`; returns where they end, 0 when this strip is to be copied in another way. */
static uint64_t lay_out(const struct gpu *gpu, const struct strip *strip, const struct placement *const *places, uint64_t at,
                        struct laid_out *out, uint64_t *bytes) {
    uint64_t has_tokens = strip->item_count > 0, count = strip->place_count;
    uint64_t end = at + (strip->slot_count * 2 * 8 + LINE - 1) / LINE * LINE + (count * 3 * 8 + LINE - 1) / LINE * LINE;
    if (strip->item_count > 1 || !count || !strip->slot_count || end > gpu->room) return 0;
    uint64_t item = has_tokens ? strip->items[2] : 0;
    uint64_t *slots = (uint64_t *)(gpu->pinned + at), *rows = (uint64_t *)(gpu->pinned + end) - (count * 3 + 1) / 2 * 2;
    struct sum sum = add_places(strip, rows);
    uint64_t bits = sum.bits, most = sum.most, total = sum.total;
    int is_uniform = has_tokens || most * count == total;
    uint64_t first[2] = {has_tokens ? strip->items[0] : 0, has_tokens ? strip->items[1] : 0};
    for (uint64_t slot = 0; slot < strip->slot_count; slot++)
        for (int side = 0; side < 2; side++) {
            uint64_t start = strip->slots[3 * slot + side] + first[side];
            const struct segment *segment = segment_of(places[side], start + sum.low[side]);
            if (!segment || start + sum.high[side] > segment->end) return 0;
            uint64_t moved = start + segment->address - segment->offset - places[side]->floor;
            bits |= moved;
            slots[2 * slot + side] = moved;
        }
    if (has_tokens) bits |= item | strip->steps[0] | strip->steps[1];
    if (bits % LINE) return 0;
    const struct tile *tile = best_tile(gpu, strip, !has_tokens && is_uniform ? most : item);
    uint64_t run = has_tokens ? item : most, tokens = has_tokens ? most : 1, per_run = (run + tile->piece - 1) / tile->piece;
    uint64_t pieces = strip->slot_count * count * tokens * per_run;
    int is_even = is_uniform && run % tile->piece == 0;
    /* Where many programs would have nothing to do, places are cut: in Python. */
    if (most * count > total && (double)(has_tokens ? tokens * count : per_run * tile->piece * count) > WASTE * (double)total)
        if (!has_tokens || most > FEW_TOKENS) return 0;
    const struct kernel *kernel = &tile->kernels[has_tokens + 2 * is_even];
    if (!kernel->function || pieces > MOST_NUMBER || run > MOST_NUMBER) return 0;
    if (has_tokens && (strip->steps[0] > MOST_NUMBER || strip->steps[1] > MOST_NUMBER)) return 0;
    uint64_t slots_at = gpu->on_gpu + at, rows_at = gpu->on_gpu + (uint64_t)((char *)rows - gpu->pinned);
    *out = (struct laid_out){tile,
                             kernel,
                             {places[0]->floor, places[1]->floor, slots_at, rows_at, gpu->on_gpu, pieces, count, tokens, 1, per_run,
                              has_tokens ? strip->steps[0] : 0, has_tokens ? strip->steps[1] : 0, run}};
    *bytes += strip->slot_count * total * (has_tokens ? item : 1);
    return end;
}

static int queue(const struct gpu *gpu, struct laid_out *strips, uint64_t count, uint64_t table_bytes, int32_t number) {
    int code = gpu->bring(gpu->on_gpu, gpu->pinned, table_bytes, gpu->stream);
    for (uint64_t strip = 0; !code && strip < count; strip++) {
        struct laid_out *one = &strips[strip];
        void *scratch = 0, *params[PARAMS + HIDDEN];
        for (int param = 0; param < PARAMS; param++) params[param] = &one->params[param];
        for (int param = PARAMS; param < PARAMS + HIDDEN; param++) params[param] = &scratch;
        uint64_t programs = (one->params[5] + one->tile->rows - 1) / one->tile->rows;
        code = gpu->launch(one->kernel->function, (unsigned)programs, 1, 1, (unsigned)(32 * one->tile->warps), 1, 1,
                           (unsigned)one->kernel->shared_bytes, gpu->stream, params, 0);
    }
    return code ? code : gpu->write(gpu->stream, gpu->flag, (uint32_t)number, 0);
}

/* Begin to copy strips that were checked, if they have at most `most_bytes`; when they are copied, `number` is written, and a byte to
   `wakeup`. Returns how many bytes they have. 0: nothing was begun, and it is to be done in another way. Below 0: the driver's error,
   and some of it may have been queued. */
int64_t begin_on_gpu(const struct gpu *gpu, const struct strip *strips, uint64_t count, const struct placement *source,
                     const struct placement *target, uint64_t most_bytes, int32_t number, int wakeup) {
    const struct placement *places[2] = {source, target};
    struct laid_out laid[MOST_STRIPS];
    uint64_t end = 0, bytes = 0;
    if (!gpu->pinned || !count || count > MOST_STRIPS) return 0;
    for (uint64_t strip = 0; strip < count; strip++)
        if (!(end = lay_out(gpu, &strips[strip], places, end, &laid[strip], &bytes))) return 0;
    if (bytes > most_bytes) return 0;
    int code = gpu->enter(gpu->context);
    if (code) return -code;
    void *left;
    code = queue(gpu, laid, count, end, number);
    gpu->leave(&left);
    if (code) return -code;
    wait_for_flag(gpu->waiter, (const int32_t *)gpu->flag, number, wakeup, bytes);
    return (int64_t)bytes;
}

/* The same for strips that were not checked. `shape` has the bytes of the source region and of the target region, and five numbers of
   each strip: how many slots, places and items it has, and its steps. Those are in `rows`, of three numbers each, strip after strip. 0, too,
   where it is not seen that they are right. */
int64_t check_and_begin(const struct gpu *gpu, const uint64_t *rows, const uint64_t *shape, uint64_t count,
                        const struct placement *source, const struct placement *target, uint64_t most_bytes, int32_t number, int wakeup) {
    struct strip strips[MOST_STRIPS];
    if (count > MOST_STRIPS) return 0;
    for (uint64_t strip = 0; strip < count; strip++) {
        const uint64_t *one = shape + 2 + 5 * strip, *places = rows + 3 * one[0], *items = places + 3 * one[1];
        strips[strip] = (struct strip){rows, one[0], places, one[1], 3, 1, items, one[2], {one[3], one[4]}};
        rows = items + 3 * one[2];
    }
    if (!check_strips(strips, count, shape[0], shape[1])) return 0;
    return begin_on_gpu(gpu, strips, count, source, target, most_bytes, number, wakeup);
}
