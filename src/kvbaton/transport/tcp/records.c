/* Records of TLS 1.3 between a socket and pieces of memory; `records.py` has the theory and makes the keys.

The functions of OpenSSL come as pointers, so that no header and no library is needed to compile this. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    HEAD = 5,
    TAG = 16,
    RECORD = 16384,
    MOST_BODY = RECORD + 256,
    WIRE = HEAD + RECORD + 1 + TAG,
    /* What is encrypted at once stays in the first cache of the core until the system has copied it. */
    OUT_RECORDS = 4,
    IN_BYTES = 16 * WIRE,
    DIRECT = 1024,
    ALERT = 21,
    HANDSHAKE = 22,
    DATA = 23,
    KEY_UPDATE = 24,
    SET_TAG = 0x11, /* EVP_CTRL_AEAD_SET_TAG */
    GET_TAG = 0x10, /* EVP_CTRL_AEAD_GET_TAG */
};

/* Results below any errno. */
enum { BAD_RECORD = -1001, UNEXPECTED = -1002, NO_KEYS = -1003, UPDATED = -1010, UPDATE_REQUESTED = -1011, ALERTED = -2000 };

typedef struct {
    void *(*context)(void);
    void (*release)(void *);
    int (*init)(void *, const void *, void *, const unsigned char *, const unsigned char *, int);
    int (*update)(void *, unsigned char *, int *, const unsigned char *, int);
    int (*final)(void *, unsigned char *, int *);
    int (*control)(void *, int, int, void *);
} Crypto;

typedef struct {
    void *context;
    uint64_t sequence;
    unsigned char iv[12];
} Half;

typedef struct {
    Crypto crypto;
    Half in, out;
    int64_t failed;
    uint64_t most_records;
    /* Ciphertext that was received: [in_at, in_end). Plaintext that no piece has taken yet lies before it: [plain_at, plain_end). */
    int64_t in_at, in_end, plain_at, plain_end;
    /* Ciphertext that is not sent yet, and how many bytes of pieces it has: they count as sent when all of it is. */
    int64_t out_at, out_end, out_plain;
    unsigned char gathered[RECORD];
    unsigned char out_bytes[OUT_RECORDS * WIRE];
    unsigned char in_bytes[IN_BYTES];
} Records;

typedef struct {
    const uint64_t *pieces;
    int64_t count, index;
    uint64_t offset;
} Place;

static unsigned char *place_at(const Place *place) {
    return (unsigned char *)(uintptr_t)(place->pieces[2 * place->index] + place->offset);
}

static uint64_t place_left(const Place *place) { return place->pieces[2 * place->index + 1] - place->offset; }

static int at_end(const Place *place) { return place->index >= place->count; }

static void skip(Place *place, uint64_t bytes) {
    while (bytes && !at_end(place)) {
        uint64_t left = place_left(place), step = bytes < left ? bytes : left;
        place->offset += step;
        bytes -= step;
        if (step == left) {
            place->index++;
            place->offset = 0;
        }
    }
}

/* Copies between `buffer` and the pieces; returns how many bytes, and moves the place on. */
static uint64_t copy(Place *place, unsigned char *buffer, uint64_t most, int is_gather) {
    uint64_t done = 0;
    while (done < most && !at_end(place)) {
        uint64_t left = place_left(place), step = most - done < left ? most - done : left;
        if (is_gather)
            memcpy(buffer + done, place_at(place), step);
        else
            memcpy(place_at(place), buffer + done, step);
        skip(place, step);
        done += step;
    }
    return done;
}

Records *open_records(const Crypto *crypto, uint64_t most_records) {
    Records *records = malloc(sizeof *records);
    if (!records) return NULL;
    records->crypto = *crypto;
    memset(&records->in, 0, sizeof records->in);
    memset(&records->out, 0, sizeof records->out);
    records->most_records = most_records;
    records->failed = 0;
    records->in_at = records->in_end = records->plain_at = records->plain_end = 0;
    records->out_at = records->out_end = records->out_plain = 0;
    records->in.context = crypto->context();
    records->out.context = crypto->context();
    return records;
}

