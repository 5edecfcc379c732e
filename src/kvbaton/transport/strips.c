/* Strips unrolled, run by run, and checked, place by place. */
#include "strips.h"
#include <stdlib.h>

/* What take_runs has left to take, and where it puts it. */
struct taking {
    uint64_t left, runs, most_runs;
    uint64_t *out;
};

/* Take what is left of one run; returns whether there is room for another. */
static inline int take(struct taking *taking, struct cursor *now, uint64_t source, uint64_t target, uint64_t size) {
    uint64_t bytes = size - now->within;
    if (!taking->left || taking->runs == taking->most_runs) return 0;
    bytes = bytes < taking->left ? bytes : taking->left;
    if (taking->out) {
        *taking->out++ = source + now->within;
        *taking->out++ = target + now->within;
        *taking->out++ = bytes;
    }
    taking->runs++;
    taking->left -= bytes;
    now->within += bytes;
    if (now->within < size) return 0;
    now->within = 0;
    return 1;
}

/* Places that are runs. */
static int take_places(const struct strip *strip, struct cursor *now, struct taking *taking) {
    const uint64_t *slot = strip->slots + 3 * now->slot;
    for (; now->place < strip->place_count; now->place++) {
        const uint64_t *place = strip->places + now->place * strip->row;
        uint64_t source = slot[0] + place[0], target = slot[1] + place[strip->column];
        if (!take(taking, now, source, target, place[2 * strip->column])) return 0;
    }
    return 1;
}

/* Places that are tokens, each with all items. */
static int take_tokens(const struct strip *strip, struct cursor *now, struct taking *taking, uint64_t token_bytes) {
    const uint64_t *slot = strip->slots + 3 * now->slot;
    for (; now->place < strip->place_count; now->place++, now->token = 0) {
        const uint64_t *place = strip->places + now->place * strip->row;
        uint64_t source = slot[0] + place[0], target = slot[1] + place[strip->column], tokens = place[2 * strip->column];
        if (!taking->out && !now->token && !now->item && !now->within && tokens * token_bytes <= taking->left &&
            tokens * strip->item_count <= taking->most_runs - taking->runs) {
            taking->left -= tokens * token_bytes;
            taking->runs += tokens * strip->item_count;
            continue;
        }
        for (; now->token < tokens; now->token++, now->item = 0) {
            uint64_t from = source + now->token * strip->steps[0], to = target + now->token * strip->steps[1];
            for (; now->item < strip->item_count; now->item++) {
                const uint64_t *item = strip->items + 3 * now->item;
                if (!take(taking, now, from + item[0], to + item[1], item[2])) return 0;
            }
        }
    }
    return 1;
}

uint64_t take_runs(const struct strip *strips, uint64_t count, struct cursor *at, uint64_t most_bytes, uint64_t most_runs,
                   uint64_t *out, uint64_t *taken) {
    struct cursor now = *at;
    struct taking taking = {most_bytes, 0, most_runs, out};
    int has_room = 1;
    for (; now.strip < count; now.strip++, now.slot = 0) {
        const struct strip *strip = strips + now.strip;
        uint64_t token_bytes = 0;
        for (uint64_t item = 0; item < strip->item_count; item++) token_bytes += strip->items[3 * item + 2];
        for (; now.slot < strip->slot_count; now.slot++, now.place = 0) {
            has_room = strip->item_count ? take_tokens(strip, &now, &taking, token_bytes) : take_places(strip, &now, &taking);
            if (!has_room) break;
        }
        if (!has_room) break;
    }
    *at = now;
    *taken = most_bytes - taking.left;
    return taking.runs;
}

struct box {
    uint64_t start, end;
};

static int by_start(const void *one, const void *other) {
    uint64_t a = ((const struct box *)one)->start, b = ((const struct box *)other)->start;
    return (a > b) - (a < b);
}

/* What a strip covers on one side (0: source, 1: target), counted from a slot: `covered`. `spread` is what the items of one token cover,
   `most_steps` how many steps from token to token the region has room for. */
struct side {
    uint64_t region, step, most_steps;
    struct box spread, covered;
};

/* 0 where an item is beyond the region. No sum here or below can wrap: each part was compared with `region`, which is below 2^63. */
static int cover_items(const struct strip *strip, int number, uint64_t region, struct side *side) {
    struct box spread = {strip->item_count ? UINT64_MAX : 0, 0};
    for (uint64_t item = 0; item < strip->item_count; item++) {
        uint64_t start = strip->items[3 * item + number], bytes = strip->items[3 * item + 2];
        if (!bytes || bytes > region || start > region - bytes) return 0;
        if (start < spread.start) spread.start = start;
        if (start + bytes > spread.end) spread.end = start + bytes;
    }
    uint64_t step = strip->item_count ? strip->steps[number] : 0;
    *side = (struct side){region, step, step ? (region - spread.end) / step : UINT64_MAX, spread, {UINT64_MAX, 0}};
    return 1;
}

