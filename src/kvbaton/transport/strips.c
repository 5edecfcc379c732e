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

/* What the places of a strip cover on one side (0: source, 1: target), counted from a slot; 0 where that is beyond `region`.
   `spread` is what the items of one token cover. No sum here can wrap: each part was compared with `region`, which is below 2^63. */
static int cover(const struct strip *strip, int side, uint64_t region, struct box *covered, struct box *spread) {
    uint64_t step = strip->item_count ? strip->steps[side] : 0, most_steps = 0;
    spread->start = strip->item_count ? UINT64_MAX : 0;
    spread->end = 0;
    for (uint64_t item = 0; item < strip->item_count; item++) {
        uint64_t start = strip->items[3 * item + side], bytes = strip->items[3 * item + 2];
        if (!bytes || bytes > region || start > region - bytes) return 0;
        if (start < spread->start) spread->start = start;
        if (start + bytes > spread->end) spread->end = start + bytes;
    }
    if (step) most_steps = (region - spread->end) / step;
    covered->start = UINT64_MAX;
    covered->end = 0;
    for (uint64_t number = 0; number < strip->place_count; number++) {
        const uint64_t *place = strip->places + number * strip->row;
        uint64_t start = place[side * strip->column], last = place[2 * strip->column], end;
        if (!last || start > region) return 0;
        if (!strip->item_count) {
            if (last > region) return 0;
            end = start + last;
        } else {
            if (step && last - 1 > most_steps) return 0;
            end = start + (last - 1) * step + spread->end;
        }
        if (end > region) return 0;
        if (start < covered->start) covered->start = start;
        if (end > covered->end) covered->end = end;
    }
    covered->start += spread->start;
    return 1;
}

/* Whether no two runs of a slot overlap in the target: places one behind the other, tokens in each and items in those; or, with
   heads outside of tokens, items in places and tokens in those. */
static int stands_apart(const struct strip *strip, const struct box *spread) {
    uint64_t most_tokens = 0, step = strip->steps[1], before = 0;
    int is_nested = 1, is_turned = 1;
    for (uint64_t number = 0; number < strip->place_count; number++) {
        const uint64_t *place = strip->places + number * strip->row;
        uint64_t start = place[strip->column] + spread->start, last = place[2 * strip->column];
        if (start < before) return 0;
        before = place[strip->column] + (strip->item_count ? (last - 1) * step + spread->end : last);
        if (last > most_tokens) most_tokens = last;
    }
    for (uint64_t item = 0; item < strip->item_count; item++) {
        const uint64_t *row = strip->items + 3 * item;
        if (item + 1 < strip->item_count) {
            if (row[4] < row[1] + row[2]) return 0;
            if (row[4] < row[1] + row[2] + (most_tokens - 1) * step) is_turned = 0;
        }
        if (row[2] > step) is_turned = 0;
    }
    if (!strip->item_count || most_tokens < 2) return 1;
    if (step < spread->end - spread->start) is_nested = 0;
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
        struct box source, target, spread;
        if (!strip->place_count || !cover(strip, 0, source_bytes, &source, &spread) ||
            !cover(strip, 1, target_bytes, &target, &spread) || !stands_apart(strip, &spread)) {
            is_right = 0;
            break;
        }
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
