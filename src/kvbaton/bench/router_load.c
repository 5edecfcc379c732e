/* Instances without a model, and a load generator, for `kvbaton bench router`: neither must be what limits a router.

   router_load serve PORT             answers every request: JSON, or 20 events in 20 writes when the body asks for a stream
   router_load drive PORT CLIENTS SECONDS json|stream PROMPT_BYTES
                                      prints one JSON object: requests, errors, seconds, latencies in microseconds */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS 20
#define MAX_FD 65536
#define MAX_SAMPLES (1 << 22)

typedef struct { char *data; size_t used, room; double sent_at; int chunked; long body_left; int in_body; char tail[5]; } Conn;
static Conn *conns[MAX_FD];

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static void die(const char *what) { perror(what); exit(2); }

static Conn *conn_of(int fd) {
    if (fd >= MAX_FD) { fprintf(stderr, "too many files\n"); exit(2); }
    if (!conns[fd]) conns[fd] = calloc(1, sizeof(Conn));
    return conns[fd];
}
static void reserve(Conn *c, size_t more) {
    if (c->used + more <= c->room) return;
    c->room = (c->used + more) * 2;
    c->data = realloc(c->data, c->room);
}
static const char *header(const char *head, size_t size, const char *name) {
    size_t length = strlen(name);
    for (const char *p = head; p + length < head + size; p++)
        if (p[-1] == '\n' && strncasecmp(p, name, length) == 0) return p + length;
    return NULL;
}
static int send_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN || errno == EINTR) continue;
            return -1;
        }
        data += sent; size -= sent;
    }
    return 0;
}

static char json_answer[1024], stream_head[256], stream_event[256];
static size_t json_size, head_size, event_size;

static void make_answers(void) {
    const char *body = "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"hello\",\"finish_reason\":\"length\"}],"
        "\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1},\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
        "\"remote_engine_id\":\"e\",\"remote_block_ids\":[1,2,3],\"remote_host\":\"127.0.0.1\",\"remote_port\":6301,\"tp_size\":1,\"transfer_id\":\"tx-1\"}}";
    json_size = sprintf(json_answer, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
    head_size = sprintf(stream_head, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
    const char *event = "data: {\"id\":\"cmpl-1\",\"choices\":[{\"index\":0,\"text\":\" hello\",\"finish_reason\":null}]}\n\n";
    event_size = sprintf(stream_event, "%zx\r\n%s\r\n", strlen(event), event);
}
static int answer(int fd, const char *body, size_t size) {
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    if (!memmem(body, size, "\"stream\":true", 13) && !memmem(body, size, "\"stream\": true", 14)) return send_all(fd, json_answer, json_size);
    if (send_all(fd, stream_head, head_size)) return -1;
    for (int i = 0; i < EVENTS; i++)
        if (send_all(fd, stream_event, event_size)) return -1;
    return send_all(fd, end, sizeof end - 1);
}
/* One complete request at the start of the buffer: its length, or 0. */
static size_t request_size(Conn *c, size_t *body_at) {
    char *end = memmem(c->data, c->used, "\r\n\r\n", 4);
    if (!end) return 0;
    *body_at = end - c->data + 4;
    const char *length = header(c->data, *body_at, "content-length:");
    size_t size = *body_at + (length ? strtoul(length, NULL, 10) : 0);
    return size <= c->used ? size : 0;
}
static int serve_data(int fd, Conn *c) {
    for (;;) {
        reserve(c, 65536);
        ssize_t got = recv(fd, c->data + c->used, 65536, MSG_DONTWAIT);
        if (got == 0) return -1;
        if (got < 0) return errno == EAGAIN ? 0 : -1;
        c->used += got;
        size_t body_at, size;
        while ((size = request_size(c, &body_at))) {
            if (answer(fd, c->data + body_at, size - body_at)) return -1;
            memmove(c->data, c->data + size, c->used - size);
            c->used -= size;
        }
    }
}
static void serve(int port) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, poll = epoll_create1(0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&where, sizeof where) || listen(listener, 4096)) die("bind");
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event);
    make_answers();
    for (;;) {
        int count = epoll_wait(poll, ready, 256, -1);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                int client = accept(listener, NULL, NULL);
                if (client < 0) continue;
                setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                conn_of(client)->used = 0;
                struct epoll_event more = {.events = EPOLLIN, .data.fd = client};
                epoll_ctl(poll, EPOLL_CTL_ADD, client, &more);
            } else if (serve_data(fd, conn_of(fd))) {
                close(fd);
            }
        }
    }
}