/* Where a place ends on one side; 0 where that is beyond the region. `count` is at least 1. */
static inline uint64_t end_of(const struct side *side, uint64_t start, uint64_t count, int has_items) {
    if (start > side->region || (has_items ? count - 1 > side->most_steps : count > side->region)) return 0;
    uint64_t end = has_items ? start + (count - 1) * side->step + side->spread.end : start + count;
    return end > side->region ? 0 : end;
}

/* One look at each place, which costs as much as all the rest: what they cover, whether they lie one behind the other in the target, and
   the most tokens. 0 where one is empty, beyond a region, or before the last one. `has_items`, `row` and `column` are numbers where this
   is called, so that the loop is made for them. */
static inline __attribute__((always_inline)) int cover_places(const struct strip *strip, struct side *sides, uint64_t *most, int has_items,
                                                              uint64_t row, uint64_t column) {
    struct side source = sides[0], target = sides[1];
    uint64_t before = 0, tokens = 0;
    for (const uint64_t *place = strip->places, *last = place + strip->place_count * row; place != last; place += row) {
        uint64_t from = place[0], to = place[column], count = place[2 * column];
        if (!count) return 0;
        uint64_t source_end = end_of(&source, from, count, has_items), target_end = end_of(&target, to, count, has_items);
        if (!source_end || !target_end || to + target.spread.start < before) return 0;
        if (from < source.covered.start) source.covered.start = from;
        if (source_end > source.covered.end) source.covered.end = source_end;
        if (to < target.covered.start) target.covered.start = to;
        before = target_end;
        if (count > tokens) tokens = count;
    }
    target.covered.end = before; /* the last one, as each ends behind the one before it */
    source.covered.start += source.spread.start;
    target.covered.start += target.spread.start;
    sides[0] = source;
    sides[1] = target;
    *most = tokens;
    return 1;
}

static int cover(const struct strip *strip, struct side *sides, uint64_t *most) {
    if (strip->row != 3 || strip->column != 1) return cover_places(strip, sides, most, strip->item_count > 0, strip->row, strip->column);
    return strip->item_count ? cover_places(strip, sides, most, 1, 3, 1) : cover_places(strip, sides, most, 0, 3, 1);
}

/* Whether no two runs of a place overlap in the target, where places lie one behind the other: tokens in each place and items in those; or,
   with heads outside of tokens, items in places and tokens in those. */
static int stands_apart(const struct strip *strip, const struct side *target, uint64_t most_tokens) {
    uint64_t step = target->step;
    int is_nested = 1, is_turned = 1;
    for (uint64_t item = 0; item < strip->item_count; item++) {
        const uint64_t *row = strip->items + 3 * item;
        if (item + 1 < strip->item_count) {
            if (row[4] < row[1] + row[2]) return 0;
            if (row[4] < row[1] + row[2] + (most_tokens - 1) * step) is_turned = 0;
        }
        if (row[2] > step) is_turned = 0;
    }
    if (!strip->item_count || most_tokens < 2) return 1;
    if (step < target->spread.end - target->spread.start) is_nested = 0;
    return is_nested || is_turned;
}

/* Whether every run of these strips lies inside both regions and no two of their targets overlap, as far as that is seen from
   slots and places. If not, it may still be so. An array's numbers may be anything; pointers and counts are the caller's. */
int check_strips(const struct strip *strips, uint64_t count, uint64_t source_bytes, uint64_t target_bytes) {
    uint64_t slots = 0, filled = 0;
    int is_right = 1;
    if (source_bytes >> 63 || target_bytes >> 63) return 0;
    for (uint64_t number = 0; number < count; number++) slots += strips[number].slot_count;
    struct box *boxes = malloc((slots ? slots : 1) * sizeof *boxes);
    if (!boxes) return 0;
    for (uint64_t number = 0; number < count && is_right; number++) {
        const struct strip *strip = strips + number;
        struct side sides[2];
        uint64_t most_tokens;
        if (!strip->place_count || !cover_items(strip, 0, source_bytes, &sides[0]) || !cover_items(strip, 1, target_bytes, &sides[1]) ||
            !cover(strip, sides, &most_tokens) || !stands_apart(strip, &sides[1], most_tokens)) {
            is_right = 0;
            break;
        }
        struct box source = sides[0].covered, target = sides[1].covered;
        for (uint64_t each = 0; each < strip->slot_count && is_right; each++) {
            const uint64_t *slot = strip->slots + 3 * each;
            is_right = slot[0] <= source_bytes - source.end && slot[1] <= target_bytes - target.end;
            boxes[filled++] = (struct box){slot[1] + target.start, slot[1] + target.end};
        }
    }
    for (uint64_t each = 1; each < filled && is_right; each++)
        if (boxes[each].start < boxes[each - 1].end) {
            qsort(boxes, filled, sizeof *boxes, by_start);
            for (each = 1; each < filled && is_right; each++) is_right = boxes[each].start >= boxes[each - 1].end;
            break;
        }
    free(boxes);
    return is_right;
}
