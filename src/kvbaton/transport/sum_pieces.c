/* CRC-32 (that of zlib) over pieces of a region, at the speed of memory: 64 bytes per step are folded by carry-less products,
   which x86-64 and AArch64 both have, and which leave a remainder of 16 bytes for a table. The method is that of "Fast CRC
   Computation for Generic Polynomials Using PCLMULQDQ"; the constants are powers of x modulo the polynomial, bits reversed.
   An x86-64 with VPCLMULQDQ and AVX-512 folds 256 bytes per step, and is then as fast as memory, if that is asked early enough.
   AArch64 has an instruction for this very sum, which is a third faster: three streams at a time keep it busy, and products join
   them. A processor without any of these gets the table alone.
   With streams, what is summed next is fetched meanwhile: pages lie anywhere, and a processor that recognizes one stream of
   reads does not recognize three in a page. */
#include <stdint.h>
#include <string.h>

typedef uint64_t lane __attribute__((vector_size(16)));

#if defined(__x86_64__)
#include <immintrin.h>
#define FOLDING __attribute__((target("pclmul,sse4.1")))
static int can_fold(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}
FOLDING static inline lane fold(lane value, lane powers) {
    return (lane)_mm_clmulepi64_si128((__m128i)value, (__m128i)powers, 0x00) ^
           (lane)_mm_clmulepi64_si128((__m128i)value, (__m128i)powers, 0x11);
}
#if defined(__clang__) ? __clang_major__ >= 10 : __GNUC__ >= 10
#define HAS_WIDE_FOLD
#define FOLDING_WIDE __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq")))
static int can_fold_wide(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}
#endif
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_neon.h>
#include <sys/auxv.h>
#include <arm_acle.h>
#define HAS_SUM_INSTRUCTION
#define FOLDING __attribute__((target("+crypto+crc")))
static int can_instruct(void) { return (getauxval(AT_HWCAP) & 0x90) == 0x90; } /* HWCAP_PMULL and HWCAP_CRC32 */
static int can_fold(void) { return getauxval(AT_HWCAP) >> 4 & 1; } /* HWCAP_PMULL */
FOLDING static inline lane fold(lane value, lane powers) {
    return (lane)vmull_p64((poly64_t)value[0], (poly64_t)powers[0]) ^
           (lane)vmull_high_p64(vreinterpretq_p64_u64((uint64x2_t)value), vreinterpretq_p64_u64((uint64x2_t)powers));
}
#else
#define FOLDING
static int can_fold(void) { return 0; }
static inline lane fold(lane value, lane powers) { return value ^ powers; }
#endif

#define ALWAYS_INLINE __attribute__((always_inline))
#define POLYNOMIAL 0xedb88320u
#define LANES 4
#define LINE 64
#define STEP (LANES * sizeof(lane))

/* By how many bytes a lane is moved on by a product with them. */
#define BY_256_BYTES 0x011542778a, 0x01322d1430
#define BY_64_BYTES 0x0154442bd4, 0x01c6e41596
#define BY_16_BYTES 0x01751997d0, 0x00ccaa009e
static uint32_t table[8][256];
static int is_folding;

__attribute__((constructor)) static void prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t rest = byte;
        for (int bit = 0; bit < 8; bit++) rest = rest >> 1 ^ (rest & 1 ? POLYNOMIAL : 0);
        table[0][byte] = rest;
    }
    for (int far = 1; far < 8; far++)
        for (int byte = 0; byte < 256; byte++)
            table[far][byte] = table[far - 1][byte] >> 8 ^ table[0][table[far - 1][byte] & 255];
    is_folding = can_fold();
}

static uint32_t sum_by_table(uint32_t rest, const unsigned char *bytes, uint64_t count) {
    for (; count >= 8; bytes += 8, count -= 8) {
        uint32_t low = rest ^ (bytes[0] | bytes[1] << 8 | bytes[2] << 16 | (uint32_t)bytes[3] << 24);
        rest = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
               table[3][bytes[4]] ^ table[2][bytes[5]] ^ table[1][bytes[6]] ^ table[0][bytes[7]];
    }
    while (count--) rest = rest >> 8 ^ table[0][(rest ^ *bytes++) & 255];
    return rest;
}