static char *request; static size_t request_bytes;
static float *samples; static long sample_count, errors;

static void make_request(int port, int is_stream, long prompt_bytes) {
    char *prompt = malloc(prompt_bytes + 1), *body = malloc(prompt_bytes + 256);
    memset(prompt, 'x', prompt_bytes); prompt[prompt_bytes] = 0;
    int size = sprintf(body, "{\"model\":\"m\",\"prompt\":\"%s\",\"max_tokens\":16,\"temperature\":0,\"stream\":%s}", prompt, is_stream ? "true" : "false");
    request = malloc(size + 512);
    request_bytes = sprintf(request, "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", port, size, body);
}
static void dial(int poll, int port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (fd < 0 || connect(fd, (struct sockaddr *)&where, sizeof where)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    Conn *c = conn_of(fd);
    c->used = 0; c->in_body = 0;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
    c->sent_at = now();
    if (send_all(fd, request, request_bytes)) errors++;
}
/* Whether the answer is complete; -1 when it is none. */
static int take(Conn *c, const char *data, size_t size) {
    if (!c->in_body) {
        reserve(c, size + 1);
        memcpy(c->data + c->used, data, size);
        c->used += size;
        char *end = memmem(c->data, c->used, "\r\n\r\n", 4);
        if (!end) return 0;
        size_t head = end - c->data + 4;
        if (strncmp(c->data, "HTTP/1.1 200", 12)) return -1;
        const char *length = header(c->data, head, "content-length:");
        c->chunked = length == NULL;
        c->body_left = length ? strtol(length, NULL, 10) : 0;
        c->in_body = 1;
        memset(c->tail, 0, 5);
        data = c->data + head; size = c->used - head;
        c->used = 0;
    }
    if (!c->chunked) { c->body_left -= size; return c->body_left <= 0; }
    char joined[10];
    size_t last = size < 5 ? size : 5;
    memcpy(joined, c->tail, 5); memcpy(joined + 5, data + size - last, last);
    memcpy(c->tail, joined + last, 5);
    return memcmp(c->tail, "0\r\n\r\n", 5) == 0;
}
static int by_size(const void *a, const void *b) { float x = *(float *)a, y = *(float *)b; return (x > y) - (x < y); }

static int drive(int port, int clients, double seconds, int is_stream, long prompt_bytes) {
    int poll = epoll_create1(0);
    make_request(port, is_stream, prompt_bytes);
    samples = malloc(sizeof(float) * MAX_SAMPLES);
    for (int i = 0; i < clients; i++) dial(poll, port);
    double begun = now(), end = begun + seconds, at = begun;
    struct epoll_event ready[256];
    static char buffer[262144];
    while ((at = now()) < end) {
        int count = epoll_wait(poll, ready, 256, 100);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            Conn *c = conn_of(fd);
            ssize_t got = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
            if (got < 0 && errno == EAGAIN) continue;
            int state = got <= 0 ? -1 : take(c, buffer, got);
            if (state == 0) continue;
            at = now();
            if (state < 0) {
                errors++; close(fd);
                if (errors > 10000) end = 0; else dial(poll, port);
                continue;
            }
            if (sample_count < MAX_SAMPLES) samples[sample_count++] = (at - c->sent_at) * 1e6;
            c->in_body = 0; c->used = 0; c->sent_at = at;
            if (send_all(fd, request, request_bytes)) errors++;
        }
    }
    qsort(samples, sample_count, sizeof(float), by_size);
    double total = now() - begun;
    long last = sample_count ? sample_count - 1 : 0;
    printf("{\"requests\":%ld,\"errors\":%ld,\"seconds\":%.6f,\"p50_us\":%.1f,\"p99_us\":%.1f,\"max_us\":%.1f}\n", sample_count, errors, total,
           sample_count ? samples[last / 2] : 0, sample_count ? samples[last * 99 / 100] : 0, sample_count ? samples[last] : 0);
    return 0;
}
int main(int argc, char **argv) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files); files.rlim_cur = files.rlim_max; setrlimit(RLIMIT_NOFILE, &files);
    if (argc == 3 && !strcmp(argv[1], "serve")) serve(atoi(argv[2]));
    if (argc == 7 && !strcmp(argv[1], "drive")) return drive(atoi(argv[2]), atoi(argv[3]), atof(argv[4]), !strcmp(argv[5], "stream"), atol(argv[6]));
    fprintf(stderr, "usage: router_load serve PORT | drive PORT CLIENTS SECONDS json|stream PROMPT_BYTES\n");
    return 2;
}
