/* Pieces of memory as `sendmsg` and `recvmsg` take them: laid out from what a request of transport tcp names, sent or filled, and left
   behind as their bytes are moved. Between two requests so many bytes pass through the caches that nothing of what a request needs is
   still there: what counts is how much code runs, not how often. So each step is one call, which does what is the rule, and leaves
   everything else, with nothing changed, to those who can name what is wrong. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define MOST_PIECES 1024 /* what one system call takes on Linux */
#define FLAGS (MSG_DONTWAIT | MSG_NOSIGNAL)

/* The messages, as tcp/wire.py has them: in little-endian order, which has to be that of the processor. */
struct request_head {
    char mark[4];
    uint32_t count;
    uint64_t number;
};

struct reply_head {
    char mark[4];
    uint32_t status;
    uint64_t number, payload_bytes;
};

struct piece {
    uint64_t offset, bytes;
};

static const char request_mark[4] = "READ", reply_mark[4] = "DATA";

/* What is left to be moved, in room that the caller has made. */
struct vectors {
    struct iovec *next;
    uint64_t left, total_bytes, done_bytes;
    struct reply_head head;
    uint64_t unused;
    struct iovec pieces[];
};

_Static_assert(sizeof(struct iovec) == 16 && sizeof(struct vectors) == 64 && sizeof(struct reply_head) == 24, "the caller counts on it");
_Static_assert(sizeof(struct request_head) == 16 && sizeof(struct piece) == 16, "this is how they are sent");

static int is_little_endian(void) {
    return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
}

/* Begin anew, with the head of a reply as the first piece, of which the bytes are not known yet. */
static void begin(struct vectors *vectors, uint64_t number) {
    vectors->head = (struct reply_head){.number = number};
    memcpy(vectors->head.mark, reply_mark, sizeof reply_mark);
    vectors->pieces[0] = (struct iovec){&vectors->head, sizeof vectors->head};
    vectors->next = vectors->pieces;
    vectors->left = 1;
    vectors->total_bytes = sizeof vectors->head;
    vectors->done_bytes = 0;
}

static inline void append(struct vectors *vectors, uint64_t address, uint64_t bytes) {
    if (!bytes) return; /* no moved byte would leave it behind */
    vectors->pieces[vectors->left++] = (struct iovec){(void *)(uintptr_t)address, bytes};
    vectors->head.payload_bytes += bytes;
    vectors->total_bytes += bytes;
}

/* Lay out the reply to request `number`: its head, and those pieces of a region that the request names, `count` of them, as they came
   over the wire. There is room for as many and one more. Returns whether that is done: not where a piece leaves the region, nor where
   all have more than `most_bytes`. */
int lay_out_reply(uint64_t number, const char *named, uint64_t count, uint64_t address, uint64_t region_bytes, uint64_t most_bytes,
                  struct vectors *reply) {
    uint64_t left = most_bytes;
    if (!is_little_endian()) return 0;
    begin(reply, number);
    for (; count; count--, named += sizeof(struct piece)) {
        struct piece piece;
        memcpy(&piece, named, sizeof piece);
        if (piece.bytes > left || piece.bytes > region_bytes || piece.offset > region_bytes - piece.bytes) return 0;
        left -= piece.bytes;
        append(reply, address + piece.offset, piece.bytes);
    }
    return 1;
}

/* Lay out request `number` for the source side of some runs. There is room for one piece and, behind it, for the message. `row` and
   `column` are the steps, in numbers, from one run to the next and from one of its numbers to the next. Returns how many bytes the runs
   have; below 0 where it is not done. */
int64_t lay_out_request(uint64_t number, const uint64_t *runs, long row, long column, long count, struct vectors *request) {
    struct request_head head = {.count = (uint32_t)count, .number = number};
    char *message = (char *)&request->pieces[1], *out = message + sizeof head;
    uint64_t payload_bytes = 0;
    if (!is_little_endian()) return -1;
    memcpy(head.mark, request_mark, sizeof request_mark);
    memcpy(message, &head, sizeof head);
    for (; count > 0; count--, runs += row, out += sizeof(struct piece)) {
        struct piece piece = {runs[0], runs[2 * column]};
        memcpy(out, &piece, sizeof piece);
        payload_bytes += piece.bytes;
    }
    request->pieces[0] = (struct iovec){message, (size_t)(out - message)};
    request->next = request->pieces;
    request->left = 1;
    request->total_bytes = (uint64_t)(out - message);
    request->done_bytes = 0;
    return (int64_t)payload_bytes;
}