FOLDING ALWAYS_INLINE static inline uint32_t close_fold(const lane *folded) {
    lane all = folded[0];
    for (int i = 1; i < LANES; i++) all = fold(all, (lane){BY_16_BYTES}) ^ folded[i];
    return sum_by_table(0, (const unsigned char *)&all, sizeof all);
}

/* Pieces whose lengths are multiples of STEP are one stream for the fold: it is closed when a shorter rest comes, or at the end. */
FOLDING ALWAYS_INLINE static inline uint32_t fold_pieces(uint32_t rest, const unsigned char *region, const int64_t *pieces,
                                                         long count) {
    lane folded[LANES], next[LANES];
    int is_open = 0;
    for (long piece = 0; piece < count; piece++) {
        const unsigned char *bytes = region + pieces[2 * piece];
        uint64_t left = (uint64_t)pieces[2 * piece + 1];
        if (piece + 1 < count) __builtin_prefetch(region + pieces[2 * piece + 2], 0, 0);
        if (left >= STEP && !is_open) {
            memcpy(folded, bytes, STEP);
            folded[0] ^= (lane){rest, 0};
            is_open = 1;
            bytes += STEP;
            left -= STEP;
        }
        for (; left >= STEP; bytes += STEP, left -= STEP) {
            memcpy(next, bytes, STEP);
            for (int i = 0; i < LANES; i++) folded[i] = fold(folded[i], (lane){BY_64_BYTES}) ^ next[i];
        }
        if (left && is_open) {
            rest = close_fold(folded);
            is_open = 0;
        }
        rest = left ? sum_by_table(rest, bytes, left) : rest;
    }
    return is_open ? close_fold(folded) : rest;
}

FOLDING static uint32_t sum_by_folding(uint32_t rest, const unsigned char *region, const int64_t *pieces, long count) {
    return fold_pieces(rest, region, pieces, count);
}

#ifdef HAS_WIDE_FOLD
typedef uint64_t wide __attribute__((vector_size(64)));
#define WIDE_STEP (LANES * sizeof(wide))
#define AHEAD 4096

FOLDING_WIDE static inline wide fold_wide(wide value, wide powers) {
    return (wide)_mm512_clmulepi64_epi128((__m512i)value, (__m512i)powers, 0x00) ^
           (wide)_mm512_clmulepi64_epi128((__m512i)value, (__m512i)powers, 0x11);
}

FOLDING_WIDE static uint32_t close_wide_fold(const wide *folded) {
    const wide by_64_bytes = {BY_64_BYTES, BY_64_BYTES, BY_64_BYTES, BY_64_BYTES};
    lane lanes[LANES];
    wide all = folded[0];
    for (int i = 1; i < LANES; i++) all = fold_wide(all, by_64_bytes) ^ folded[i];
    memcpy(lanes, &all, sizeof lanes);
    return close_fold(lanes);
}

static int is_folding_wide;

__attribute__((constructor)) static void choose_width(void) { is_folding_wide = can_fold_wide(); }

/* As `sum_by_folding`, with four lanes in each register; what is shorter than one step is folded as there, by a copy of that code:
   to call it would take a switch between two encodings of instructions, as long as many steps. What comes `AHEAD` bytes later is
   fetched meanwhile, also in the next piece, where no processor looks for it by itself. */
FOLDING_WIDE static uint32_t sum_by_wide_folding(uint32_t rest, const unsigned char *region, const int64_t *pieces, long count) {
    const wide by_256_bytes = {BY_256_BYTES, BY_256_BYTES, BY_256_BYTES, BY_256_BYTES};
    wide folded[LANES], next[LANES];
    int is_open = 0;
    for (long piece = 0; piece < count; piece++) {
        int64_t offset = pieces[2 * piece], left = pieces[2 * piece + 1], far = left < AHEAD ? left : AHEAD;
        const uintptr_t following = (uintptr_t)region + (uintptr_t)(piece + 1 < count ? pieces[2 * piece + 2] : offset);
        if (left >= (int64_t)WIDE_STEP && !is_open) {
            memcpy(folded, region + offset, WIDE_STEP);
            folded[0] ^= (wide){rest};
            is_open = 1;
            offset += WIDE_STEP;
            left -= WIDE_STEP;
        }
        for (; left >= (int64_t)WIDE_STEP; offset += WIDE_STEP, left -= WIDE_STEP) {
            const uintptr_t ahead = left > far ? (uintptr_t)region + (uintptr_t)(offset + far) : following + (uintptr_t)(far - left);
            for (uint64_t line = 0; line < WIDE_STEP; line += LINE) __builtin_prefetch((const void *)(ahead + line), 0, 3);
            memcpy(next, region + offset, WIDE_STEP);
            for (int i = 0; i < LANES; i++) folded[i] = fold_wide(folded[i], by_256_bytes) ^ next[i];
        }
        if (left) {
            const int64_t tail[2] = {offset, left};
            if (is_open) rest = close_wide_fold(folded);
            is_open = 0;
            rest = fold_pieces(rest, region, tail, 1);
        }
    }
    return is_open ? close_wide_fold(folded) : rest;
}
#else
static const int is_folding_wide = 0;
static uint32_t sum_by_wide_folding(uint32_t rest, const unsigned char *region, const int64_t *pieces, long count) {
    return sum_by_folding(rest, region, pieces, count);
}
#endif