void close_records(Records *records) {
    records->crypto.release(records->in.context);
    records->crypto.release(records->out.context);
    explicit_bzero(records, sizeof *records);
    free(records);
}

int set_key(Records *records, int is_out, const void *cipher, const unsigned char *key, const unsigned char *iv) {
    Half *half = is_out ? &records->out : &records->in;
    half->sequence = 0;
    if (!is_out && (records->failed == UPDATED || records->failed == UPDATE_REQUESTED)) records->failed = 0;
    memcpy(half->iv, iv, sizeof half->iv);
    return half->context && records->crypto.init(half->context, cipher, NULL, key, iv, is_out) == 1;
}

static int start(Records *records, Half *half, const unsigned char *head, int is_out) {
    unsigned char nonce[12];
    int ignored;
    memcpy(nonce, half->iv, sizeof nonce);
    for (int n = 0; n < 8; n++) nonce[11 - n] ^= (unsigned char)(half->sequence >> (8 * n));
    half->sequence++;
    return records->crypto.init(half->context, NULL, NULL, NULL, nonce, is_out) == 1 &&
           records->crypto.update(half->context, NULL, &ignored, head, HEAD) == 1;
}

/* Appends one record to what is to be sent. */
static int seal(Records *records, const unsigned char *data, int size, unsigned char type) {
    unsigned char *head = records->out_bytes + records->out_end, *body = head + HEAD;
    int body_bytes = size + 1 + TAG, done, ignored;
    head[0] = DATA;
    head[1] = head[2] = 3;
    head[3] = (unsigned char)(body_bytes >> 8);
    head[4] = (unsigned char)body_bytes;
    Crypto *crypto = &records->crypto;
    void *context = records->out.context;
    if (!start(records, &records->out, head, 1) || crypto->update(context, body, &done, data, size) != 1 ||
        crypto->update(context, body + size, &done, &type, 1) != 1 || crypto->final(context, body + size + 1, &ignored) != 1 ||
        crypto->control(context, GET_TAG, TAG, body + size + 1) != 1)
        return 0;
    records->out_end += HEAD + body_bytes;
    return 1;
}

/* Sends what is sealed; 0, or an errno below zero. */
static int64_t flush(Records *records, int fd) {
    while (records->out_at < records->out_end) {
        ssize_t sent = send(fd, records->out_bytes + records->out_at, (size_t)(records->out_end - records->out_at),
                            MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            return -errno;
        }
        records->out_at += sent;
    }
    records->out_at = records->out_end = 0;
    return 0;
}

/* Queues the message after which the next key of this side counts; what was queued before must have been sent. */
int queue_key_update(Records *records) {
    static const unsigned char message[5] = {KEY_UPDATE, 0, 0, 1, 0};
    return records->out_end == 0 && seal(records, message, sizeof message, HANDSHAKE);
}

/* How many bytes of the pieces were sent; below zero an errno, or NO_KEYS where the key of this side is used up. */
int64_t send_records(Records *records, int fd, const uint64_t *pieces, int64_t count, uint64_t most) {
    Place place = {pieces, count, 0, 0};
    int64_t moved = 0;
    for (;;) {
        int64_t error = flush(records, fd);
        if (error) return moved ? moved : error;
        skip(&place, (uint64_t)records->out_plain);
        moved += records->out_plain;
        records->out_plain = 0;
        if (at_end(&place) || (uint64_t)moved >= most) return moved;
        if (records->out.sequence >= records->most_records) return moved ? moved : NO_KEYS;
        Place next = place;
        for (int n = 0; n < OUT_RECORDS && !at_end(&next); n++) {
            const unsigned char *data = place_at(&next);
            uint64_t size = RECORD;
            if (place_left(&next) >= RECORD) {
                skip(&next, RECORD);
            } else {
                data = records->gathered;
                size = copy(&next, records->gathered, RECORD, 1);
            }
            if (!seal(records, data, (int)size, DATA)) return BAD_RECORD;
            records->out_plain += (int64_t)size;
        }
    }
}