/* Lay out the target side of some runs, which were checked when they were posted, for the reply to request `number`: what is left to be
   moved are their bytes, before which lies the head that the reply is to have. There is room for as many pieces and one more. Returns
   whether that is done. */
int lay_out_target(uint64_t number, const uint64_t *runs, long row, long column, long count, uint64_t address, struct vectors *target) {
    if (!is_little_endian()) return 0;
    begin(target, number);
    for (; count > 0; count--, runs += row) append(target, address + runs[column], runs[2 * column]);
    target->next++;
    target->left--;
    target->total_bytes -= sizeof target->head;
    return 1;
}

/* Leave the next `bytes` bytes behind; there are so many. */
void leave_behind(struct vectors *vectors, uint64_t bytes) {
    struct iovec *next = vectors->next;
    vectors->done_bytes += bytes;
    for (; vectors->left && bytes >= next->iov_len; next++, vectors->left--) bytes -= next->iov_len;
    vectors->next = next;
    if (!vectors->left) return;
    next->iov_base = (char *)next->iov_base + bytes;
    next->iov_len -= bytes;
}

static struct msghdr message_of(struct iovec *pieces, uint64_t count) {
    return (struct msghdr){.msg_iov = pieces, .msg_iovlen = count < MOST_PIECES ? count : MOST_PIECES};
}

/* Send (`sends`), or receive, as much of these pieces as the socket takes, or has, now, and leave it behind. Returns how many bytes that
   were; below 0 it is the error. */
int64_t move_vectors(int fd, struct vectors *vectors, int sends) {
    struct msghdr message = message_of(vectors->next, vectors->left);
    ssize_t moved = sends ? sendmsg(fd, &message, FLAGS) : recvmsg(fd, &message, FLAGS);
    if (moved < 0) return -errno;
    leave_behind(vectors, (uint64_t)moved);
    return moved;
}

/* Take the next request off a socket, if it is one to read, and whole, and begin to send the reply. `most_pieces` and `most_bytes` are
   what a request may name, `scratch` has room for the largest one, and `reply` for the reply's head and `room` pieces. Returns how many
   bytes the request had. 0, and it is still to be received, where it is anything else; the same below 0, which is how many pieces there
   has to be room for. An error of the socket is found by the next call. */
int64_t answer_read(int fd, char *scratch, uint64_t most_pieces, uint64_t most_bytes, uint64_t address, uint64_t region_bytes,
                    struct vectors *reply, uint64_t room) {
    struct request_head head;
    ssize_t seen = recv(fd, scratch, sizeof head + most_pieces * sizeof(struct piece), MSG_PEEK | FLAGS);
    if (seen < (ssize_t)sizeof head) return 0;
    memcpy(&head, scratch, sizeof head);
    if (memcmp(head.mark, request_mark, sizeof request_mark) || !is_little_endian()) return 0;
    ssize_t whole = (ssize_t)(sizeof head + head.count * sizeof(struct piece));
    if (!head.count || head.count > most_pieces || seen < whole) return 0;
    if (head.count > room) return -(int64_t)head.count;
    if (!lay_out_reply(head.number, scratch + sizeof head, head.count, address, region_bytes, most_bytes, reply)) return 0;
    /* The bytes that were seen, which no other thread takes: if they are gone, the connection cannot go on. */
    if (recv(fd, scratch, (size_t)whole, FLAGS) != whole) return INT64_MIN;
    move_vectors(fd, reply, 1);
    return whole;
}

/* Take the head of a reply off a socket, if it is the one that `target` was laid out for, and as many of the bytes behind it as have
   come. Returns how many bytes that were, with the head; 0, and all is still to be received, where the head is another, or not whole, or
   the other end has closed; below 0 it is the error. */
int64_t begin_reply(int fd, struct vectors *target) {
    struct reply_head head;
    if (target->next != target->pieces + 1) return 0; /* some of it was received before */
    ssize_t seen = recv(fd, &head, sizeof head, MSG_PEEK | FLAGS);
    if (seen < 0) return -errno;
    if (seen != sizeof head || memcmp(&head, &target->head, sizeof head)) return 0;
    struct msghdr message = message_of(target->pieces, target->left + 1);
    ssize_t moved = recvmsg(fd, &message, FLAGS);
    if (moved < 0) return -errno;
    if (moved < (ssize_t)sizeof head) return -EPROTO;
    leave_behind(target, (uint64_t)moved - sizeof head);
    return moved;
}