#ifdef HAS_SUM_INSTRUCTION
#define STREAMS 3
#define LONG 1344 /* three of them are a page of 4 KiB, nearly; both lengths are whole lines */
#define SHORT 192

static uint32_t by_long[STREAMS - 1], by_short[STREAMS - 1];
static int is_instructing;

/* x to the power of 8 * `bytes` - 33 modulo the polynomial, bits reversed: a product with it and one more step of eight bytes
   move a sum on over so many bytes. */
static uint32_t power(long bytes) {
    uint32_t rest = 0x80000000u;
    for (long bit = 0; bit < 8 * bytes - 33; bit++) rest = rest >> 1 ^ (rest & 1 ? POLYNOMIAL : 0);
    return rest;
}

__attribute__((constructor)) static void prepare_streams(void) {
    for (int stream = 0; stream < STREAMS - 1; stream++) {
        by_long[stream] = power((STREAMS - 1 - stream) * LONG);
        by_short[stream] = power((STREAMS - 1 - stream) * SHORT);
    }
    is_instructing = can_instruct();
}

static inline uint64_t word_at(const unsigned char *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

FOLDING static inline uint32_t sum_streams(uint32_t rest, const unsigned char *bytes, long length, const uint32_t *powers,
                                           const unsigned char *ahead) {
    uint32_t second = 0, third = 0;
    for (long line = 0; line < length; line += LINE) {
        for (int stream = 0; stream < STREAMS; stream++) __builtin_prefetch(ahead + stream * length + line, 0, 0);
        for (long at = line; at < line + LINE; at += 8) {
            rest = __crc32d(rest, word_at(bytes + at));
            second = __crc32d(second, word_at(bytes + length + at));
            third = __crc32d(third, word_at(bytes + 2 * length + at));
        }
    }
    lane moved = (lane)vmull_p64((poly64_t)(uint64_t)rest, (poly64_t)(uint64_t)powers[0]) ^
                 (lane)vmull_p64((poly64_t)(uint64_t)second, (poly64_t)(uint64_t)powers[1]);
    return third ^ __crc32d(0, moved[0]);
}

/* What follows `bytes`, of which `left` are left of a piece: further on in it, or in the next one. */
static inline const unsigned char *ahead_of(const unsigned char *bytes, uint64_t left, uint64_t step, const unsigned char *next) {
    return left >= 2 * step ? bytes + step : next;
}

/* Not inline: a short piece does not pay for what this keeps in registers. */
FOLDING __attribute__((noinline)) static uint32_t sum_long(uint32_t rest, const unsigned char *bytes, uint64_t left,
                                                           const unsigned char *next) {
    const uint64_t far = STREAMS * LONG, near = STREAMS * SHORT;
    for (; left >= far; bytes += far, left -= far)
        rest = sum_streams(rest, bytes, LONG, by_long, ahead_of(bytes, left, far, next));
    for (; left >= near; bytes += near, left -= near)
        rest = sum_streams(rest, bytes, SHORT, by_short, ahead_of(bytes, left, near, next));
    return rest;
}

FOLDING static uint32_t sum_by_instruction(uint32_t rest, const unsigned char *bytes, uint64_t left, const unsigned char *next) {
    if (left >= STREAMS * SHORT) {
        uint64_t tail = left % (STREAMS * LONG) % (STREAMS * SHORT);
        rest = sum_long(rest, bytes, left, next);
        bytes += left - tail;
        left = tail;
    }
    for (; left >= 8; bytes += 8, left -= 8) rest = __crc32d(rest, word_at(bytes));
    while (left--) rest = __crc32b(rest, *bytes++);
    return rest;
}
#else
static const int is_instructing = 0;
static uint32_t sum_by_instruction(uint32_t rest, const unsigned char *bytes, uint64_t left, const unsigned char *next) {
    (void)next;
    return sum_by_table(rest, bytes, left);
}
#endif

/* Whether pieces like this one are quicker in wide steps: each shorter rest costs as much as several of them. */
static int is_worth_width(int64_t bytes) { return bytes >= 1024 || (bytes && bytes % 256 == 0); }

/* One part in one of the four ways. */
static uint32_t sum_part(uint32_t rest, const unsigned char *region, const int64_t *pieces, long count) {
    if (is_folding_wide && count && is_worth_width(pieces[1])) return sum_by_wide_folding(rest, region, pieces, count);
    if (is_folding && !is_instructing) return sum_by_folding(rest, region, pieces, count);
    for (long piece = 0; piece < count; piece++) {
        const unsigned char *bytes = region + pieces[2 * piece];
        uint64_t left = (uint64_t)pieces[2 * piece + 1];
        const unsigned char *next = piece + 1 < count ? region + pieces[2 * piece + 2] : bytes;
        __builtin_prefetch(next, 0, 0);
        rest = is_instructing ? sum_by_instruction(rest, bytes, left, next) : sum_by_table(rest, bytes, left);
    }
    return rest;
}

/* Take only so many of the ways from now on, for tests: 0 the table, 1 folding too, 2 all. Tells which is the best one left. */
int limit_sums(int ways) {
    int best = 0;
    is_folding = ways > 0 && can_fold();
    if (is_folding) best = 1;
#ifdef HAS_WIDE_FOLD
    is_folding_wide = ways > 1 && can_fold_wide();
    if (is_folding_wide) best = 2;
#endif
#ifdef HAS_SUM_INSTRUCTION
    is_instructing = ways > 1 && can_instruct();
    if (is_instructing) best = 2;
#endif
    return best;
}

/* The sums of consecutive parts of the pieces (offset, bytes) of a region, each up to the piece with the number in `ends`; the
   first one continues `value`. Returns 0; a negative number if a piece leaves the region; or 1, and nothing was summed, if the
   pieces hold more than `most_bytes`. */
int64_t sum_pieces(const unsigned char *region, int64_t region_bytes, const int64_t *pieces, long count, int64_t most_bytes,
                   const int64_t *ends, long parts, uint32_t value, uint32_t *sums) {
    for (long piece = 0; piece < count; piece++) {
        int64_t offset = pieces[2 * piece], bytes = pieces[2 * piece + 1];
        if (offset < 0 || bytes < 0 || bytes > region_bytes || offset > region_bytes - bytes) return -1 - piece;
    }
    for (long piece = 0; piece < count; piece++) {
        if (pieces[2 * piece + 1] > most_bytes) return 1;
        most_bytes -= pieces[2 * piece + 1];
    }
    for (long part = 0, piece = 0; part < parts; piece = ends[part++], value = 0) {
        sums[part] = ~sum_part(~value, region, pieces + 2 * piece, ends[part] - piece);
    }
    return 0;
}

/* Blocks of `piece_tokens` tokens, each of which is one piece of `piece_bytes` in every plane of every layer. */
struct grid {
    int64_t blocks, block_stride, piece_bytes, piece_tokens, one_in, first_layer, planes, offset_count, offsets[];
};

/* Tokens up to `end_token` of layers up to `end_layer`: `Span` of core/handoff.py. */
struct span {
    int64_t number, first_token, end_token, first_layer, end_layer;
};

#define TABLE_PIECES 256

/* Where a span lies: numbers of its blocks, and how many tokens of the first and of the last one do not belong to it. */
struct part {
    int64_t first, end, skipped, spared;
};

/* Find the blocks of a span; whether all of it is there. */
static int find_part(const struct grid *grid, const struct span *span, long id_count, int64_t cached, struct part *part) {
    int64_t size = grid->piece_tokens, first_token = span->first_token < cached ? cached : span->first_token;
    if (first_token < 0 || first_token >= span->end_token || span->end_token > id_count * size) return 0;
    if (span->first_layer < grid->first_layer || span->first_layer >= span->end_layer) return 0;
    *part = (struct part){first_token / size, (span->end_token + size - 1) / size, first_token % size, 0};
    part->spared = part->end * size - span->end_token;
    return span->end_layer - grid->first_layer <= grid->offset_count / grid->planes;
}

/* A space and the decimal digits of a number, in front of `end`; where they start. To print a number takes longer than its sum. */
static unsigned char *write_number(int64_t number, unsigned char *end) {
    uint64_t rest = number < 0 ? -(uint64_t)number : (uint64_t)number;
    do *--end = '0' + rest % 10;
    while (rest /= 10);
    if (number < 0) *--end = '-';
    *--end = ' ';
    return end;
}

/* The first of `count` blocks that is in the sample of a layer, as core/checks.py chooses it. */
static int64_t first_sampled(const struct grid *grid, int64_t seed, int64_t number, int64_t layer, int64_t count) {
    unsigned char text[48], *end = text + sizeof text, *start = write_number(number, write_number(layer, end));
    uint32_t pick = ~sum_by_table(~(uint32_t)seed, start, (uint64_t)(end - start));
    return pick % (count < grid->one_in ? count : grid->one_in);
}

/* The sums of spans of blocks, all of them or with a `seed` from 0 on, a sample; in the order layer, plane, block. Returns how many
   bytes that were; 0, and nothing was summed, if these may be more than `most_bytes`, or if not everything is inside: what is wrong is
   found out and named elsewhere. That no block is there twice is for the caller to check. */
int64_t sum_blocks(const unsigned char *region, int64_t region_bytes, const struct grid *grid, const int64_t *ids, long id_count,
                   const struct span *spans, long span_count, int64_t cached_tokens, int64_t seed, int64_t most_bytes,
                   uint32_t *sums) {
    struct part part = {0, 0, 0, 0};
    int64_t left = most_bytes, total = 0, pieces[2 * TABLE_PIECES];
    const int64_t step = seed < 0 ? 1 : grid->one_in, token_bytes = grid->piece_bytes / grid->piece_tokens;
    for (long id = 0; id < id_count; id++)
        if (ids[id] < 0 || ids[id] >= grid->blocks) return 0;
    for (int64_t at = 0; at < grid->offset_count; at++)
        if (grid->offsets[at] < 0 || grid->offsets[at] + (grid->blocks - 1) * grid->block_stride > region_bytes - grid->piece_bytes)
            return 0;
    for (const struct span *span = spans; span < spans + span_count; span++) {
        if (!find_part(grid, span, id_count, cached_tokens, &part)) return 0;
        int64_t line_bytes = (part.end - part.first + step - 1) / step * grid->piece_bytes;
        int64_t lines = (span->end_layer - span->first_layer) * grid->planes;
        if (lines > left / line_bytes) return 0;
        left -= lines * line_bytes;
    }
    for (long each = 0; each < span_count; each++) {
        const struct span *span = spans + each;
        uint32_t rest = ~0u;
        long count = 0;
        find_part(grid, span, id_count, cached_tokens, &part);
        for (int64_t layer = span->first_layer; layer < span->end_layer; layer++) {
            int64_t from = part.first + (seed < 0 ? 0 : first_sampled(grid, seed, span->number, layer, part.end - part.first));
            for (int64_t plane = 0; plane < grid->planes; plane++) {
                int64_t offset = grid->offsets[(layer - grid->first_layer) * grid->planes + plane];
                for (int64_t id = from; id < part.end; id += step) {
                    int64_t skipped = id == part.first ? part.skipped * token_bytes : 0;
                    int64_t spared = id == part.end - 1 ? part.spared * token_bytes : 0;
                    if (count == TABLE_PIECES) {
                        rest = sum_part(rest, region, pieces, count);
                        count = 0;
                    }
                    pieces[2 * count] = ids[id] * grid->block_stride + offset + skipped;
                    pieces[2 * count + 1] = grid->piece_bytes - skipped - spared;
                    total += pieces[2 * count++ + 1];
                }
            }
        }
        sums[each] = ~sum_part(rest, region, pieces, count);
    }
    return total;
}