/* The content of a record that is no data. */
static int64_t other(Records *records, unsigned char type, const unsigned char *data, int64_t size) {
    int64_t result = UNEXPECTED;
    if (type == ALERT && size == 2) result = ALERTED - data[1];
    /* What follows has the next key: nothing more is opened before the caller has set it. */
    if (type == HANDSHAKE && size == 5 && data[0] == KEY_UPDATE && data[3] == 1 && data[4] <= 1)
        result = data[4] ? UPDATE_REQUESTED : UPDATED;
    return records->failed = result;
}

/* Opens the record at in_at; data goes to the place where it holds all of it, else it stays as plaintext to be taken. */
static int64_t open_one(Records *records, Place *place, int64_t body_bytes) {
    unsigned char *head = records->in_bytes + records->in_at, *body = head + HEAD, last, *data;
    int size = (int)body_bytes - TAG - 1, done, ignored;
    int is_direct = size >= DIRECT && !at_end(place) && place_left(place) >= (uint64_t)size;
    Crypto *crypto = &records->crypto;
    void *context = records->in.context;
    data = is_direct ? place_at(place) : body;
    if (!start(records, &records->in, head, 0) || crypto->control(context, SET_TAG, TAG, body + size + 1) != 1 ||
        crypto->update(context, data, &done, body, size) != 1 || crypto->update(context, &last, &done, body + size, 1) != 1 ||
        crypto->final(context, body, &ignored) != 1)
        return records->failed = BAD_RECORD;
    records->in_at += HEAD + body_bytes;
    if (is_direct) {
        /* Neither a message of that size, nor padding, comes from a peer of ours. */
        if (last != DATA) return records->failed = UNEXPECTED;
        skip(place, (uint64_t)size);
        return size;
    }
    while (!last && size > 0) last = data[--size];
    if (last != DATA) return other(records, last, data, size);
    records->plain_at = data - records->in_bytes;
    records->plain_end = records->plain_at + size;
    return 0;
}

/* Whether something can be taken without the socket. */
int has_pending(const Records *records) {
    if (records->plain_at < records->plain_end || records->failed) return 1;
    const unsigned char *head = records->in_bytes + records->in_at;
    int64_t have = records->in_end - records->in_at;
    return have >= HEAD && have >= HEAD + (head[3] << 8 | head[4]);
}

/* How many bytes of the pieces were filled, 0 when the other end has closed; below zero an errno or one of the results above. */
int64_t receive_records(Records *records, int fd, const uint64_t *pieces, int64_t count, uint64_t most) {
    Place place = {pieces, count, 0, 0};
    int64_t moved = 0;
    while (!at_end(&place) && (uint64_t)moved < most) {
        if (records->plain_at < records->plain_end) {
            uint64_t taken = copy(&place, records->in_bytes + records->plain_at,
                                  (uint64_t)(records->plain_end - records->plain_at), 0);
            records->plain_at += (int64_t)taken;
            moved += (int64_t)taken;
            continue;
        }
        /* What came before it counts first; the next call returns it again. */
        if (records->failed) return moved ? moved : records->failed;
        unsigned char *head = records->in_bytes + records->in_at;
        int64_t have = records->in_end - records->in_at;
        if (have >= HEAD) {
            int64_t body_bytes = head[3] << 8 | head[4];
            if (head[0] != DATA || head[1] != 3 || head[2] != 3 || body_bytes <= TAG || body_bytes > MOST_BODY) {
                records->failed = head[0] == DATA ? BAD_RECORD : UNEXPECTED;
                continue;
            }
            if (have >= HEAD + body_bytes) {
                int64_t opened = open_one(records, &place, body_bytes);
                if (opened > 0) moved += opened;
                continue;
            }
        }
        if (records->in_at) {
            memmove(records->in_bytes, head, (size_t)have);
            records->in_at = 0;
            records->in_end = have;
        }
        ssize_t received = recv(fd, records->in_bytes + records->in_end, (size_t)(IN_BYTES - records->in_end), MSG_DONTWAIT);
        if (received < 0 && errno == EINTR) continue;
        if (received <= 0) return moved ? moved : received < 0 ? -errno : 0;
        records->in_end += received;
    }
    return moved;
}
